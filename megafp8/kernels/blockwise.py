"""Kernels that write blockwise FP8 by rows and transposed in one pass: a cast, SwiGLU, and SwiGLU's gradients.

A forward GEMM reads a tensor [T, W] in row blocks of 1 x 128; a backward GEMM reads the transpose in blocks of 128
tokens, which are quantized separately. A program makes both from one read of a tile of 128 x 128, which has complete
blocks of both kinds, so that programs exchange nothing:

    row codes [T, W], row scales [W / 128, T], column codes [W, T], column scales [T / 128, W]

Results of SwiGLU are rounded to the input's dtype before they are quantized, as if they had been written and read
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.rounding import (
    FormatSpec,
    cast_to_code,
    cast_to_words,
    flag_infinity,
    power_of_two_scales,
    quant_scale_of,
)
from megafp8.kernels.swiglu import gate_gradient_tile, swiglu_tile
from megafp8.kernels.tiles import BLOCK_SIZE, load_tile, quarter_pointers, reversed_tile, store_words, tile_offset


@dataclass(frozen=True, kw_only=True)
class BlockwiseOutput:
    """Output tensors for a tensor [T, W]; T and W are multiples of 128.

    Attributes:
        row_codes: uint8 [T, W]; None leaves rows out.
        row_scales: FP32 [W / 128, T], dequantization scales.
        column_codes: uint8 [W, T]; None leaves columns out.
        column_scales: FP32 [T / 128, W], dequantization scales.
        spec: the format.
        is_power_of_two: of the scales.
        infinity: int32 [1], set to 1 if an amax is infinite; None leaves it out.
    """

    row_codes: Optional[Tensor]
    row_scales: Optional[Tensor]
    column_codes: Optional[Tensor]
    column_scales: Optional[Tensor]
    spec: FormatSpec
    is_power_of_two: bool
    infinity: Optional[Tensor] = None


@triton.jit
def scales_of(largest, on_overflow, POWER_OF_TWO: tl.constexpr, FORMAT: tl.constexpr):
    """Quantization scales of blocks and their reciprocals."""
    # Powers of two need no division: both scales follow from the exponent by integer arithmetic.
    if POWER_OF_TWO:
        scale, inverse = power_of_two_scales(largest, FORMAT)
    else:
        scale = quant_scale_of(largest, on_overflow, False, FORMAT)
        inverse = tl.div_rn(1.0, scale)
    return scale, inverse


@triton.jit
def store_rows(
    y, tile_row, tile_column, num_tokens, width, on_overflow, codes, scales, POWER_OF_TWO: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Quantize and store a tile in row blocks."""
    # The amax of a row of a quarter is that of a row block: a tile is one block wide.
    scale0, inverse0 = scales_of(tl.max(tl.abs(y[0]), axis=1), on_overflow, POWER_OF_TWO, FORMAT)
    scale1, inverse1 = scales_of(tl.max(tl.abs(y[1]), axis=1), on_overflow, POWER_OF_TWO, FORMAT)
    scale2, inverse2 = scales_of(tl.max(tl.abs(y[2]), axis=1), on_overflow, POWER_OF_TWO, FORMAT)
    scale3, inverse3 = scales_of(tl.max(tl.abs(y[3]), axis=1), on_overflow, POWER_OF_TWO, FORMAT)
    # Quarter i has the rows 4 n + i. Joining puts the inverses of rows 4 n to 4 n + 3 next to each other.
    inverse = tl.reshape(tl.join(tl.join(inverse0, inverse2), tl.join(inverse1, inverse3)), [BLOCK_SIZE])
    # Scales are [W / 128, T]: those of a tile's rows are adjacent.
    tl.store(scales + tile_column.to(tl.int64) * num_tokens + tile_row * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE), inverse)
    codes += tile_offset(tile_row, tile_column, width, BLOCK_SIZE)
    tl.store(quarter_pointers(codes, width, 0, BLOCK_SIZE), cast_to_code(y[0] * scale0[:, None], FORMAT))
    tl.store(quarter_pointers(codes, width, 1, BLOCK_SIZE), cast_to_code(y[1] * scale1[:, None], FORMAT))
    tl.store(quarter_pointers(codes, width, 2, BLOCK_SIZE), cast_to_code(y[2] * scale2[:, None], FORMAT))
    tl.store(quarter_pointers(codes, width, 3, BLOCK_SIZE), cast_to_code(y[3] * scale3[:, None], FORMAT))


