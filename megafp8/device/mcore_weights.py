"""Teaches megatron-core 0.16.1 a kind of quantized weight besides Transformer Engine's, on CPU and GPU.

megatron-core keeps FP8 weights in buffers of bytes, gathers those, and leaves what differs from one kind of tensor to
another to a few functions. They are written for Transformer Engine's classes, are errors where it is not installed, and
have no place to add to. So they are wrapped here: our class goes to our function, another to what was there before.
`EVIDENCE` names the texts that make it necessary; a test fails when one is gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

from torch import Tensor

from megafp8.device.mcore_cpu import core

EVIDENCE = (
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
