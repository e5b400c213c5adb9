"""Kernels that write FP8 by a tensor's own amax, by rows and transposed: a cast, SwiGLU, and SwiGLU's gradients.

Two launches each: the first one finds the amax, the second one writes codes [T, W] and their transpose [W, T]. Results
of SwiGLU are rounded to the input's type before they are quantized, as if they had been written and read again; their
amax is that of the FP32 results, as in Transformer Engine, so that the largest may saturate.

What the first launch has to read, which is most of what a scale of the tensor's own costs, depends:

- A cast reads its tensor, unless the kernel that wrote the tensor noted the amax. Then there is no first launch.
- SwiGLU reads its input and writes the results, for the second launch to read.
- SwiGLU's gradients are products of the result's gradient and a factor that the forward pass had at hand. It noted the
  largest factor of each 128 channels of a token, from which follows how large their gradients can be at most. Few of
  them can hold the amax of millions, and the inputs of the others are not read (`swiglu_gradients_amax_kernel`). The
  second launch computes the gradients once more.

The first launch goes through its tensor from the end, the second one from the start: the end is what the L2 cache still
has of the kernel that wrote the tensor, and the start is what it then has of the first launch. A cast that has the
second launch alone goes from the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.annotations import annotate, annotation
from megafp8.kernels.rounding import FP32_MAX, Grid, quant_scale_of, widen, without_nan
from megafp8.kernels.swiglu import exact_sigmoid, gate_gradient, gate_gradient_tile, swiglu_tile
from megafp8.kernels.tiles import SIDE, corner, load_tile, store_codes, tile_from_the_end

PROGRAMS, GRADIENTS_PROGRAMS = 1024, 4096  # of the first launch
GRADIENTS_SIDE = 64  # of a tile of the second one
# What rounding can add to a product of a gradient and a factor, and to silu', which is a sum of opposite terms. Where a
# product on the way is subnormal rounding can add more: an amax of less than 1e-33 may be 0.2% off.
SLACK = tl.constexpr(1 + 2.0**-16)
SLACK_OF_SUM = tl.constexpr(2.0**-20)


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Where the codes of a tensor [T, W] go; T and W are multiples of 128.

    Attributes:
        rows: uint8 [T, W]; None leaves them out.
        columns: uint8 [W, T]; None leaves them out.
        scale_inv: FP32 [1], what codes are multiplied with to give values.
        grid: the format.
        is_power_of_two: of the scale.
    """

    rows: Optional[Tensor]
    columns: Optional[Tensor]
    scale_inv: Tensor
    grid: Grid
    is_power_of_two: bool


