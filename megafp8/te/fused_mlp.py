"""Transformer Engine's fused MLP, with the FP8 state of its linears, quantizing SwiGLU kernels, and a residual
connection whose gradient is added in the backward kernel of the norm."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Optional, TypeAlias

import transformer_engine.pytorch as te
from megatron.core.extensions.transformer_engine import TEFusedMLP
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformer_engine.common.recipe import DelayedScaling, Recipe
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.tensor import Quantizer

from megafp8.te.quantizers import empty_result, kernels_for

Hooks: TypeAlias = "OrderedDict[int, Callable[[Tensor], None]]"

# Directions of an operation, and the keys of their state in `fp8_meta`.
MODES = {"forward": "scaling_fwd", "backward": "scaling_bwd"}


class QuantizingSwiGLU(te.ops.SwiGLU):
    """SwiGLU that writes its result, and its gradient, quantized by rows and by columns at once.

    Where no kernel supports the quantizer or the shape, it is Transformer Engine's.
    """

    def _tex_swiglu_forward(self, input_: Tensor, quantizer: Optional[Quantizer]) -> Tensor:
        shape = [*input_.shape[:-1], input_.shape[-1] // 2]
        kernels = kernels_for(quantizer, shape)
        if kernels is None:
            return super()._tex_swiglu_forward(input_, quantizer)
        result, parts = empty_result(quantizer, shape, input_.dtype)
        kernels.swiglu(input_.flatten(0, -2), parts)
        return result

    def _tex_swiglu_backward(self, grad_output: Tensor, input_: Tensor, quantizer: Optional[Quantizer]) -> Tensor:
        # `grad_output` has half the columns of `input_`: the kernels tile it, so that its shape must be divisible.
        kernels = kernels_for(quantizer, grad_output.shape)
        if kernels is None:
            return super()._tex_swiglu_backward(grad_output, input_, quantizer)
        result, parts = empty_result(quantizer, input_.shape, input_.dtype)
        kernels.swiglu_backward(grad_output.flatten(0, -2), input_.flatten(0, -2), parts)
        return result


class FusedMLP(TEFusedMLP):
    """megatron-core's fused MLP with the state of delayed scaling in its linears, as without operation fusion.

    Checkpoints, statistics and rollback of a step find the state there, and a run can resume with or without fusion.

    Args:
        returns_input: return the pair (output, input) in place of the output, for `ResidualLayer` to add. Transformer
            Engine's backward kernel of the RMSNorm then adds the gradients of both.

    Attributes:
        is_split: run linear by linear, since one of them has another precision (`high_precision_fallback.py`).
        note_saved_by_activation: called with each tensor that the activation saves; set before the first forward pass.
    """

    is_split = False
    note_saved_by_activation: Optional[Callable[[Tensor], None]] = None

    def __init__(self, *args: Any, returns_input: bool = False, **options: Any):
        super().__init__(*args, **options)
        self.returns_input = returns_input
        self._result_hooks: Hooks = OrderedDict()
        self._gradient_hooks: Hooks = OrderedDict()

    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Any, Optional[Tensor]]:
        """The output [S, B, H], or the pair with the input, and the bias, if the caller adds it."""
        if not self.is_split:
            if self.has_other_weights():
                self._fused_impl = None  # megatron-core makes it again
            return super().forward(hidden_states, **options)
        output, bias = MLP.forward(self, hidden_states, **options)
        return (output, hidden_states) if self.returns_input else output, bias

    def register_result_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Call a function with every result of SwiGLU in high precision, the input of linear_fc2 [..., K].

        The kernels that quantize it run as well. Other activations call no hooks.
        """
        return register(hook, self._result_hooks)

    def register_gradient_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """The same with every gradient of SwiGLU's input, that of the output of linear_fc1 [..., 2 K]."""
        return register(hook, self._gradient_hooks)

    def has_other_weights(self) -> bool:
        """Whether the linears have other weights than the operations: gathered ones are set before each use."""
        return self._fused_impl is not None and of_linears(self._fused_impl[0])[0].weight is not self.linear_fc1.weight

    def _register_hooks_on_fused_impl(self, fused_impl: te.ops.Sequential) -> None:
        """Hooks of the linears are called with the operations. megatron-core adds those of the MLP itself, which run
        when it is called: they would run a second time, without tensors, and stay after their removal."""
        own = {name: getattr(self, name) for name in ("_forward_pre_hooks", "_forward_hooks")}
        for name in own:
            setattr(self, name, OrderedDict())
        super()._register_hooks_on_fused_impl(fused_impl)
        for name, hooks in own.items():
            setattr(self, name, hooks)

    def _make_fused_impl(self) -> te.ops.Sequential:
        fused = super()._make_fused_impl()
        if self.returns_input:
            fused.insert(0, te.ops.MakeExtraOutput())
        operations = of_linears(fused)
        for operation, linear in zip(operations, (self.linear_fc1, self.linear_fc2), strict=True):
            share_fp8_state(linear, operation)
        every = list(fused)
        activation = every[every.index(operations[1]) - 1]
        if self.note_saved_by_activation is not None:
            note_saved(activation, self.note_saved_by_activation)
        if isinstance(activation, te.ops.SwiGLU):
            call_hooks(activation, self._result_hooks, self._gradient_hooks)
        return fused


