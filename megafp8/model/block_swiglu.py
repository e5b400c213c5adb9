"""SwiGLU that writes its result in blockwise FP8, by rows and transposed, in one pass: the kernel that was measured.

That of `block_kernels` has fewer instructions for the same bytes; until it has run on a GPU, this one is the default.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.fp8.triton_cast import cast_to_code
from megafp8.fp8.triton_rounding import quant_scale_of, without_nan
from megafp8.model.block_kernels import Blocks
from megafp8.model.triton_tiles import SIDE

NUM_WARPS = 8  # of a program; measured with benchmarks/gpu_kernels.py


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


def swiglu(inputs: Tensor, to: Blocks) -> None:
    """Write the blocks of silu(a) b [T, W]; a and b are the halves of inputs [T, 2 W], contiguous; BF16, FP16, FP32."""
    tokens, width = inputs.shape[0], inputs.shape[1] // 2
    swiglu_kernel[(tokens // SIDE * (width // SIDE),)](
        inputs, tokens, width, torch.finfo(inputs.dtype).max, to.row_codes, to.row_scales, to.column_codes,
        to.column_scales, POWER_OF_TWO=to.is_power_of_two, GRID=to.grid, SIDE=SIDE, num_warps=NUM_WARPS,
    )  # fmt: skip
