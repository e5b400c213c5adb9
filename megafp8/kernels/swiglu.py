"""SwiGLU and its gradients inside Triton kernels, for tiles that are given as four quarters (`tiles.py`).

y = silu(a) b
da = silu'(a) b dy
db = silu(a) dy
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from megafp8.kernels.rounding import IS_INTERPRETED, round_to_type

# 1 / (1 + 2^x). The approximate reciprocal flushes subnormal results to zero. Taking it of a quarter of the sum keeps
# the result normal, and the bits are those of `1.0 / (1.0 + tl.exp(-a))`, which guards every step.
INVERSE = tl.constexpr(
    "{ .reg .f32 sum; ex2.approx.ftz.f32 sum, $1; fma.rn.f32 sum, sum, 0f3E800000, 0f3E800000;"
    " rcp.approx.ftz.f32 sum, sum; mul.rn.f32 $0, sum, 0f3E800000; }"
)
PER_E = tl.constexpr(-1.4426950408889634)
# 1 / x in IEEE rounding for 1 <= x <= 2^126, and 2^-126 above: `rcp.rn` without its branch for all other numbers. One
# Newton step with a fused multiply-add corrects the approximation.
EXACT_INVERSE = tl.constexpr(
    "{ .reg .f32 x, y, e; min.f32 x, $1, 0f7E800000; rcp.approx.ftz.f32 y, x;"
    " neg.f32 x, x; fma.rn.f32 e, x, y, 0f3F800000; fma.rn.f32 $0, y, e, y; }"
)


@triton.jit
def sigmoid(a):
    """Sigmoid of FP32, by approximate instructions."""
    if IS_INTERPRETED:
        inverse = 1.0 / (1.0 + tl.exp(-a))
    else:
        inverse = tl.inline_asm_elementwise(INVERSE, "=r,r", [a * PER_E], dtype=tl.float32, is_pure=True, pack=1)
    return inverse


@triton.jit
def exact_sigmoid(a):
    """Transformer Engine's sigmoid: CUDA's `1.f / (1.f + expf(-a))` to the bit, where that is not below 2^-126."""
    if IS_INTERPRETED:
        inverse = 1.0 / (1.0 + tl.exp(-a))
    else:
        sum = 1.0 + libdevice.exp(-a)
        inverse = tl.inline_asm_elementwise(EXACT_INVERSE, "=r,r", [sum], dtype=tl.float32, is_pure=True, pack=1)
    return inverse


@triton.jit
def gate_gradient(a, s, b, dy):
    """silu'(a) b dy, given the sigmoid s of a."""
    return (a * (s * (1.0 - s)) + s) * dy * b


@triton.jit
def sigmoid_of(a, IS_EXACT: tl.constexpr):
    """`exact_sigmoid`, or the faster `sigmoid`."""
    return exact_sigmoid(a) if IS_EXACT else sigmoid(a)


@triton.jit
def swiglu_tile(a, b, TYPE: tl.constexpr, IS_EXACT: tl.constexpr = False):
    """silu(a) b of a tile's quarters, rounded to `TYPE`."""
    return (
        round_to_type(a[0] * sigmoid_of(a[0], IS_EXACT) * b[0], TYPE),
        round_to_type(a[1] * sigmoid_of(a[1], IS_EXACT) * b[1], TYPE),
        round_to_type(a[2] * sigmoid_of(a[2], IS_EXACT) * b[2], TYPE),
        round_to_type(a[3] * sigmoid_of(a[3], IS_EXACT) * b[3], TYPE),
    )


@triton.jit
def gate_gradient_tile(a, b, dy, TYPE: tl.constexpr, IS_EXACT: tl.constexpr = False):
    """silu'(a) b dy of a tile's quarters, rounded to `TYPE`."""
    return (
        round_to_type(gate_gradient(a[0], sigmoid_of(a[0], IS_EXACT), b[0], dy[0]), TYPE),
        round_to_type(gate_gradient(a[1], sigmoid_of(a[1], IS_EXACT), b[1], dy[1]), TYPE),
        round_to_type(gate_gradient(a[2], sigmoid_of(a[2], IS_EXACT), b[2], dy[2]), TYPE),
        round_to_type(gate_gradient(a[3], sigmoid_of(a[3], IS_EXACT), b[3], dy[3]), TYPE),
    )
