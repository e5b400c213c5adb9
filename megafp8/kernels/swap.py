"""A kernel that swaps the first two dimensions of a tensor, whose rows it copies at the speed of memory.

PyTorch's copy of such a tensor takes numbers one by one: 92 us for 64 MiB on an H200 (benchmarks/results/attention.md).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, MAX_COLUMNS, NUM_WARPS = 8192, 1024, 8  # of a program: 32 numbers a thread


@triton.jit
def swap_kernel(source, target, first, second, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """source [first, second, width] to target [second, first, width]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # of the target
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < first * second)[:, None] & (column < width)[None, :]
    origin = (row % first) * second + row // first
    # int64: offsets may exceed 2^31.
    numbers = tl.load(source + (origin.to(tl.int64) * width)[:, None] + column[None, :], mask=mask)
    tl.store(target + (row.to(tl.int64) * width)[:, None] + column[None, :], numbers, mask=mask)


class Swap(torch.autograd.Function):
    """The kernel as a differentiable function."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return swapped(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return swapped(gradients[0])


def swapped(tensor: Tensor) -> Tensor:
    """A copy."""
    first, second, *rest = tensor.shape
    source, target = tensor.contiguous(), tensor.new_empty(second, first, *rest)
    width = source[0, 0].numel()
    columns = min(MAX_COLUMNS, triton.next_power_of_2(width))
    rows = TILE // columns
    grid = (triton.cdiv(first * second, rows), triton.cdiv(width, columns))
    swap_kernel[grid](source, target, first, second, width, ROWS=rows, COLUMNS=columns, num_warps=NUM_WARPS)
    return target


def swap(tensor: Tensor) -> Tensor:
    """[A, B, ...] as a contiguous [B, A, ...].

    Args:
        tensor: floating point, with at least one number; copied first if it is not contiguous.
    """
    return Swap.apply(tensor)
