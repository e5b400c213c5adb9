"""Products of BF16 matrices on CPUs that have no instructions for them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def multiplies_bf16() -> bool:
    """Whether oneDNN multiplies BF16 matrices on this CPU, which takes AVX-512 on x86.

    Torch's own loops, which it falls back to, take 10 to 60 times as long as a GEMM in FP32.
    """
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def multiplicable(*operands: Tensor) -> tuple[Tensor, ...]:
    """Operands of one dtype in which their device multiplies them fast: FP32 in place of BF16 on such a CPU.

    FP32 holds BF16 numbers exactly, and their products are summed in it anyway. The result has to be rounded to BF16.
    """
    first = operands[0]
    if first.dtype == torch.bfloat16 and first.device.type == "cpu" and not multiplies_bf16():
        return tuple(operand.float() for operand in operands)
    return operands
