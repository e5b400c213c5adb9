"""SwiGLU that writes its result in blockwise FP8, by rows and transposed, in one pass.

Of a tensor [T, W] a GEMM of the forward pass reads rows in blocks of 1 x 128, and one of the backward pass the
transpose in blocks of 128 tokens, quantized on its own. Both come from one reading of a tile of 128 x 128:

    row codes [T, W], row scales [W / 128, T], column codes [W, T], column scales [T / 128, W]

The result is rounded to the input's type before it is quantized, as if it had been written and read again. The way
back is Transformer Engine's: a kernel like this one is slower there (see `notes/LOG.md`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.fp8.triton_cast import cast_to_code
from megafp8.fp8.triton_rounding import Grid, quant_scale_of, without_nan

SIDE = 128
NUM_WARPS = 8  # of a program; measured with benchmarks/gpu_swiglu.py


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Where the blocks of a tensor [T, W] go; T and W are multiples of 128.

    Attributes:
        row_codes: uint8 [T, W]; None leaves rows out.
        row_scales: FP32 [W / 128, T], what codes are multiplied with to give values.
        column_codes: uint8 [W, T]; None leaves columns out.
        column_scales: FP32 [T / 128, W].
        grid: the format.
        is_power_of_two: of the scales.
    """

    row_codes: Optional[Tensor]
    row_scales: Optional[Tensor]
    column_codes: Optional[Tensor]
    column_scales: Optional[Tensor]
    grid: Grid
    is_power_of_two: bool


@triton.jit
def tile_of_program(width, SIDE: tl.constexpr):
    """Row (int64) and column of this program's tile among the tiles; neighbours in a row run after each other."""
    across = width // SIDE
    return (tl.program_id(0) // across).to(tl.int64), tl.program_id(0) % across


@triton.jit
def place_in(width, tile_row, tile_column, SIDE: tl.constexpr):
    """Offsets of a tile's elements in a matrix of this width."""
    at = tl.arange(0, SIDE)
    return (tile_row * SIDE + at)[:, None] * width + (tile_column * SIDE + at)[None, :]


@triton.jit
def store_tile(
    y, tile_row, tile_column, num_tokens, width, on_overflow, row_codes, row_scales, column_codes, column_scales,
    POWER_OF_TWO: tl.constexpr, GRID: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of FP32 numbers by rows and by columns, and store it."""
    magnitude, at = tl.abs(y), tl.arange(0, SIDE)
    if row_codes is not None:
        scale = quant_scale_of(without_nan(tl.max(magnitude, axis=1)), on_overflow, POWER_OF_TWO, GRID)
        tl.store(row_scales + tile_column.to(tl.int64) * num_tokens + tile_row * SIDE + at, tl.div_rn(1.0, scale))
        codes = cast_to_code(y * scale[:, None], GRID)
        tl.store(row_codes + place_in(width, tile_row, tile_column, SIDE), codes)
    if column_codes is not None:
        scale = quant_scale_of(without_nan(tl.max(magnitude, axis=0)), on_overflow, POWER_OF_TWO, GRID)
        tl.store(column_scales + tile_row * width + tile_column * SIDE + at, tl.div_rn(1.0, scale))
        codes = cast_to_code(y * scale[None, :], GRID)
        tl.store(column_codes + place_in(num_tokens, tile_column.to(tl.int64), tile_row, SIDE), tl.trans(codes))


@triton.jit
def swiglu_kernel(
    inputs, num_tokens, width, on_overflow, row_codes, row_scales, column_codes, column_scales,
    POWER_OF_TWO: tl.constexpr, GRID: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """inputs [T, 2 W] to the blocks of silu(a) b [T, W]."""
    tile_row, tile_column = tile_of_program(width, SIDE)
    place = inputs + place_in(2 * width, tile_row, tile_column, SIDE)
    a = tl.load(place).to(tl.float32)
    b = tl.load(place + width).to(tl.float32)
    y = a * (1.0 / (1.0 + tl.exp(-a))) * b
    store_tile(
        y.to(inputs.dtype.element_ty).to(tl.float32), tile_row, tile_column, num_tokens, width, on_overflow,
        row_codes, row_scales, column_codes, column_scales, POWER_OF_TWO, GRID, SIDE,
    )  # fmt: skip


def has_whole_blocks(tokens: int, width: int) -> bool:
    """Whether the kernels take a tensor of this size."""
    return tokens > 0 and width > 0 and tokens % SIDE == 0 and width % SIDE == 0


def swiglu(inputs: Tensor, to: Blocks) -> None:
    """Write the blocks of silu(a) b [T, W]; a and b are the halves of inputs [T, 2 W], contiguous; BF16, FP16, FP32."""
    tokens, width = inputs.shape[0], inputs.shape[1] // 2
    swiglu_kernel[(tokens // SIDE * (width // SIDE),)](
        inputs, tokens, width, torch.finfo(inputs.dtype).max, to.row_codes, to.row_scales, to.column_codes,
        to.column_scales, POWER_OF_TWO=to.is_power_of_two, GRID=to.grid, SIDE=SIDE, num_warps=NUM_WARPS,
    )  # fmt: skip
