"""The GPU's own conversion to FP8, for kernels that write what Transformer Engine would.

Four FP32 to four FP8 in one register. Triton's own cast makes pairs; where one is stored twice, once through shared
memory, ptxas before 13.0 stores what another register holds (seen with 12.8 and 12.9; triton-lang/triton 11111).
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from megafp8.fp8.triton_rounding import round_to_code

FOUR_CASTS = (
    "{{ .reg .b16 low, high; cvt.rn.satfinite.{0}.f32 low, $2, $1; cvt.rn.satfinite.{0}.f32 high, $4, $3;"
    " mov.b32 $0, {{low, high}}; }}"
)
TO_E4M3 = tl.constexpr(FOUR_CASTS.format("e4m3x2"))
TO_E5M2 = tl.constexpr(FOUR_CASTS.format("e5m2x2"))
FROM_BF16 = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
TO_BF16 = tl.constexpr(
    "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }"
)
# Triton's interpreter knows no instructions of a GPU.
IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def cast_to_code(y, GRID: tl.constexpr):
    """FP32 to codes of E4M3 or E5M2, uint8, rounded to nearest, ties to even; what is beyond the largest saturates."""
    if IS_INTERPRETED:
        codes = round_to_code(y, None, GRID).to(tl.uint8)
    elif GRID.mantissa_bits == 3:
        codes = tl.inline_asm_elementwise(TO_E4M3, "=r,r,r,r,r", [y], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        codes = tl.inline_asm_elementwise(TO_E5M2, "=r,r,r,r,r", [y], dtype=tl.uint8, is_pure=True, pack=4)
    return codes


@triton.jit
def cast_to_words(a, b, c, d, GRID: tl.constexpr):
    """As `cast_to_code`, codes of four numbers in one int32, that of `a` in the lowest byte."""
    if IS_INTERPRETED:
        low = round_to_code(a, None, GRID) | (round_to_code(b, None, GRID) << 8)
        words = low | (round_to_code(c, None, GRID) << 16) | (round_to_code(d, None, GRID) << 24)
    elif GRID.mantissa_bits == 3:
        words = tl.inline_asm_elementwise(TO_E4M3, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    else:
        words = tl.inline_asm_elementwise(TO_E5M2, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    return words


@triton.jit
def widen(x):
    """BF16, FP16 or FP32 as FP32; BF16 two at a time."""
    if x.dtype.is_bf16() and not IS_INTERPRETED:
        x = tl.inline_asm_elementwise(FROM_BF16, "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        x = x.to(tl.float32)
    return x


@triton.jit
def round_to_type(y, TYPE: tl.constexpr):
    """FP32 rounded to BF16, FP16 or FP32, as FP32; BF16 two at a time."""
    if TYPE.is_bf16() and not IS_INTERPRETED:
        y = tl.inline_asm_elementwise(TO_BF16, "=r,=r,r,r", [y], dtype=tl.float32, is_pure=True, pack=2)
    else:
        y = y.to(TYPE).to(tl.float32)
    return y
