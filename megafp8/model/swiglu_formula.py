"""SwiGLU and its gradients inside Triton kernels.

    y = silu(a) b                     da = silu'(a) b dy,  db = silu(a) dy
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafp8.fp8.triton_cast import IS_INTERPRETED, round_to_type

# 1 / (1 + 2^x). The hardware's reciprocal takes subnormal results for zero: a quarter of the sum keeps clear of them,
# and the bits are those of `1.0 / (1.0 + tl.exp(-a))`, which guards every step.
INVERSE = tl.constexpr(
    "{ .reg .f32 sum; ex2.approx.ftz.f32 sum, $1; fma.rn.f32 sum, sum, 0f3E800000, 0f3E800000;"
    " rcp.approx.ftz.f32 sum, sum; mul.rn.f32 $0, sum, 0f3E800000; }"
)
PER_E = tl.constexpr(-1.4426950408889634)


@triton.jit
def sigmoid(a):
    """Of FP32."""
    if IS_INTERPRETED:
        inverse = 1.0 / (1.0 + tl.exp(-a))
    else:
        inverse = tl.inline_asm_elementwise(INVERSE, "=r,r", [a * PER_E], dtype=tl.float32, is_pure=True, pack=1)
    return inverse


@triton.jit
def swiglu_of(a, b, TYPE: tl.constexpr):
    """silu(a) b, rounded to `TYPE`."""
    return round_to_type(a * sigmoid(a) * b, TYPE)


@triton.jit
def swiglu_tile(a, b, TYPE: tl.constexpr):
    """silu(a) b, of a tile's parts."""
    return (
        swiglu_of(a[0], b[0], TYPE),
        swiglu_of(a[1], b[1], TYPE),
        swiglu_of(a[2], b[2], TYPE),
        swiglu_of(a[3], b[3], TYPE),
    )


@triton.jit
def gate_gradient(a, b, dy, TYPE: tl.constexpr):
    """silu'(a) b dy, rounded to `TYPE`."""
    s = sigmoid(a)
    return round_to_type((a * (s * (1.0 - s)) + s) * dy * b, TYPE)