@triton.jit
def store_columns(
    y, tile_row, tile_column, num_tokens, width, on_overflow, codes, scales, POWER_OF_TWO: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Quantize and store a tile in column blocks, transposed."""
    # A column block has all 128 rows of the tile, which are spread over the four quarters.
    largest = tl.maximum(tl.maximum(tl.abs(y[0]), tl.abs(y[1])), tl.maximum(tl.abs(y[2]), tl.abs(y[3])))
    scale, inverse = scales_of(tl.max(largest, axis=0), on_overflow, POWER_OF_TWO, FORMAT)
    tl.store(scales + tile_row.to(tl.int64) * width + tile_column * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE), inverse)
    scale = scale[None, :]
    # The four rows of a word are in one column block, so that they have one scale.
    words = cast_to_words(y[0] * scale, y[1] * scale, y[2] * scale, y[3] * scale, FORMAT)
    store_words(words, codes, tile_row, tile_column, num_tokens, BLOCK_SIZE)


@triton.jit
def store_tile(
    y, tile_row, tile_column, num_tokens, width, on_overflow, row_codes, row_scales, column_codes, column_scales,
    infinity, POWER_OF_TWO: tl.constexpr, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Quantize a tile, given as its four quarters, in row blocks and in column blocks."""
    # NaN is ignored: the maximum is infinite only if a value is.
    if infinity is not None:
        largest = tl.maximum(tl.maximum(tl.abs(y[0]), tl.abs(y[1])), tl.maximum(tl.abs(y[2]), tl.abs(y[3])))
        flag_infinity(tl.max(largest, axis=0), infinity)
    if row_codes is not None:
        store_rows(
            y, tile_row, tile_column, num_tokens, width, on_overflow, row_codes, row_scales, POWER_OF_TWO, FORMAT,
            BLOCK_SIZE,
        )  # fmt: skip
    if column_codes is not None:
        store_columns(
            y, tile_row, tile_column, num_tokens, width, on_overflow, column_codes, column_scales, POWER_OF_TWO, FORMAT,
            BLOCK_SIZE,
        )  # fmt: skip


@triton.jit
def cast_kernel(
    inputs, num_tokens, width, on_overflow, row_codes, row_scales, column_codes, column_scales,
    infinity, POWER_OF_TWO: tl.constexpr, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """inputs [T, W] to their quantized blocks."""
    # Each program has complete blocks, so that the order of tiles changes no result, only cache hits.
    tile_row, tile_column = reversed_tile()
    store_tile(
        load_tile(inputs + tile_offset(tile_row, tile_column, width, BLOCK_SIZE), width, BLOCK_SIZE), tile_row,
        tile_column, num_tokens, width, on_overflow, row_codes, row_scales, column_codes, column_scales, infinity,
        POWER_OF_TWO, FORMAT, BLOCK_SIZE,
    )  # fmt: skip


@triton.jit
def swiglu_kernel(
    inputs, num_tokens, width, on_overflow, row_codes, row_scales, column_codes, column_scales,
    infinity, POWER_OF_TWO: tl.constexpr, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """inputs [T, 2 W] to the quantized blocks of silu(a) b [T, W]."""
    tile_row, tile_column = reversed_tile()
    inputs += tile_offset(tile_row, tile_column, 2 * width, BLOCK_SIZE)
    # The halves of a row are W apart. Both tiles have the same rows, and the same columns of their half.
    a, b = load_tile(inputs, 2 * width, BLOCK_SIZE), load_tile(inputs + width, 2 * width, BLOCK_SIZE)
    store_tile(
        swiglu_tile(a, b, inputs.dtype.element_ty), tile_row, tile_column, num_tokens, width, on_overflow, row_codes,
        row_scales, column_codes, column_scales, infinity, POWER_OF_TWO, FORMAT, BLOCK_SIZE,
    )  # fmt: skip


@triton.jit
def swiglu_backward_kernel(
    gradients, inputs, num_tokens, width, on_overflow, row_codes, row_scales, column_codes, column_scales,
    infinity, POWER_OF_TWO: tl.constexpr, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """gradients [T, W] and inputs [T, 2 W] to the quantized blocks of the inputs' gradients [T, 2 W]."""
    TYPE: tl.constexpr = inputs.dtype.element_ty
    tile_row, tile_column = reversed_tile()
    inputs += tile_offset(tile_row, tile_column, 2 * width, BLOCK_SIZE)
    gradients += tile_offset(tile_row, tile_column, width, BLOCK_SIZE)
    a, b = load_tile(inputs, 2 * width, BLOCK_SIZE), load_tile(inputs + width, 2 * width, BLOCK_SIZE)
    dy = load_tile(gradients, width, BLOCK_SIZE)
    store_tile(
        gate_gradient_tile(a, b, dy, TYPE), tile_row, tile_column, num_tokens, 2 * width, on_overflow, row_codes,
        row_scales, column_codes, column_scales, infinity, POWER_OF_TWO, FORMAT, BLOCK_SIZE,
    )  # fmt: skip
    # The tile of da is stored before that of db is computed, for which a and dy are read again, from the cache:
    # registers hold only one tile of results.
    a, dy = load_tile(inputs, 2 * width, BLOCK_SIZE), load_tile(gradients, width, BLOCK_SIZE)
    store_tile(
        # db lies W columns further right, at a multiple of 128.
        swiglu_tile(a, dy, TYPE), tile_row, tile_column + width // BLOCK_SIZE, num_tokens, 2 * width, on_overflow,
        row_codes, row_scales, column_codes, column_scales, infinity, POWER_OF_TWO, FORMAT, BLOCK_SIZE,
    )  # fmt: skip


def _launch(
    kernel: triton.JITFunction,
    tensors: tuple[Tensor, ...],
    width: int,
    to: BlockwiseOutput,
    num_warps: int,
    registers: int,
) -> None:
    """Launch a program for each tile of the first `width` columns of the last of `tensors`.

    `registers` per thread are tuned: the compiler's own choice costs 4 to 11%.
    """
    # `largest` replaces a scale that overflows, see `quant_scale_of`.
    tokens, largest = tensors[-1].shape[0], torch.finfo(tensors[-1].dtype).max
    kernel[(width // BLOCK_SIZE, tokens // BLOCK_SIZE)](
        *tensors, tokens, width, largest, to.row_codes, to.row_scales, to.column_codes, to.column_scales, to.infinity,
        POWER_OF_TWO=to.is_power_of_two, FORMAT=to.spec, BLOCK_SIZE=BLOCK_SIZE, num_warps=num_warps, maxnreg=registers,
        enable_fp_fusion=True,
    )  # fmt: skip


def cast(inputs: Tensor, to: BlockwiseOutput) -> None:
    """Quantize inputs [T, W], contiguous, BF16, FP16 or FP32."""
    _launch(cast_kernel, (inputs,), inputs.shape[1], to, num_warps=4, registers=192)


def swiglu(inputs: Tensor, to: BlockwiseOutput) -> None:
    """Quantize silu(a) b [T, W]; a and b are the halves of inputs [T, 2 W], contiguous, BF16, FP16 or FP32."""
    _launch(swiglu_kernel, (inputs,), inputs.shape[1] // 2, to, num_warps=4, registers=168)


def swiglu_backward(gradients: Tensor, inputs: Tensor, to: BlockwiseOutput) -> None:
    """Quantize the gradients [T, 2 W] of inputs, given those of the result [T, W]; as `swiglu`."""
    _launch(swiglu_backward_kernel, (gradients, inputs), inputs.shape[1] // 2, to, num_warps=8, registers=112)
