"""`--fp8-saved-activations`: what norms and activation functions keep for the backward pass becomes FP8 codes.

The forward pass is unchanged. Autograd's hooks for saved tensors pack the input of a norm or of an activation function,
and unpack it in the backward pass. All else that is saved, such as statistics of norms and weights, passes through.

A norm's input is the residual stream. Transformer Engine's layers have norm and linear in one function: only the tensor
at the address of the module's input is packed, not the linear's operands. Its fused MLP is one function for norm,
linears and activation, and notes what the activation saves. Other MLPs run in three parts, so that the tensors of the
linears are not seen by the hooks. Activation functions that save more than their input are computed once more in the
backward pass, as the fused ones do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Optional, Union

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megafp8.config.saved_activations import ACTIVATION, NORM
from megafp8.models.layer_specs import Norm
from megafp8.quantization.saved_activations import Packed, can_pack, pack, unpack

# Modules of a layer that normalize the residual stream, or the outputs that are added to it, if they have such a norm.
NORMS = (
    "input_layernorm", "self_attention.linear_qkv", "self_attn_bda.norm",
    "pre_mlp_layernorm", "mlp.linear_fc1", "mlp_bda.norm",
)  # fmt: skip
NORM_WEIGHTS = ("weight", "layer_norm_weight")


class Packing:
    """What one module packs in one forward pass: the tensors that are saved at marked addresses."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()
        self.num_packed = 0

    def mark(self, tensor: Tensor) -> None:
        """Pack a tensor, which lives until the end of the pass, if it is saved."""
        self.addresses.add(tensor.data_ptr())

    def pack(self, tensor: Tensor) -> Union[Tensor, Packed]:
        """The hook for a tensor that is saved."""
        if not can_pack(tensor) or tensor.data_ptr() not in self.addresses:
            return tensor
        self.num_packed += 1
        return pack(tensor)

    @contextmanager
    def hooks(self, name: str, num_tensors: int = 1) -> Iterator[None]:
        """Context in which marked tensors are packed as they are saved.

        Raises:
            RuntimeError: another number of tensors was packed: the module saves its input in another form, or twice.
        """
        self.addresses.clear()
        self.num_packed = 0
        with saved_tensors_hooks(self.pack, unpacked):
            yield
        if self.num_packed != num_tensors:
            raise RuntimeError(
                f"--fp8-saved-activations: {self.num_packed} instead of {num_tensors} saved tensors of {name} could be "
                "packed; leave out the flag"
            )


def unpacked(saved: Union[Tensor, Packed]) -> Tensor:
    """The hook for a saved tensor that is needed."""
    return unpack(saved) if isinstance(saved, Packed) else saved


def pack_saved_activations(chunk: nn.Module, parts: Collection[str]) -> None:
    """Let the layers of a chunk keep `parts`, of `norm` and `activation`, as codes."""
    for layer in (module for module in chunk.modules() if isinstance(module, TransformerLayer)):
        prefix = f"layers.{layer.layer_number - 1}."
        is_fused = hasattr(layer.mlp, "note_saved_by_activation")
        if NORM in parts:
            for name in NORMS:
                module = functools.reduce(lambda owner, each: getattr(owner, each, None), name.split("."), layer)
                if has_norm(module, layer.config.hidden_size) and not (is_fused and name.startswith("mlp.")):
                    pack_input(module, prefix + name)
        if is_fused:
            pack_in_fused_mlp(layer.mlp, prefix + "mlp", parts)
        elif ACTIVATION in parts and isinstance(layer.mlp, MLP):
            pack_activation(layer.mlp, prefix + "mlp")


def has_norm(module: Any, hidden_size: int) -> bool:
    """Whether a module is a norm over the hidden size, or begins with one."""
    weights = [getattr(module, name, None) for name in NORM_WEIGHTS]
    return any(weight is not None and weight.shape == (hidden_size,) for weight in weights)


def pack_input(norm: nn.Module, name: str) -> None:
    """Let a norm, or a linear with a norm, save its input as codes."""
    if isinstance(norm, Norm):
        norm.saves_input = True
    packing = Packing()

    def around(forward: Callable[..., Any], inputs: Tensor, *args: Any, **options: Any) -> Any:
        with packing.hooks(name):
            packing.mark(inputs)
            return forward(inputs, *args, **options)

    wrap_forward(norm, around)


def pack_activation(mlp: MLP, name: str) -> None:
    """Let an MLP save the input of its activation function as codes."""
    packing, activation = Packing(), between_linears(mlp)
    saves_input = mlp.config.bias_activation_fusion

    def around(forward: Callable[..., Any], inputs: Tensor, **unused: Any) -> Any:
        outputs, bias = mlp.linear_fc1(inputs)
        with packing.hooks(name):
            packing.mark(outputs)
            if saves_input:
                activated = activation(outputs, bias)
            else:
                activated = InputSaving.apply(activation, outputs, bias)
        return mlp.linear_fc2(activated)

    wrap_forward(mlp, around)


def between_linears(mlp: MLP) -> Callable[[Tensor, Optional[Tensor]], Tensor]:
    """What megatron-core's MLP computes between its linears, of the output and the bias of the first one."""

    def activation(outputs: Tensor, bias: Optional[Tensor]) -> Tensor:
        between = SimpleNamespace(
            config=mlp.config, activation_func=mlp.activation_func, linear_fc1=Returned(outputs, bias),
            linear_fc2=Passed(),
        )  # fmt: skip
        activated: Tensor = MLP.forward(between, outputs)[0]
        return activated

    return activation


class Returned(nn.Module):
    """In place of a linear: returns a given output and bias."""

    def __init__(self, *given: Optional[Tensor]):
        super().__init__()
        self.given = given

    def forward(self, _: Tensor) -> tuple[Optional[Tensor], ...]:
        """The given output and bias."""
        return self.given


class Passed(nn.Module):
    """In place of a linear: returns its input, and no bias."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, None]:
        """The input, and no bias."""
        return inputs, None


class InputSaving(torch.autograd.Function):
    """A function that saves nothing but its inputs, and is computed once more in the backward pass."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Optional[Tensor]) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        needs = ctx.needs_input_grad[1:]
        inputs = [each if each is None else each.detach() for each in ctx.saved_tensors]
        wanted = [
            each.requires_grad_() for each, needed in zip(inputs, needs, strict=True) if each is not None and needed
        ]
        with torch.enable_grad():
            found = iter(torch.autograd.grad(ctx.function(*inputs), wanted, grads))
        return None, *(next(found) if needed else None for needed in needs)


def pack_in_fused_mlp(mlp: Any, name: str, parts: Collection[str]) -> None:
    """Let Transformer Engine's fused MLP save the inputs of its norm and of its activation as codes."""
    packing = Packing()
    if ACTIVATION in parts:
        mlp.note_saved_by_activation = packing.mark

    def around(forward: Callable[..., Any], inputs: Tensor, *args: Any, **options: Any) -> Any:
        with packing.hooks(name, len(set(parts))):
            if NORM in parts:
                packing.mark(inputs)
            return forward(inputs, *args, **options)

    wrap_forward(mlp, around)


def wrap_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Replace `module.forward` by `around(module.forward, ...)` in passes that autograd records."""
    forward = module.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **options: Any) -> Any:
        return around(forward, *args, **options) if torch.is_grad_enabled() else forward(*args, **options)

    module.forward = wrapped