@triton.jit
def start_of(num_tokens, width, index, ROWS: tl.constexpr, SIDE: tl.constexpr):
    """Row (int64) and column of the first element of a tile, counted back from the last one, of a matrix [T, W]."""
    across = width // SIDE
    tile = num_tokens // ROWS * across - 1 - index
    return (tile // across).to(tl.int64) * ROWS, tile % across * SIDE


@triton.jit
def offsets(width, ROWS: tl.constexpr, SIDE: tl.constexpr):
    """Of a tile's elements from its first in a matrix of this width."""
    return tl.arange(0, ROWS)[:, None] * width + tl.arange(0, SIDE)[None, :]


@triton.jit
def tokens_of(num_tokens, row, column, ROWS: tl.constexpr, SIDE: tl.constexpr):
    """Offsets of a tile's tokens in factors [W / SIDE, T]."""
    return (column // SIDE).to(tl.int64) * num_tokens + row + tl.arange(0, ROWS)


@triton.jit
def amax_kernel(inputs, amaxes, num_tokens, width, ROWS: tl.constexpr, SIDE: tl.constexpr):
    """amaxes [programs] of inputs [T, W]."""
    largest = tl.zeros([ROWS, SIDE], tl.float32)
    for index in range(tl.program_id(0), num_tokens // ROWS * (width // SIDE), tl.num_programs(0)):
        row, column = start_of(num_tokens, width, index, ROWS, SIDE)
        x = widen(tl.load(inputs + row * width + column + offsets(width, ROWS, SIDE)))
        largest = tl.maximum(largest, tl.abs(x))
    tl.store(amaxes + tl.program_id(0), tl.max(largest))


@triton.jit
def swiglu_kernel(inputs, results, factors, amaxes, num_tokens, width, ROWS: tl.constexpr, SIDE: tl.constexpr):
    """inputs [T, 2 W] to results [T, W], silu(a) b, with amaxes [programs], and to factors [W / SIDE, T]: the largest
    |silu'(a) b| and |silu(a)| of a token's channels of a tile."""
    largest = tl.zeros([ROWS, SIDE], tl.float32)
    for index in range(tl.program_id(0), num_tokens // ROWS * (width // SIDE), tl.num_programs(0)):
        row, column = start_of(num_tokens, width, index, ROWS, SIDE)
        at = inputs + row * (2 * width) + column + offsets(2 * width, ROWS, SIDE)
        a, b = widen(tl.load(at)), widen(tl.load(at + width))
        s = exact_sigmoid(a)
        y = a * s * b
        tl.store(results + row * width + column + offsets(width, ROWS, SIDE), y.to(results.dtype.element_ty))
        largest = tl.maximum(largest, tl.abs(y))
        factor = tl.maximum((tl.abs(gate_gradient(a, s, 1.0, 1.0)) + SLACK_OF_SUM) * tl.abs(b), tl.abs(a * s))
        tl.store(factors + tokens_of(num_tokens, row, column, ROWS, SIDE), tl.max(factor, axis=1))
    tl.store(amaxes + tl.program_id(0), tl.max(largest))


@triton.jit
def swiglu_gradients_amax_kernel(
    gradients, inputs, factors, amax, num_tokens, width, ROWS: tl.constexpr, SIDE: tl.constexpr
):  # fmt: skip
    """Raise amax to that of the gradients of inputs [T, 2 W], given those of SwiGLU's result [T, W] and its factors.

    A token's channels of a tile are left out where the largest gradient times the largest factor is not above what is
    found already, by any program. That is behind at times, which costs a reading and no more.
    """
    for index in range(tl.program_id(0), num_tokens // ROWS * (width // SIDE), tl.num_programs(0)):
        row, column = start_of(num_tokens, width, index, ROWS, SIDE)
        dy = widen(tl.load(gradients + row * width + column + offsets(width, ROWS, SIDE)))
        factor = tl.load(factors + tokens_of(num_tokens, row, column, ROWS, SIDE))
        bound = tl.max(tl.abs(dy), axis=1) * factor * SLACK
        # Not so with NaN. Each thread loads the amax for itself, and may see another one. The warps have rows of their
        # own, whose minimum they exchange: so all of them go one way.
        is_left_out = bound <= tl.load(amax, volatile=True)
        if tl.min(is_left_out.to(tl.int32)) == 0:
            at = inputs + row * (2 * width) + column + offsets(2 * width, ROWS, SIDE)
            is_read = (is_left_out == 0)[:, None]
            a, b = widen(tl.load(at, mask=is_read, other=0.0)), widen(tl.load(at + width, mask=is_read, other=0.0))
            s = exact_sigmoid(a)
            largest = tl.maximum(tl.abs(gate_gradient(a, s, b, dy)), tl.abs(a * s * dy))
            tl.atomic_max(amax, without_nan(tl.max(largest)))


@triton.jit
def quantize_kernel(
    inputs, amaxes, rows, columns, scale_inv, num_tokens, width, POWER_OF_TWO: tl.constexpr, GRID: tl.constexpr,
    NUM_AMAXES: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """inputs [T, W] with amaxes [NUM_AMAXES] to codes and to their transpose."""
    tile_column, tile_row = tl.program_id(0), tl.program_id(1)
    if NUM_AMAXES == 1:  # noted: nothing has read the inputs before
        tile_row, tile_column = tile_from_the_end()
    y = load_tile(inputs + corner(tile_row, tile_column, width, SIDE), width, SIDE)
    largest = tl.max(tl.load(amaxes + tl.arange(0, NUM_AMAXES)))
    scale = quant_scale_of(largest, FP32_MAX, POWER_OF_TWO, GRID)
    if (tile_row == 0) & (tile_column == 0):
        tl.store(scale_inv, tl.div_rn(1.0, scale))
    store_codes(y, scale, tile_row, tile_column, num_tokens, width, rows, columns, GRID, SIDE)


@triton.jit
def quantize_swiglu_gradients_kernel(
    gradients, inputs, amax, rows, columns, scale_inv, num_tokens, width, POWER_OF_TWO: tl.constexpr,
    GRID: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """gradients [T, W] and inputs [T, 2 W] to the codes of the inputs' gradients [T, 2 W], whose amax is given."""
    TYPE: tl.constexpr = inputs.dtype.element_ty
    tile_column, tile_row = tl.program_id(0), tl.program_id(1)
    inputs += corner(tile_row, tile_column, 2 * width, SIDE)
    a, b = load_tile(inputs, 2 * width, SIDE), load_tile(inputs + width, 2 * width, SIDE)
    dy = load_tile(gradients + corner(tile_row, tile_column, width, SIDE), width, SIDE)
    scale = quant_scale_of(tl.load(amax), FP32_MAX, POWER_OF_TWO, GRID)
    if (tile_row == 0) & (tile_column == 0):
        tl.store(scale_inv, tl.div_rn(1.0, scale))
    da = gate_gradient_tile(a, b, dy, TYPE, True)
    store_codes(da, scale, tile_row, tile_column, num_tokens, 2 * width, rows, columns, GRID, SIDE)
    db = swiglu_tile(a, dy, TYPE, True)
    store_codes(db, scale, tile_row, tile_column + width // SIDE, num_tokens, 2 * width, rows, columns, GRID, SIDE)


def _quantize(inputs: Tensor, amaxes: Tensor, to: Codes) -> None:
    """The second launch."""
    tokens, width = inputs.shape
    quantize_kernel[(width // SIDE, tokens // SIDE)](
        inputs, amaxes, to.rows, to.columns, to.scale_inv, tokens, width, POWER_OF_TWO=to.is_power_of_two,
        GRID=to.grid, NUM_AMAXES=amaxes.numel(), SIDE=SIDE, num_warps=8,
    )  # fmt: skip


def _amaxes(inputs: Tensor) -> Tensor:
    """The first launch of a cast: FP32 [PROGRAMS]."""
    amaxes = inputs.new_empty(PROGRAMS, dtype=torch.float32)
    amax_kernel[(PROGRAMS,)](inputs, amaxes, *inputs.shape, ROWS=32, SIDE=SIDE, num_warps=4)
    return amaxes


def cast(inputs: Tensor, to: Codes) -> None:
    """Write the codes of inputs [T, W]; contiguous; BF16, FP16, FP32."""
    amaxes = annotation(inputs, "amax")
    _quantize(inputs, _amaxes(inputs) if amaxes is None else amaxes, to)


def swiglu(inputs: Tensor, to: Codes) -> None:
    """Write the codes of silu(a) b [T, W]; a and b are the halves of inputs [T, 2 W], contiguous; BF16, FP16, FP32.

    Notes the factors of its gradients at the inputs.
    """
    tokens, width = inputs.shape[0], inputs.shape[1] // 2
    results, amaxes = inputs.new_empty(tokens, width), inputs.new_empty(PROGRAMS, dtype=torch.float32)
    factors = inputs.new_empty(width // SIDE, tokens, dtype=torch.float32)
    swiglu_kernel[(PROGRAMS,)](
        inputs, results, factors, amaxes, tokens, width, ROWS=16, SIDE=SIDE, num_warps=4, enable_fp_fusion=True
    )
    annotate(inputs, "factors", factors)
    _quantize(results, amaxes, to)


def swiglu_backward(gradients: Tensor, inputs: Tensor, to: Codes) -> None:
    """Write the codes of the gradients [T, 2 W] of inputs, given those of the result [T, W]; as `swiglu`.

    Where no factors are noted at the inputs, another kernel's `swiglu` was theirs, and all of them are read.
    """
    tokens, width = gradients.shape
    factors = annotation(inputs, "factors")
    if factors is None or factors.shape != (width // SIDE, tokens):
        factors = inputs.new_full((width // SIDE, tokens), torch.inf, dtype=torch.float32)
    amax = inputs.new_zeros(1, dtype=torch.float32)
    swiglu_gradients_amax_kernel[(GRADIENTS_PROGRAMS,)](
        gradients, inputs, factors, amax, tokens, width, ROWS=32, SIDE=SIDE, num_warps=4, enable_fp_fusion=True
    )
    quantize_swiglu_gradients_kernel[(width // GRADIENTS_SIDE, tokens // GRADIENTS_SIDE)](
        gradients, inputs, amax, to.rows, to.columns, to.scale_inv, tokens, width, POWER_OF_TWO=to.is_power_of_two,
        GRID=to.grid, SIDE=GRADIENTS_SIDE, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
