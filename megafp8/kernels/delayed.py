"""Kernels that write FP8 codes by delayed scaling, by rows and transposed: a cast, SwiGLU, and SwiGLU's gradients.

The scale is known before, so that each takes one pass: results stay FP32 until they are scaled and rounded, and their
amax is recorded for the next scale. Both copies come from one read of the input: fprop and dgrad GEMMs read the rows,
wgrad the transpose. Bytes for each BF16 number of a cast: 2 read, 2 written.

A program has one square tile. SwiGLU's tiles are smaller than the cast's, because it holds two or three inputs in
registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.rounding import FormatSpec, without_nan
from megafp8.kernels.swiglu import gate_gradient_tile, swiglu_tile
from megafp8.kernels.tiles import load_tile, reversed_tile, store_codes, tile_offset

BLOCK_SIZE, CAST_BLOCK_SIZE = 64, 128  # tiles of SwiGLU and of the cast


@dataclass(frozen=True, kw_only=True)
class DelayedOutput:
    """Output tensors for a tensor [T, W], and its scale; T and W are multiples of 128.

    Attributes:
        rows: uint8 [T, W]; None leaves them out.
        columns: uint8 [W, T]; None leaves them out.
        scale: FP32 [1], the quantization scale.
        amax: FP32 [1], raised to the amax of the unscaled values.
        scale_inv: FP32 [1], set to the dequantization scale, 1 / scale.
        spec: the format.
    """

    rows: Optional[Tensor]
    columns: Optional[Tensor]
    scale: Tensor
    amax: Tensor
    scale_inv: Tensor
    spec: FormatSpec


@triton.jit
def largest_of(y):
    """Amax of a tile, given as its four quarters; NaN is ignored."""
    largest = tl.maximum(tl.maximum(tl.abs(y[0]), tl.abs(y[1])), tl.maximum(tl.abs(y[2]), tl.abs(y[3])))
    return without_nan(tl.max(largest))


@triton.jit
def store_inverse(scale, scale_inv):
    """Store 1 / scale, in the first program."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inv, tl.div_rn(1.0, scale))


@triton.jit
def cast_kernel(
    inputs, rows, columns, scale, amax, scale_inv, num_tokens, width, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """inputs [T, W] to their codes."""
    tile_row, tile_column = reversed_tile()
    y = load_tile(inputs + tile_offset(tile_row, tile_column, width, BLOCK_SIZE), width, BLOCK_SIZE)
    factor = tl.load(scale)
    store_codes(y, factor, tile_row, tile_column, num_tokens, width, rows, columns, FORMAT, BLOCK_SIZE)
    # For the next scale. No program of this launch reads it.
    tl.atomic_max(amax, largest_of(y))
    store_inverse(factor, scale_inv)


@triton.jit
def swiglu_kernel(
    inputs, rows, columns, scale, amax, scale_inv, num_tokens, width, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """inputs [T, 2 W] to the codes of silu(a) b [T, W]."""
    tile_row, tile_column = reversed_tile()
    inputs += tile_offset(tile_row, tile_column, 2 * width, BLOCK_SIZE)
    a, b = load_tile(inputs, 2 * width, BLOCK_SIZE), load_tile(inputs + width, 2 * width, BLOCK_SIZE)
    factor = tl.load(scale)
    # FP32: the result is not rounded to the input's dtype before the cast.
    y = swiglu_tile(a, b, tl.float32)
    store_codes(y, factor, tile_row, tile_column, num_tokens, width, rows, columns, FORMAT, BLOCK_SIZE)
    tl.atomic_max(amax, largest_of(y))
    store_inverse(factor, scale_inv)


@triton.jit
def swiglu_backward_kernel(
    gradients, inputs, rows, columns, scale, amax, scale_inv, num_tokens, width, FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """gradients [T, W] and inputs [T, 2 W] to the codes of the inputs' gradients [T, 2 W]."""
    tile_row, tile_column = reversed_tile()
    inputs += tile_offset(tile_row, tile_column, 2 * width, BLOCK_SIZE)
    a, b = load_tile(inputs, 2 * width, BLOCK_SIZE), load_tile(inputs + width, 2 * width, BLOCK_SIZE)
    dy = load_tile(gradients + tile_offset(tile_row, tile_column, width, BLOCK_SIZE), width, BLOCK_SIZE)
    factor = tl.load(scale)
    da = gate_gradient_tile(a, b, dy, tl.float32)
    # da and db are the halves of one tensor [T, 2 W] with one scale and one amax.
    store_codes(da, factor, tile_row, tile_column, num_tokens, 2 * width, rows, columns, FORMAT, BLOCK_SIZE)
    db = swiglu_tile(a, dy, tl.float32)
    store_codes(
        db, factor, tile_row, tile_column + width // BLOCK_SIZE, num_tokens, 2 * width, rows, columns, FORMAT,
        BLOCK_SIZE,
    )  # fmt: skip
    tl.atomic_max(amax, tl.maximum(largest_of(da), largest_of(db)))
    store_inverse(factor, scale_inv)


def _launch(
    kernel: triton.JITFunction, tensors: tuple[Tensor, ...], width: int, to: DelayedOutput, block_size: int,
    num_warps: int,
) -> None:  # fmt: skip
    """Launch a program for each tile of the first `width` columns of the last of `tensors`."""
    tokens = tensors[-1].shape[0]
    kernel[(width // block_size, tokens // block_size)](
        *tensors, to.rows, to.columns, to.scale, to.amax, to.scale_inv, tokens, width, FORMAT=to.spec,
        BLOCK_SIZE=block_size, num_warps=num_warps, enable_fp_fusion=True,
    )  # fmt: skip


def cast(inputs: Tensor, to: DelayedOutput) -> None:
    """Quantize inputs [T, W], contiguous, BF16, FP16 or FP32."""
    _launch(cast_kernel, (inputs,), inputs.shape[1], to, CAST_BLOCK_SIZE, num_warps=8)


def swiglu(inputs: Tensor, to: DelayedOutput) -> None:
    """Quantize silu(a) b [T, W]; a and b are the halves of inputs [T, 2 W], contiguous, BF16, FP16 or FP32."""
    _launch(swiglu_kernel, (inputs,), inputs.shape[1] // 2, to, BLOCK_SIZE, num_warps=4)


def swiglu_backward(gradients: Tensor, inputs: Tensor, to: DelayedOutput) -> None:
    """Quantize the gradients [T, 2 W] of inputs, given those of the result [T, W]; as `swiglu`."""
    _launch(swiglu_backward_kernel, (gradients, inputs), inputs.shape[1] // 2, to, BLOCK_SIZE, num_warps=4)
