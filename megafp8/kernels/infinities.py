"""A kernel that finds infinite values in a tensor whose scales another library made.

An infinite amax gives the scale 1, as does an amax of zero or of the format's largest number. Only blocks with this
scale are read, so that nearly every launch reads nothing but scales.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.rounding import flag_infinity, widen
from megafp8.kernels.tiles import BLOCK_SIZE


@triton.jit
def infinity_kernel(
    values, scale_inv, flag, num_rows, width, tile_stride, row_stride, column_stride, BLOCK_SIZE: tl.constexpr
):
    """Set the flag if a value of [num_rows, width] is infinite whose scale is 1. A program has one tile."""
    tile_column, tile_row = tl.program_id(0), tl.program_id(1)
    row, column = tile_row * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE), tile_column * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    at = scale_inv + tile_row * tile_stride + tl.arange(0, BLOCK_SIZE) * row_stride + tile_column * column_stride
    # Masked rows load 0, which is not 1: their values are not read.
    is_read = tl.load(at, mask=row < num_rows, other=0.0) == 1.0
    # Most programs end here, because few blocks have the scale 1.
    if tl.max(is_read.to(tl.int32)) == 1:
        offsets = row.to(tl.int64)[:, None] * width + column[None, :]
        x = tl.load(values + offsets, mask=is_read[:, None] & (column < width)[None, :], other=0.0)
        flag_infinity(tl.max(tl.abs(widen(x))), flag)


def flag_where_scale_is_one(values: Tensor, scale_inv: Tensor, flag: Tensor, rows_per_scale: int = 1) -> None:
    """Set a flag to 1 if a value is infinite.

    Args:
        values: [T, W], contiguous, BF16, FP16 or FP32.
        scale_inv: FP32 dequantization scales: [1]; or those of 1 x 128 blocks, [W / 128, at least T]; or those of
            128 x 128 blocks, [T / 128, at least W / 128], both rounded up.
        flag: int32 [1].
        rows_per_scale: 1 or 128, of blocks.
    """
    rows, width = values.shape
    strides = (0, 0, 0)
    if scale_inv.numel() > 1:
        strides = (BLOCK_SIZE, 1, scale_inv.stride(0)) if rows_per_scale == 1 else (scale_inv.stride(0), 0, 1)
    infinity_kernel[(triton.cdiv(width, BLOCK_SIZE), triton.cdiv(rows, BLOCK_SIZE))](
        values, scale_inv, flag, rows, width, *strides, BLOCK_SIZE=BLOCK_SIZE, num_warps=4
    )
