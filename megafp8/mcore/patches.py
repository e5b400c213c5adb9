"""Teaches megatron-core 0.16.1 a kind of quantized weight besides Transformer Engine's, on CPU and GPU.

megatron-core keeps FP8 weights in buffers of bytes, gathers those, and leaves what differs from one kind of tensor to
another to a few functions. They are written for Transformer Engine's classes, are errors where it is not installed, and
have no place to add to. So they are wrapped here: our class goes to our function, another to what was there before.
`EVIDENCE` names the texts that make it necessary; a test fails when one is gone.

Lets megatron-core 0.16.1's own linears add their weight gradient to `main_grad` without Apex, on a CPU too.

They look for the function in Apex's extension module, by name and at import. Without it the gradient is rounded to BF16
and added in a pass of its own. Where Apex is installed, its function is taken; it only adds, so that a buffer whose
first gradient of a step is to replace what is there (`optim.first_gradient`) is cleared before.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from torch import Tensor


@dataclass(frozen=True)
class Patch:
    """One change to what megatron-core sees.

    Attributes:
        name: short name, for messages and tests.
        reason: what goes wrong without it.
        evidence: pairs of a file below `megatron/core/` and a text in it that makes the patch necessary.
        apply: makes the change.
    """

    name: str
    reason: str
    evidence: tuple[tuple[str, str], ...]
    apply: Callable[[], None]


def core(module: str) -> types.ModuleType:
    """Import a module of megatron-core by its path below `megatron.core`."""
    return importlib.import_module(f"megatron.core.{module}")


WEIGHT_EVIDENCE = (
    ("fp8_utils.py", "FP8_TENSOR_CLASS = None"),
    ("fp8_utils.py", 'raise RuntimeError("Invalid Transformer Engine version for FP8 distributed optimizer")'),
    ("fp8_utils.py", 'if is_te_min_version("2.0"):\n        return fp8_tensor.dequantize()'),
    ("optimizer/distrib_optimizer.py", "from ..fp8_utils import dequantize_fp8_tensor"),
)
Quantize = Callable[[Sequence[Any], Sequence[Optional[Tensor]], Sequence[Optional[int]], Any], None]


def enter(kind: type, quantize: Quantize) -> None:
    """Let megatron-core take parameters of a class for FP8 weights. A later call takes the place of an earlier one.

    Args:
        kind: of parameters, with `codes.move_to(uint8 buffer)` and `dequantize()`.
        quantize: called after each update with all FP8 weights of an optimizer, the FP32 parts of them that this rank
            has (None: no part), the first element of each part, and the data-parallel group.
    """
    fp8_utils, known = core("fp8_utils"), original("fp8_utils", "FP8_TENSOR_CLASS")
    fp8_utils.FP8_TENSOR_CLASS = kind if known is None else (kind, known)
    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS = True
    ours: tuple[tuple[str, str, Callable[..., Any]], ...] = (
        ("fp8_utils", "_modify_underlying_storage_impl", lambda weight, buffer: weight.codes.move_to(buffer)),
        ("fp8_utils", "_quantize_param_shard_impl", lambda weights, *parts: quantize(weights, *parts[:3])),
        ("fp8_utils", "te_post_all_gather_processing", lambda weights: None),
        ("fp8_utils", "dequantize_fp8_tensor", lambda weight: weight.dequantize()),
        ("optimizer.distrib_optimizer", "dequantize_fp8_tensor", lambda weight: weight.dequantize()),
    )
    for module, name, function in ours:
        setattr(core(module), name, of_either_kind(kind, function, original(module, name)))


def of_either_kind(kind: type, ours: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose first argument, a tensor or a list of tensors of one kind, decides which of two it is."""

    def either(subject: Any, *rest: Any) -> Any:
        first = next(iter(subject), None) if isinstance(subject, (list, tuple)) else subject
        return (ours if isinstance(first, kind) else others)(subject, *rest)

    return either


@functools.cache
def original(module: str, name: str) -> Any:
    """What megatron-core itself has under a name; asked for before the name is given to anything else."""
    return getattr(core(module), name)


NAME = "fused_weight_gradient_mlp_cuda"
FUNCTIONS = ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16")
WGRAD_EVIDENCE = (
    ("tensor_parallel/layers.py", f"import {NAME}"),
    ("tensor_parallel/layers.py", f"{NAME}.wgrad_gemm_accum_fp32("),
)
AddGradient = Callable[[Tensor, Tensor, Tensor], None]
"""Of inputs [T, K], output gradients [T, N] and `main_grad` [N, K], which it changes."""


def provide(add_gradient: AddGradient) -> None:
    """Give megatron-core functions for linears with `gradient_accumulation_fusion`; a second call does nothing.

    Args:
        add_gradient: adds to a buffer, or replaces what is in it where `main_grad.is_overwritten`.
    """
    layers = core("tensor_parallel.layers")
    apex = getattr(layers, NAME, None)
    if not isinstance(apex, types.SimpleNamespace):
        functions = {name: add_gradient if apex is None else overwriting(getattr(apex, name)) for name in FUNCTIONS}
        setattr(layers, NAME, types.SimpleNamespace(**functions))


def overwriting(add: AddGradient) -> AddGradient:
    """Apex's function, for buffers that may be overwritten, too."""

    def add_or_overwrite(inputs: Tensor, grad_outputs: Tensor, main_grad: Tensor) -> None:
        if getattr(main_grad, "is_overwritten", False):
            main_grad.zero_()
        add(inputs, grad_outputs, main_grad)

    return add_or_overwrite
