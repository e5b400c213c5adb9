"""Kernels that write FP8 by a tensor's own amax, by rows and transposed: a cast, SwiGLU, and SwiGLU's gradients.

Two launches each. The first computes what is to be quantized, or only reads it, and writes the largest magnitude that
each of its programs met; the second one's programs all take the maximum of those, so that nothing is filled with zeros
before, and write codes [T, W] and their transpose [W, T]. Results of SwiGLU are written in the input's type in between;
their largest magnitude is that of the FP32 results, as in Transformer Engine, so that the largest may saturate.

The first launch goes through its tensor from the end, the second one from the start: the end is what the L2 cache still
has of the kernel that wrote the tensor, and the start is what it then has of the first launch. A cast has the second
launch alone, from the end, where the kernel that wrote its input noted the amax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.fp8.triton_cast import widen
from megafp8.fp8.triton_rounding import FP32_MAX, Grid, quant_scale_of
from megafp8.model.noted_amax import noted_amax
from megafp8.model.swiglu_formula import exact_sigmoid, gate_gradient
from megafp8.model.triton_tiles import NUM_WARPS, SIDE, corner, load_tile, store_codes, tile_from_the_end

PROGRAMS = 1024  # of the first launch


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
def amax_kernel(inputs, amaxes, num_tokens, width, ROWS: tl.constexpr, SIDE: tl.constexpr):
    """amaxes [programs] of inputs [T, W]."""
    largest = tl.zeros([ROWS, SIDE], tl.float32)
    for index in range(tl.program_id(0), num_tokens // ROWS * (width // SIDE), tl.num_programs(0)):
        row, column = start_of(num_tokens, width, index, ROWS, SIDE)
        x = widen(tl.load(inputs + row * width + column + offsets(width, ROWS, SIDE)))
        largest = tl.maximum(largest, tl.abs(x))
    tl.store(amaxes + tl.program_id(0), tl.max(largest))


@triton.jit
def swiglu_kernel(inputs, results, amaxes, num_tokens, width, ROWS: tl.constexpr, SIDE: tl.constexpr):
    """inputs [T, 2 W] to results [T, W], silu(a) b, and amaxes [programs]."""
    largest = tl.zeros([ROWS, SIDE], tl.float32)
    for index in range(tl.program_id(0), num_tokens // ROWS * (width // SIDE), tl.num_programs(0)):
        row, column = start_of(num_tokens, width, index, ROWS, SIDE)
        at = inputs + row * (2 * width) + column + offsets(2 * width, ROWS, SIDE)
        a, b = widen(tl.load(at)), widen(tl.load(at + width))
        y = a * exact_sigmoid(a) * b
        tl.store(results + row * width + column + offsets(width, ROWS, SIDE), y.to(results.dtype.element_ty))
        largest = tl.maximum(largest, tl.abs(y))
    tl.store(amaxes + tl.program_id(0), tl.max(largest))


@triton.jit
def swiglu_backward_kernel(
    gradients, inputs, results, amaxes, num_tokens, width, ROWS: tl.constexpr, SIDE: tl.constexpr
):
    """gradients [T, W] and inputs [T, 2 W] to results [T, 2 W], the inputs' gradients, and amaxes [programs]."""
    largest = tl.zeros([ROWS, SIDE], tl.float32)
    for index in range(tl.program_id(0), num_tokens // ROWS * (width // SIDE), tl.num_programs(0)):
        row, column = start_of(num_tokens, width, index, ROWS, SIDE)
        at = row * (2 * width) + column + offsets(2 * width, ROWS, SIDE)
        a, b = widen(tl.load(inputs + at)), widen(tl.load(inputs + at + width))
        dy = widen(tl.load(gradients + row * width + column + offsets(width, ROWS, SIDE)))
        s = exact_sigmoid(a)
        da, db = gate_gradient(a, s, b, dy), a * s * dy
        tl.store(results + at, da.to(results.dtype.element_ty))
        tl.store(results + at + width, db.to(results.dtype.element_ty))
        largest = tl.maximum(largest, tl.maximum(tl.abs(da), tl.abs(db)))
    tl.store(amaxes + tl.program_id(0), tl.max(largest))


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


def _amaxes(
    kernel: triton.JITFunction, tensors: tuple[Tensor, ...], tokens: int, width: int, *, rows: int, num_warps: int
) -> Tensor:
    """The first launch, whose programs have this many rows of SIDE columns at a time: FP32 [PROGRAMS]."""
    amaxes = torch.empty(PROGRAMS, dtype=torch.float32, device=tensors[0].device)
    kernel[(PROGRAMS,)](
        *tensors, amaxes, tokens, width, ROWS=rows, SIDE=SIDE, num_warps=num_warps, enable_fp_fusion=True
    )
    return amaxes


def _quantize(inputs: Tensor, amaxes: Tensor, to: Codes) -> None:
    """The second launch."""
    tokens, width = inputs.shape
    quantize_kernel[(width // SIDE, tokens // SIDE)](
        inputs, amaxes, to.rows, to.columns, to.scale_inv, tokens, width, POWER_OF_TWO=to.is_power_of_two,
        GRID=to.grid, NUM_AMAXES=amaxes.numel(), SIDE=SIDE, num_warps=NUM_WARPS,
    )  # fmt: skip


def cast(inputs: Tensor, to: Codes) -> None:
    """Write the codes of inputs [T, W]; contiguous; BF16, FP16, FP32."""
    amaxes = noted_amax(inputs)
    if amaxes is None:
        amaxes = _amaxes(amax_kernel, (inputs,), *inputs.shape, rows=32, num_warps=4)
    _quantize(inputs, amaxes, to)


def swiglu(inputs: Tensor, to: Codes) -> None:
    """Write the codes of silu(a) b [T, W]; a and b are the halves of inputs [T, 2 W], contiguous; BF16, FP16, FP32."""
    tokens, width = inputs.shape[0], inputs.shape[1] // 2
    results = inputs.new_empty(tokens, width)
    amaxes = _amaxes(swiglu_kernel, (inputs, results), tokens, width, rows=16, num_warps=8)
    _quantize(results, amaxes, to)


def swiglu_backward(gradients: Tensor, inputs: Tensor, to: Codes) -> None:
    """Write the codes of the gradients [T, 2 W] of inputs, given those of the result [T, W]; as `swiglu`."""
    results = torch.empty_like(inputs)
    tensors = (gradients, inputs, results)
    _quantize(results, _amaxes(swiglu_backward_kernel, tensors, *gradients.shape, rows=32, num_warps=8), to)
