"""SwiGLU that writes its result in FP8, by rows and transposed, in one pass each way.

    y = silu(a) b                     da = silu'(a) b dy,  db = silu(a) dy

a and b are the halves of the input's columns. Results are FP32 until they are multiplied with the scale and rounded;
the largest magnitude is noted for delayed scaling. Both FP8 copies come from one reading of the BF16 input: a GEMM of
the forward pass reads the rows, one of the backward pass the transpose.
"""

from __future__ import annotations

from typing import Optional

import triton
import triton.language as tl
from torch import Tensor

from megafp8.fp8.triton_cast import TO_E4M3, TO_E5M2

# Of one program; measured with benchmarks/gpu_swiglu.py.
TOKENS = 128
WIDTH = 64
NUM_WARPS = 8


@triton.jit
def cast(y, TO: tl.constexpr):
    """FP32 to `TO`, E4M3, E5M2 or FP32, rounded to nearest, ties to even; beyond the largest number it saturates."""
    if TO.primitive_bitwidth > 8:
        codes = y.to(TO)
    elif TO.is_fp8e4nv():
        codes = tl.inline_asm_elementwise(TO_E4M3, "=r,r,r,r,r", [y], dtype=tl.uint8, is_pure=True, pack=4)
        codes = codes.to(TO, bitcast=True)
    else:
        codes = tl.inline_asm_elementwise(TO_E5M2, "=r,r,r,r,r", [y], dtype=tl.uint8, is_pure=True, pack=4)
        codes = codes.to(TO, bitcast=True)
    return codes


@triton.jit
def write(y, rows, columns, row, column, tokens, row_width, factor, mask, WITH_COLUMNS: tl.constexpr):
    """One tile of the result at tokens `row` and columns `column`."""
    codes = cast(y * factor, rows.dtype.element_ty)
    tl.store(rows + row[:, None] * row_width + column[None, :], codes, mask=mask)
    if WITH_COLUMNS:
        place = columns + column.to(tl.int64)[:, None] * tokens + row[None, :]
        tl.store(place, tl.trans(codes), mask=tl.trans(mask))


@triton.jit
def swiglu_kernel(
    inputs, rows, columns, scale, amax, scale_inv, tokens, width, WITH_COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """inputs [T, 2 W] to rows [T, W] and columns [W, T]."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = (row < tokens)[:, None] & (column < width)[None, :]
    place = inputs + row[:, None] * (2 * width) + column[None, :]
    a = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(place + width, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(scale)
    y = a * (1.0 / (1.0 + tl.exp(-a))) * b
    write(y, rows, columns, row, column, tokens, width, factor, mask, WITH_COLUMNS)
    tl.atomic_max(amax, tl.max(tl.abs(y)))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inv, tl.div_rn(1.0, factor))


@triton.jit
def swiglu_backward_kernel(
    gradients, inputs, rows, columns, scale, amax, scale_inv, tokens, width, WITH_COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """gradients [T, W] and inputs [T, 2 W] to rows [T, 2 W] and columns [2 W, T]."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = (row < tokens)[:, None] & (column < width)[None, :]
    place = inputs + row[:, None] * (2 * width) + column[None, :]
    a = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(place + width, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(gradients + row[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(scale)
    sigmoid = 1.0 / (1.0 + tl.exp(-a))
    da = (a * (sigmoid * (1.0 - sigmoid)) + sigmoid) * dy * b
    db = a * sigmoid * dy
    write(da, rows, columns, row, column, tokens, 2 * width, factor, mask, WITH_COLUMNS)
    write(db, rows, columns, row, column + width, tokens, 2 * width, factor, mask, WITH_COLUMNS)
    tl.atomic_max(amax, tl.max(tl.maximum(tl.abs(da), tl.abs(db))))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inv, tl.div_rn(1.0, factor))


def swiglu(
    inputs: Tensor, rows: Tensor, columns: Optional[Tensor], scale: Tensor, amax: Tensor, scale_inv: Tensor
) -> None:
    """Write silu(a) b of inputs [T, 2 W], quantized.

    Args:
        inputs: contiguous, BF16, FP16 or FP32.
        rows: FP8 [T, W], written.
        columns: FP8 [W, T], written; None leaves it out.
        scale: FP32, one number that values are multiplied with before they are rounded.
        amax: FP32, one number, raised to the largest magnitude of the unscaled result.
        scale_inv: FP32, one number, written: 1 / scale.
    """
    tokens, width = rows.shape
    grid = (triton.cdiv(tokens, TOKENS), triton.cdiv(width, WIDTH))
    swiglu_kernel[grid](
        inputs, rows, columns, scale, amax, scale_inv, tokens, width, WITH_COLUMNS=columns is not None,
        TOKENS=TOKENS, WIDTH=WIDTH, num_warps=NUM_WARPS,
    )  # fmt: skip


def swiglu_backward(
    gradients: Tensor, inputs: Tensor, rows: Tensor, columns: Optional[Tensor], scale: Tensor, amax: Tensor,
    scale_inv: Tensor,
) -> None:  # fmt: skip
    """Write the gradient of the inputs, quantized: rows [T, 2 W] and columns [2 W, T], else as `swiglu`.

    Args:
        gradients: of the result, [T, W], contiguous.
    """
    tokens, width = gradients.shape
    grid = (triton.cdiv(tokens, TOKENS), triton.cdiv(width, WIDTH))
    swiglu_backward_kernel[grid](
        gradients, inputs, rows, columns, scale, amax, scale_inv, tokens, width, WITH_COLUMNS=columns is not None,
        TOKENS=TOKENS, WIDTH=WIDTH, num_warps=NUM_WARPS,
    )  # fmt: skip
