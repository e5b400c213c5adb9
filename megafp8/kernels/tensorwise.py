"""Kernels that write FP8 codes by current scaling, by rows and transposed: a cast, SwiGLU, and SwiGLU's gradients.

Each takes two launches: the first one computes the amax, the second one writes codes [T, W] and their transpose [W, T].
Results of SwiGLU are rounded to the input's dtype before they are quantized, as if they had been written and read
again. Their amax is that of the FP32 results, as in Transformer Engine, so that the largest may saturate.

Most of the cost of current scaling is what the first launch reads:

- A cast reads its tensor, unless the kernel that wrote the tensor annotated its amax (`annotations.py`). Then there is
  no first launch.
- SwiGLU reads its input and writes its results, which the second launch reads.
- SwiGLU's gradients are products of the result's gradient and a factor that depends on the forward inputs alone. The
  forward kernel annotates the largest factor of each 128 channels of a token, which bounds their gradients. In a large
  tensor few bounds exceed the amax, and the inputs of the others are not read (`swiglu_gradients_amax_kernel`). The
  second launch computes the gradients again.

The first launch traverses its tensor in reverse and the second one forward. The end of the tensor is what the L2 cache
still holds of the kernel that wrote it, and its start is what the cache then holds of the first launch. A cast without
a first launch goes in reverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.annotations import annotate, annotation
from megafp8.kernels.rounding import FP32_MAX, FormatSpec, flag_infinity, quant_scale_of, widen, without_nan
from megafp8.kernels.swiglu import exact_sigmoid, gate_gradient, gate_gradient_tile, swiglu_tile
from megafp8.kernels.tiles import BLOCK_SIZE, load_tile, reversed_tile, store_codes, tile_offset

PROGRAMS, GRADIENTS_PROGRAMS = 1024, 4096  # of the first launch; each loops over tiles
GRADIENTS_BLOCK_SIZE = 64  # tile of the second launch
# Bounds of rounding errors: relative, of a product of a gradient and a factor; absolute, of silu', whose terms have
# opposite signs. Subnormal intermediate products can exceed them: an amax below 1e-33 may be 0.2% off.
SLACK = tl.constexpr(1 + 2.0**-16)
SLACK_OF_SUM = tl.constexpr(2.0**-20)


@dataclass(frozen=True, kw_only=True)
class TensorwiseOutput:
    """Output tensors for a tensor [T, W]; T and W are multiples of 128.

    Attributes:
        rows: uint8 [T, W]; None leaves them out.
        columns: uint8 [W, T]; None leaves them out.
        scale_inv: FP32 [1], set to the dequantization scale.
        spec: the format.
        is_power_of_two: round the scale down to a power of two.
        infinity: int32 [1], set to 1 if the amax is infinite; None leaves it out.
    """

    rows: Optional[Tensor]
    columns: Optional[Tensor]
    scale_inv: Tensor
    spec: FormatSpec
    is_power_of_two: bool
    infinity: Optional[Tensor] = None


@triton.jit
def start_of(num_tokens, width, index, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Row (int64) and column of the first element of a tile of a matrix [T, W]; tile 0 is the last one."""
    across = width // BLOCK_SIZE
    tile = num_tokens // ROWS * across - 1 - index
    return (tile // across).to(tl.int64) * ROWS, tile % across * BLOCK_SIZE


@triton.jit
def offsets(width, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Offsets of a tile's elements from its first one, in a matrix of this width."""
    return tl.arange(0, ROWS)[:, None] * width + tl.arange(0, BLOCK_SIZE)[None, :]


@triton.jit
def tokens_of(num_tokens, row, column, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Offsets of a tile's tokens in factors [W / BLOCK_SIZE, T]."""
    return (column // BLOCK_SIZE).to(tl.int64) * num_tokens + row + tl.arange(0, ROWS)


@triton.jit
def amax_kernel(inputs, amaxes, num_tokens, width, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """One amax for each program, amaxes [programs], of inputs [T, W]; the second launch takes their maximum."""
    largest = tl.zeros([ROWS, BLOCK_SIZE], tl.float32)
    for index in range(tl.program_id(0), num_tokens // ROWS * (width // BLOCK_SIZE), tl.num_programs(0)):
        # Tile 0 is the last one: what the previous kernel wrote last is still in the L2 cache.
        row, column = start_of(num_tokens, width, index, ROWS, BLOCK_SIZE)
        x = widen(tl.load(inputs + row * width + column + offsets(width, ROWS, BLOCK_SIZE)))
        largest = tl.maximum(largest, tl.abs(x))
    # Programs have their own places: no atomic operation, and nothing to set to 0 before.
    tl.store(amaxes + tl.program_id(0), tl.max(largest))


@triton.jit
def swiglu_kernel(inputs, results, factors, amaxes, num_tokens, width, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """inputs [T, 2 W] to results silu(a) b [T, W], their amaxes [programs], and factors [W / BLOCK_SIZE, T].

    A factor bounds the gradients of a token's channels in a tile: the maximum of |silu'(a) b| and |silu(a)|.
    """
    largest = tl.zeros([ROWS, BLOCK_SIZE], tl.float32)
    for index in range(tl.program_id(0), num_tokens // ROWS * (width // BLOCK_SIZE), tl.num_programs(0)):
        row, column = start_of(num_tokens, width, index, ROWS, BLOCK_SIZE)
        at = inputs + row * (2 * width) + column + offsets(2 * width, ROWS, BLOCK_SIZE)
        a, b = widen(tl.load(at)), widen(tl.load(at + width))
        s = exact_sigmoid(a)
        # FP32, before it is rounded to the input's dtype: Transformer Engine takes its amax there, too.
        y = a * s * b
        tl.store(results + row * width + column + offsets(width, ROWS, BLOCK_SIZE), y.to(results.dtype.element_ty))
        largest = tl.maximum(largest, tl.abs(y))
        factor = tl.maximum((tl.abs(gate_gradient(a, s, 1.0, 1.0)) + SLACK_OF_SUM) * tl.abs(b), tl.abs(a * s))
        tl.store(factors + tokens_of(num_tokens, row, column, ROWS, BLOCK_SIZE), tl.max(factor, axis=1))
    tl.store(amaxes + tl.program_id(0), tl.max(largest))


@triton.jit
def swiglu_gradients_amax_kernel(
    gradients, inputs, factors, amax, num_tokens, width, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """Raise amax to that of the gradients of inputs [T, 2 W], given those of SwiGLU's result [T, W] and its factors."""
    for index in range(tl.program_id(0), num_tokens // ROWS * (width // BLOCK_SIZE), tl.num_programs(0)):
        row, column = start_of(num_tokens, width, index, ROWS, BLOCK_SIZE)
        dy = widen(tl.load(gradients + row * width + column + offsets(width, ROWS, BLOCK_SIZE)))
        factor = tl.load(factors + tokens_of(num_tokens, row, column, ROWS, BLOCK_SIZE))
        # A token's channels in a tile are skipped where the largest gradient times the largest factor does not exceed
        # the amax that all programs have found so far. A program may see an older, smaller amax: then it reads inputs
        # that it could have skipped, and the result is the same.
        bound = tl.max(tl.abs(dy), axis=1) * factor * SLACK
        # False for a NaN bound: its inputs are read. Threads load the amax separately and may see different values. The
        # minimum over all rows is exchanged between the warps, so that the branch is uniform.
        is_left_out = bound <= tl.load(amax, volatile=True)
        if tl.min(is_left_out.to(tl.int32)) == 0:
            at = inputs + row * (2 * width) + column + offsets(2 * width, ROWS, BLOCK_SIZE)
            is_read = (is_left_out == 0)[:, None]
            a, b = widen(tl.load(at, mask=is_read, other=0.0)), widen(tl.load(at + width, mask=is_read, other=0.0))
            s = exact_sigmoid(a)
            largest = tl.maximum(tl.abs(gate_gradient(a, s, b, dy)), tl.abs(a * s * dy))
            tl.atomic_max(amax, without_nan(tl.max(largest)))


@triton.jit
def quantize_kernel(
    inputs, amaxes, rows, columns, scale_inv, infinity, num_tokens, width, POWER_OF_TWO: tl.constexpr,
    FORMAT: tl.constexpr, NUM_AMAXES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """inputs [T, W] with amaxes [NUM_AMAXES] to their codes and the transpose. A program has one tile."""
    tile_column, tile_row = tl.program_id(0), tl.program_id(1)
    if NUM_AMAXES == 1:  # annotated: there was no first launch
        tile_row, tile_column = reversed_tile()
    y = load_tile(inputs + tile_offset(tile_row, tile_column, width, BLOCK_SIZE), width, BLOCK_SIZE)
    # Every program takes the maximum of the first launch's amaxes itself, which saves a launch. NUM_AMAXES is 1 or
    # PROGRAMS, both powers of two.
    largest = tl.max(tl.load(amaxes + tl.arange(0, NUM_AMAXES)))
    scale = quant_scale_of(largest, FP32_MAX, POWER_OF_TWO, FORMAT)
    if (tile_row == 0) & (tile_column == 0):
        tl.store(scale_inv, tl.div_rn(1.0, scale))
        flag_infinity(largest, infinity)
    store_codes(y, scale, tile_row, tile_column, num_tokens, width, rows, columns, FORMAT, BLOCK_SIZE)


@triton.jit
def quantize_swiglu_gradients_kernel(
    gradients, inputs, amax, rows, columns, scale_inv, infinity, num_tokens, width, POWER_OF_TWO: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """gradients [T, W] and inputs [T, 2 W] to the codes of the inputs' gradients [T, 2 W], given their amax.

    A program has one tile of a, b and dy, and stores two tiles: da in the first W columns, and db in the others.
    """
    TYPE: tl.constexpr = inputs.dtype.element_ty
    tile_column, tile_row = tl.program_id(0), tl.program_id(1)
    inputs += tile_offset(tile_row, tile_column, 2 * width, BLOCK_SIZE)
    a, b = load_tile(inputs, 2 * width, BLOCK_SIZE), load_tile(inputs + width, 2 * width, BLOCK_SIZE)
    dy = load_tile(gradients + tile_offset(tile_row, tile_column, width, BLOCK_SIZE), width, BLOCK_SIZE)
    # One amax, raised by all programs of the first launch.
    largest = tl.load(amax)
    scale = quant_scale_of(largest, FP32_MAX, POWER_OF_TWO, FORMAT)
    if (tile_row == 0) & (tile_column == 0):
        tl.store(scale_inv, tl.div_rn(1.0, scale))
        flag_infinity(largest, infinity)
    da = gate_gradient_tile(a, b, dy, TYPE, True)
    store_codes(da, scale, tile_row, tile_column, num_tokens, 2 * width, rows, columns, FORMAT, BLOCK_SIZE)
    db = swiglu_tile(a, dy, TYPE, True)
    store_codes(
        db, scale, tile_row, tile_column + width // BLOCK_SIZE, num_tokens, 2 * width, rows, columns, FORMAT, BLOCK_SIZE
    )


def _quantize(inputs: Tensor, amaxes: Tensor, to: TensorwiseOutput) -> None:
    """The second launch of a cast and of SwiGLU."""
    tokens, width = inputs.shape
    quantize_kernel[(width // BLOCK_SIZE, tokens // BLOCK_SIZE)](
        inputs, amaxes, to.rows, to.columns, to.scale_inv, to.infinity, tokens, width,
        POWER_OF_TWO=to.is_power_of_two, FORMAT=to.spec, NUM_AMAXES=amaxes.numel(), BLOCK_SIZE=BLOCK_SIZE, num_warps=8,
    )  # fmt: skip


def _amaxes(inputs: Tensor) -> Tensor:
    """The first launch of a cast: FP32 [PROGRAMS]."""
    amaxes = inputs.new_empty(PROGRAMS, dtype=torch.float32)
    amax_kernel[(PROGRAMS,)](inputs, amaxes, *inputs.shape, ROWS=32, BLOCK_SIZE=BLOCK_SIZE, num_warps=4)
    return amaxes


def cast(inputs: Tensor, to: TensorwiseOutput) -> None:
    """Quantize inputs [T, W], contiguous, BF16, FP16 or FP32."""
    amaxes = annotation(inputs, "amax")
    _quantize(inputs, _amaxes(inputs) if amaxes is None else amaxes, to)


def swiglu(inputs: Tensor, to: TensorwiseOutput) -> None:
    """Quantize silu(a) b [T, W]; a and b are the halves of inputs [T, 2 W], contiguous, BF16, FP16 or FP32.

    The inputs are annotated with the factors of their gradients.
    """
    tokens, width = inputs.shape[0], inputs.shape[1] // 2
    results, amaxes = inputs.new_empty(tokens, width), inputs.new_empty(PROGRAMS, dtype=torch.float32)
    factors = inputs.new_empty(width // BLOCK_SIZE, tokens, dtype=torch.float32)
    swiglu_kernel[(PROGRAMS,)](
        inputs, results, factors, amaxes, tokens, width, ROWS=16, BLOCK_SIZE=BLOCK_SIZE, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    annotate(inputs, "factors", factors)
    _quantize(results, amaxes, to)


def swiglu_backward(gradients: Tensor, inputs: Tensor, to: TensorwiseOutput) -> None:
    """Quantize the gradients [T, 2 W] of inputs, given those of the result [T, W]; as `swiglu`.

    Inputs without an annotation went through another SwiGLU kernel. Infinite factors then make the first launch read
    all of them.
    """
    tokens, width = gradients.shape
    factors = annotation(inputs, "factors")
    if factors is None or factors.shape != (width // BLOCK_SIZE, tokens):
        factors = inputs.new_full((width // BLOCK_SIZE, tokens), torch.inf, dtype=torch.float32)
    amax = inputs.new_zeros(1, dtype=torch.float32)
    swiglu_gradients_amax_kernel[(GRADIENTS_PROGRAMS,)](
        gradients, inputs, factors, amax, tokens, width, ROWS=32, BLOCK_SIZE=BLOCK_SIZE, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    quantize_swiglu_gradients_kernel[(width // GRADIENTS_BLOCK_SIZE, tokens // GRADIENTS_BLOCK_SIZE)](
        gradients, inputs, amax, to.rows, to.columns, to.scale_inv, to.infinity, tokens, width,
        POWER_OF_TWO=to.is_power_of_two, FORMAT=to.spec, BLOCK_SIZE=GRADIENTS_BLOCK_SIZE, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
