"""Kernels that write FP8 by a scale that is known before, by rows and transposed in one pass: a cast, SwiGLU, and its
gradients.

Results stay FP32 until they are multiplied with the scale and rounded; their largest magnitude is noted for delayed
scaling. Both FP8 copies come from one reading of the input: a GEMM of the forward pass reads rows, one of the backward
pass the transpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.rounding import Grid, without_nan
from megafp8.kernels.swiglu import gate_gradient_tile, swiglu_tile
from megafp8.kernels.tiles import corner, load_tile, store_codes, tile_from_the_end

SIDE, CAST_SIDE = 64, 128  # of a tile


@dataclass(frozen=True, kw_only=True)
class ScaledCodes:
    """Where the codes of a tensor [T, W] go, and their scale; T and W are multiples of 128.

    Attributes:
        rows: uint8 [T, W]; None leaves them out.
        columns: uint8 [W, T]; None leaves them out.
        scale: FP32 [1], what values are multiplied with before they are rounded.
        amax: FP32 [1], raised to the largest magnitude of the unscaled values.
        scale_inv: FP32 [1], written: 1 / scale.
        grid: the format.
    """

    rows: Optional[Tensor]
    columns: Optional[Tensor]
    scale: Tensor
    amax: Tensor
    scale_inv: Tensor
    grid: Grid


@triton.jit
def largest_of(y):
    """The largest magnitude of a tile, given as its four parts; NaN counts as nothing."""
    largest = tl.maximum(tl.maximum(tl.abs(y[0]), tl.abs(y[1])), tl.maximum(tl.abs(y[2]), tl.abs(y[3])))
    return without_nan(tl.max(largest))


@triton.jit
def store_inverse(scale, scale_inv):
    """1 / scale, by the first program."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inv, tl.div_rn(1.0, scale))


@triton.jit
def cast_kernel(
    inputs, rows, columns, scale, amax, scale_inv, num_tokens, width, GRID: tl.constexpr, SIDE: tl.constexpr
):
    """inputs [T, W] to their codes."""
    tile_row, tile_column = tile_from_the_end()
    y = load_tile(inputs + corner(tile_row, tile_column, width, SIDE), width, SIDE)
    factor = tl.load(scale)
    store_codes(y, factor, tile_row, tile_column, num_tokens, width, rows, columns, GRID, SIDE)
    tl.atomic_max(amax, largest_of(y))
    store_inverse(factor, scale_inv)


@triton.jit
def swiglu_kernel(
    inputs, rows, columns, scale, amax, scale_inv, num_tokens, width, GRID: tl.constexpr, SIDE: tl.constexpr
):
    """inputs [T, 2 W] to the codes of silu(a) b [T, W]."""
    tile_row, tile_column = tile_from_the_end()
    inputs += corner(tile_row, tile_column, 2 * width, SIDE)
    a, b = load_tile(inputs, 2 * width, SIDE), load_tile(inputs + width, 2 * width, SIDE)
    factor = tl.load(scale)
    y = swiglu_tile(a, b, tl.float32)
    store_codes(y, factor, tile_row, tile_column, num_tokens, width, rows, columns, GRID, SIDE)
    tl.atomic_max(amax, largest_of(y))
    store_inverse(factor, scale_inv)


@triton.jit
def swiglu_backward_kernel(
    gradients, inputs, rows, columns, scale, amax, scale_inv, num_tokens, width, GRID: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """gradients [T, W] and inputs [T, 2 W] to the codes of the inputs' gradients [T, 2 W]."""
    tile_row, tile_column = tile_from_the_end()
    inputs += corner(tile_row, tile_column, 2 * width, SIDE)
    a, b = load_tile(inputs, 2 * width, SIDE), load_tile(inputs + width, 2 * width, SIDE)
    dy = load_tile(gradients + corner(tile_row, tile_column, width, SIDE), width, SIDE)
    factor = tl.load(scale)
    da = gate_gradient_tile(a, b, dy, tl.float32)
    store_codes(da, factor, tile_row, tile_column, num_tokens, 2 * width, rows, columns, GRID, SIDE)
    db = swiglu_tile(a, dy, tl.float32)
    store_codes(db, factor, tile_row, tile_column + width // SIDE, num_tokens, 2 * width, rows, columns, GRID, SIDE)
    tl.atomic_max(amax, tl.maximum(largest_of(da), largest_of(db)))
    store_inverse(factor, scale_inv)


def _launch(
    kernel: triton.JITFunction, tensors: tuple[Tensor, ...], width: int, to: ScaledCodes, side: int, num_warps: int
) -> None:
    """A program for each tile of the last of `tensors`, or of its first `width` columns."""
    tokens = tensors[-1].shape[0]
    kernel[(width // side, tokens // side)](
        *tensors, to.rows, to.columns, to.scale, to.amax, to.scale_inv, tokens, width, GRID=to.grid, SIDE=side,
        num_warps=num_warps, enable_fp_fusion=True,
    )  # fmt: skip


def cast(inputs: Tensor, to: ScaledCodes) -> None:
    """Write the codes of inputs [T, W]; contiguous; BF16, FP16, FP32."""
    _launch(cast_kernel, (inputs,), inputs.shape[1], to, CAST_SIDE, num_warps=8)


def swiglu(inputs: Tensor, to: ScaledCodes) -> None:
    """Write the codes of silu(a) b [T, W]; a and b are the halves of inputs [T, 2 W], contiguous; BF16, FP16, FP32."""
    _launch(swiglu_kernel, (inputs,), inputs.shape[1] // 2, to, SIDE, num_warps=4)


def swiglu_backward(gradients: Tensor, inputs: Tensor, to: ScaledCodes) -> None:
    """Write the codes of the gradients [T, 2 W] of inputs, given those of the result [T, W]; as `swiglu`."""
    _launch(swiglu_backward_kernel, (gradients, inputs), inputs.shape[1] // 2, to, SIDE, num_warps=4)