def of_linears(fused: te.ops.Sequential) -> list[te.ops.BasicLinear]:
    """The operations that multiply by a weight."""
    return [operation for operation in fused if isinstance(operation, te.ops.BasicLinear)]


def share_fp8_state(linear: TransformerEngineBaseModule, operation: te.ops.BasicLinear) -> None:
    """Let an operation use the scales and amax histories of the linear that it replaces.

    A linear has state for input, weight and output, and for the gradients of output and input; an operation uses the
    first two of the former and the first of the latter. The fuser drops an operation's state while quantization is
    off. The state that is kept here is then restored, and is listed only once among what Transformer Engine updates.
    """
    reset = operation.reset_recipe_state
    metas: dict[str, dict[str, Any]] = {}

    def reset_recipe_state(*, recipe: Optional[Recipe]) -> None:
        if isinstance(recipe, DelayedScaling):
            linear.fp8_meta["recipe"] = recipe
            linear.fp8_meta.setdefault("num_gemms", 1)  # a linear sets it in its first forward pass
            linear.init_fp8_meta_tensors(recipe)
            for mode, key in MODES.items():
                if metas.get(mode, {}).get(key) is not linear.fp8_meta[key]:
                    metas[mode] = {key: linear.fp8_meta[key]}
            operation._fp8_metas, operation._quantizers = metas, {mode: [] for mode in MODES}
        reset(recipe=recipe)

    operation.reset_recipe_state = reset_recipe_state


def note_saved(operation: te.ops.BasicOperation, note: Callable[[Tensor], None]) -> None:
    """Let an operation call `note` with each tensor that it saves for its backward pass."""
    forward = operation.op_forward

    def op_forward(ctx: Any, *args: Any, **options: Any) -> Tensor:
        output: Tensor = forward(ctx, *args, **options)
        for tensor in ctx.to_save or ():
            if tensor is not None:
                note(tensor)
        return output

    operation.op_forward = op_forward


def register(hook: Callable[[Tensor], None], hooks: Hooks) -> RemovableHandle:
    """Add a hook to those of a module."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def call_hooks(swiglu: te.ops.SwiGLU, result_hooks: Hooks, gradient_hooks: Hooks) -> None:
    """Let SwiGLU compute its results in high precision, too, while they have hooks."""
    forward, backward = swiglu._tex_swiglu_forward, swiglu._tex_swiglu_backward

    def hooked_forward(values: Tensor, quantizer: Optional[Quantizer]) -> Tensor:
        if result_hooks:
            result = forward(values, None)
            for hook in list(result_hooks.values()):
                hook(result)
        return forward(values, quantizer)

    def hooked_backward(gradient: Tensor, values: Tensor, quantizer: Optional[Quantizer]) -> Tensor:
        if gradient_hooks:
            result = backward(gradient, values, None)
            for hook in list(gradient_hooks.values()):
                hook(result)
        return backward(gradient, values, quantizer)

    swiglu._tex_swiglu_forward, swiglu._tex_swiglu_backward = hooked_forward, hooked_backward


class ResidualLayer(TransformerLayer):
    """A layer whose residual connection adds the input that the MLP returns (`FusedMLP.returns_input`).

    The gradients of the MLP and the residual are added inside the norm's backward kernel instead of by autograd, which
    saves a write and a read of the gradient.
    """

    def _forward_post_mlp(
        self, mlp_output_with_bias: tuple[tuple[Tensor, Tensor], Optional[Tensor]], residual: Tensor
    ) -> Tensor:
        (output, mlp_input), bias = mlp_output_with_bias
        return super()._forward_post_mlp((output, bias), mlp_input)


class SwiGLUFusedMLP(FusedMLP):
    """`FusedMLP` with `QuantizingSwiGLU`."""

    def _make_activation_op(self, *args: Any, **options: Any) -> te.ops.FusibleOperation:
        operation = super()._make_activation_op(*args, **options)
        return QuantizingSwiGLU() if type(operation) is te.ops.SwiGLU else operation
