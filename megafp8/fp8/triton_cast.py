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
