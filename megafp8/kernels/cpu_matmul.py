"""Products of BF16 tensors on CPUs that have no instructions for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@functools.cache
def multiplies_bf16() -> bool:
    """Whether oneDNN multiplies BF16 matrices on this CPU, which takes AVX-512 on x86.

    Torch's own loops, which it falls back to, take 10 to 60 times as long as a GEMM in FP32.
    """
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def widened_for_cpu(*operands: Tensor) -> tuple[Tensor, ...]:
    """BF16 operands as FP32 numbers on a CPU that is slow in BF16; else as they are.

    FP32 holds BF16 numbers exactly, and their products are summed in it anyway. The result has to be rounded to BF16.
    """
    if multiplies_bf16() or any(each.dtype != torch.bfloat16 or each.device.type != "cpu" for each in operands):
        return operands
    return tuple(operand.float() for operand in operands)


def multiplied(product: Callable[..., Tensor], *operands: Tensor, **options: Any) -> Tensor:
    """`product(*operands, **options)` in the dtype of the operands, rounded once where they are widened."""
    return product(*widened_for_cpu(*operands), **options).to(operands[0].dtype)
