"""Transformer Engine's fused MLP: its scales are its linears', SwiGLU has kernels that save a pass, and the backward
pass of its norm can take the residual's gradient in."""

from __future__ import annotations

from typing import Any, Optional

import transformer_engine.pytorch as te
from megatron.core.extensions.transformer_engine import TEFusedMLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from transformer_engine.common.recipe import DelayedScaling, Recipe
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.tensor import Quantizer

from megafp8.te.quantizers import empty_result, kernels_for

# An operation's passes, and what Transformer Engine calls their scales.
MODES = {"forward": "scaling_fwd", "backward": "scaling_bwd"}


class QuantizingSwiGLU(te.ops.SwiGLU):
    """SwiGLU that makes both FP8 copies of its result at once, each way, where there are kernels for the quantizer and
    the tensor; else Transformer Engine's."""

    def _tex_swiglu_forward(self, input_: Tensor, quantizer: Optional[Quantizer]) -> Tensor:
        shape = [*input_.shape[:-1], input_.shape[-1] // 2]
        kernels = kernels_for(quantizer, shape)
        if kernels is None:
            return super()._tex_swiglu_forward(input_, quantizer)
        result, parts = empty_result(quantizer, shape, input_.dtype)
        kernels.swiglu(input_.flatten(0, -2), parts)
        return result

    def _tex_swiglu_backward(self, grad_output: Tensor, input_: Tensor, quantizer: Optional[Quantizer]) -> Tensor:
        # The kernels go through tiles of the result's gradient.
        kernels = kernels_for(quantizer, grad_output.shape)
        if kernels is None:
            return super()._tex_swiglu_backward(grad_output, input_, quantizer)
        result, parts = empty_result(quantizer, input_.shape, input_.dtype)
        kernels.swiglu_backward(grad_output.flatten(0, -2), input_.flatten(0, -2), parts)
        return result


class FusedMLP(TEFusedMLP):
    """megatron-core's; what delayed scaling remembers is its linears', as without fused operations.

    A checkpoint, a look at scales or a step that is taken back find it there, and a run can go on with or without.

    Args:
        returns_input: beside its output, for `ResidualLayer` to add to: a pair in the output's place. Of the gradients
            of both, Transformer Engine's kernel of the RMSNorm's backward pass then makes the input's.
    """

    def __init__(self, *args: Any, returns_input: bool = False, **options: Any):
        super().__init__(*args, **options)
        self.returns_input = returns_input

    def _make_fused_impl(self) -> te.ops.Sequential:
        fused = super()._make_fused_impl()
        if self.returns_input:
            fused.insert(0, te.ops.MakeExtraOutput())
        operations = [operation for operation in fused if isinstance(operation, te.ops.BasicLinear)]
        for operation, linear in zip(operations, (self.linear_fc1, self.linear_fc2), strict=True):
            remember_in(linear, operation)
        return fused


def remember_in(linear: TransformerEngineBaseModule, operation: te.ops.BasicLinear) -> None:
    """Let an operation use the scales and amax histories of the linear that it stands for.

    A linear has those of input, weight and output, and of the gradients of output and input; an operation uses the
    first two and the first. The fuser forgets an operation's state when quantization is off for a while: what is
    remembered here comes back, and stands once in Transformer Engine's list of what a step updates.
    """
    reset, metas = operation.reset_recipe_state, {}

    def reset_recipe_state(*, recipe: Optional[Recipe]) -> None:
        if isinstance(recipe, DelayedScaling):
            linear.fp8_meta["recipe"] = recipe
            linear.fp8_meta.setdefault("num_gemms", 1)  # a linear that has not run yet does not know how many it has
            linear.init_fp8_meta_tensors(recipe)
            for mode, key in MODES.items():
                if metas.get(mode, {}).get(key) is not linear.fp8_meta[key]:
                    metas[mode] = {key: linear.fp8_meta[key]}
            operation._fp8_metas, operation._quantizers = metas, {mode: [] for mode in MODES}
        reset(recipe=recipe)

    operation.reset_recipe_state = reset_recipe_state


class ResidualLayer(TransformerLayer):
    """A layer whose residual around the MLP is what the MLP returns of its input (`FusedMLP.returns_input`).

    Autograd adds nothing then: the sum of both gradients is neither written by the norm nor read and added after it.
    """

    def _forward_post_mlp(
        self, mlp_output_with_bias: tuple[tuple[Tensor, Tensor], Optional[Tensor]], residual: Tensor
    ) -> Tensor:
        (output, mlp_input), bias = mlp_output_with_bias
        return super()._forward_post_mlp((output, bias), mlp_input)


class SwiGLUFusedMLP(FusedMLP):
    """With SwiGLU of our own."""

    def _make_activation_op(self, *args: Any, **options: Any) -> te.ops.FusibleOperation:
        operation = super()._make_activation_op(*args, **options)
        return QuantizingSwiGLU() if type(operation) is te.ops.SwiGLU else operation
