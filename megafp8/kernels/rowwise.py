"""Kernels that cast to FP8 with one scale for each row and one for each column, in two launches.

    amaxes   read the tensor; raise the amax of each row and of each column to those of a tile; count non-finite values
    cast     read it again; codes [T, W] by the row scales, and codes by the column scales, transposed to [W, T]

Bytes for each BF16 number: 4 read, 2 written. Row scales lie along what fprop and dgrad sum over, column scales along
what wgrad sums over, and dgrad for weights. Hopper multiplies FP8 matrices only if both are contiguous along the sum.
The column-scaled codes are therefore written transposed, which otherwise would take a second pass over the tensor.
A program has one tile of 128 x 128.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.rounding import INFINITY, FormatSpec, cast_to_code, cast_to_words, quant_scale_of, without_nan
from megafp8.kernels.tiles import BLOCK_SIZE, load_tile, quarter_pointers, store_words, tile_offset


class RowwiseOutput(NamedTuple):
    """Codes of a tensor [T, W] with row scales or with column scales.

    Attributes:
        codes: uint8, [T, W] by rows or [W, T] by columns.
        scale_inv: FP32, dequantization scales: [T] or [W].
    """

    codes: Tensor
    scale_inv: Tensor


@triton.jit
def amaxes_kernel(inputs, row_amax, column_amax, num_non_finite, width, BLOCK_SIZE: tl.constexpr):
    """Raise row_amax [T] and column_amax [W] to those of this program's tile, and add its non-finite values to a count;
    each may be None."""
    tile_column, tile_row = tl.program_id(0), tl.program_id(1)
    # All tiles are complete, so that nothing is masked.
    y = load_tile(inputs + tile_offset(tile_row, tile_column, width, BLOCK_SIZE), width, BLOCK_SIZE)
    y0, y1, y2, y3 = tl.abs(y[0]), tl.abs(y[1]), tl.abs(y[2]), tl.abs(y[3])
    if num_non_finite is not None:
        number = tl.sum(  # a comparison with NaN is false
            tl.where(y0 < INFINITY, 0, 1) + tl.where(y1 < INFINITY, 0, 1)
            + tl.where(y2 < INFINITY, 0, 1) + tl.where(y3 < INFINITY, 0, 1)
        )  # fmt: skip
        # Nearly all tiles have none: the branch saves an atomic operation each.
        if number > 0:
            tl.atomic_add(num_non_finite, number.to(tl.int64))
    # Several tiles share a row, and several share a column. Amaxes start at 0, and the bits of magnitudes are ordered
    # as the numbers are, so that atomic maxima are exact in any order.
    if row_amax is not None:
        rows = row_amax + tile_row * BLOCK_SIZE + 4 * tl.arange(0, BLOCK_SIZE // 4)  # a quarter has every fourth row
        tl.atomic_max(rows, without_nan(tl.max(y0, axis=1)))
        tl.atomic_max(rows + 1, without_nan(tl.max(y1, axis=1)))
        tl.atomic_max(rows + 2, without_nan(tl.max(y2, axis=1)))
        tl.atomic_max(rows + 3, without_nan(tl.max(y3, axis=1)))
    if column_amax is not None:
        largest = tl.maximum(
            tl.maximum(without_nan(tl.max(y0, axis=0)), without_nan(tl.max(y1, axis=0))),
            tl.maximum(without_nan(tl.max(y2, axis=0)), without_nan(tl.max(y3, axis=0))),
        )
        tl.atomic_max(column_amax + tile_column * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE), largest)


@triton.jit
def store_quarter(
    y, row_amax, rows, row_scale_inv, tile_row, tile_column, width, overflow, QUARTER: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Cast one quarter [BLOCK_SIZE / 4, BLOCK_SIZE] of a tile with row scales. The first tile of a row stores the
    scale."""
    index = tile_row * BLOCK_SIZE + 4 * tl.arange(0, BLOCK_SIZE // 4) + QUARTER
    # All programs of a row of tiles compute the same scale from the final amax.
    scale = quant_scale_of(tl.load(row_amax + index), overflow, POWER_OF_TWO, FORMAT)
    tl.store(quarter_pointers(rows + tile_offset(tile_row, tile_column, width, BLOCK_SIZE), width, QUARTER, BLOCK_SIZE),
             cast_to_code(y * scale[:, None], FORMAT))  # fmt: skip
    if tile_column == 0:
        tl.store(row_scale_inv + index, tl.div_rn(1.0, scale))


@triton.jit
def cast_kernel(
    inputs, row_amax, column_amax, rows, row_scale_inv, columns, column_scale_inv, num_tokens, width, overflow,
    POWER_OF_TWO: tl.constexpr, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Codes of inputs [T, W] with row scales [T, W], with column scales [W, T], or both, and the inverse scales."""
    tile_column, tile_row = tl.program_id(0), tl.program_id(1)
    y = load_tile(inputs + tile_offset(tile_row, tile_column, width, BLOCK_SIZE), width, BLOCK_SIZE)
    if rows is not None:
        store_quarter(y[0], row_amax, rows, row_scale_inv, tile_row, tile_column, width, overflow, 0, POWER_OF_TWO,
                      FORMAT, BLOCK_SIZE)  # fmt: skip
        store_quarter(y[1], row_amax, rows, row_scale_inv, tile_row, tile_column, width, overflow, 1, POWER_OF_TWO,
                      FORMAT, BLOCK_SIZE)  # fmt: skip
        store_quarter(y[2], row_amax, rows, row_scale_inv, tile_row, tile_column, width, overflow, 2, POWER_OF_TWO,
                      FORMAT, BLOCK_SIZE)  # fmt: skip
        store_quarter(y[3], row_amax, rows, row_scale_inv, tile_row, tile_column, width, overflow, 3, POWER_OF_TWO,
                      FORMAT, BLOCK_SIZE)  # fmt: skip
    if columns is not None:
        # Every program of a column of tiles computes the same scales.
        index = tile_column * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        scale = quant_scale_of(tl.load(column_amax + index), overflow, POWER_OF_TWO, FORMAT)
        # Rows broadcast: the four rows of a word are in one column and have one scale.
        by_column = scale[None, :]
        words = cast_to_words(y[0] * by_column, y[1] * by_column, y[2] * by_column, y[3] * by_column, FORMAT)
        store_words(words, columns, tile_row, tile_column, num_tokens, BLOCK_SIZE)
        if tile_row == 0:
            tl.store(column_scale_inv + index, tl.div_rn(1.0, scale))


def cast(
    inputs: Tensor,
    spec: FormatSpec,
    *,
    rows: bool = True,
    columns: bool = True,
    is_power_of_two: bool = True,
    num_non_finite: Optional[Tensor] = None,
) -> tuple[Optional[RowwiseOutput], Optional[RowwiseOutput]]:
    """Cast a tensor with row scales, with column scales, or with both.

    Args:
        inputs: [T, W], BF16, FP16 or FP32, contiguous; T and W are multiples of 128.
        spec: the format.
        is_power_of_two: round scales down to powers of two; otherwise they are FP32 quotients.
        num_non_finite: int64 scalar, to which the number of non-finite values is added.

    Numerics: as `quantize.quantize_by_torch` with blocks (1, W) and (T, 1), byte for byte.
    """
    tokens, width = inputs.shape

    def empty(size: int, *shape: int) -> RowwiseOutput:
        codes = torch.empty(shape, dtype=torch.uint8, device=inputs.device)
        return RowwiseOutput(codes, torch.empty(size, device=inputs.device))

    by_row = empty(tokens, tokens, width) if rows else None
    by_column = empty(width, width, tokens) if columns else None
    amaxes = torch.zeros(tokens * rows + width * columns, device=inputs.device)
    row_amax, column_amax = amaxes[: tokens * rows], amaxes[tokens * rows :]
    tiles = (width // BLOCK_SIZE, tokens // BLOCK_SIZE)
    amaxes_kernel[tiles](
        inputs, row_amax if rows else None, column_amax if columns else None, num_non_finite, width,
        BLOCK_SIZE=BLOCK_SIZE, num_warps=8,
    )  # fmt: skip
    # On the same stream: all amaxes are final when it starts. Without fusion of multiply and add the codes are those of
    # torch, byte for byte.
    cast_kernel[tiles](
        inputs, row_amax, column_amax, *(by_row or (None, None)), *(by_column or (None, None)), tokens, width,
        torch.finfo(inputs.dtype).max, POWER_OF_TWO=is_power_of_two, FORMAT=spec, BLOCK_SIZE=BLOCK_SIZE, num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip
    return by_row, by_column
