"""E2M1, the 4-bit format: rounding by FP32 additions, and two codes to a byte.

E2M1 holds 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign; code n is the n-th of them. Between powers of two the values are
half a power of two apart (0.5 below 2, then 1, then 2). FP32 numbers that large that their own spacing is a given step
round to multiples of the step by themselves, so v + c with c = 1.5 x 2^23 steps is v rounded to nearest, ties to even,
and the low bits of the sum are the number of steps. No rounding comes before that one.

Stochastic rounding moves v by up to half a step, at random, before it is rounded: up with a probability that is v's
place between its two neighbours, in units of 1/256. Blackwell's conversion has 8 random bits an element too.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

MAX = 6.0
EXPONENT_FIELD = 0x7F800000
ONE = 0x3F800000  # the bits of 1.0
EXPONENT_UNIT = 1 << 23
HALF_UNIT_MANTISSA = 0x400000
# From 2^e as bits to those of 1.5 x 2^(e + 22), whose neighbours in FP32 are 2^(e - 1) apart: E2M1's step at 2^e.
TO_COUNTER = 22 * EXPONENT_UNIT + HALF_UNIT_MANTISSA
NOISE_LEVELS = 256


def cast(values: Tensor, out: Tensor, noise: Optional[Tensor] = None) -> Tensor:
    """Round FP32 to packed E2M1 codes. `values` is overwritten.

    Args:
        values: FP32 [..., K], K even.
        out: uint8 [..., K / 2]: element 2i in the low half of byte i.
        noise: uint8 [..., K], random; None rounds to nearest, ties to even.

    Numerics: saturates at 6; the sign of zero is kept; NaN becomes 6 (Transformer Engine's conversion).
    """
    values.nan_to_num_(nan=MAX)
    sign = values.view(torch.int32).bitwise_right_shift(28).bitwise_and_(8)
    magnitude = values.abs_().clamp_(max=MAX)
    power = magnitude.view(torch.int32).bitwise_and(EXPONENT_FIELD).clamp_(min=ONE)  # 2^e as bits, e = 0, 1 or 2
    if noise is not None:
        half_steps = noise.to(torch.float32).add_(0.5 - NOISE_LEVELS / 2).mul_(1 / (2 * NOISE_LEVELS))
        magnitude.add_(half_steps.mul_(power.view(torch.float32)))
    counter = power + TO_COUNTER
    steps = magnitude.add_(counter.view(torch.float32)).view(torch.int32).sub_(counter)
    # A power of two is at code 2 + 2e and 2 steps of its own above zero.
    codes = steps.add_(power.sub_(ONE).bitwise_right_shift_(22)).add_(sign)
    return _pack(codes.to(torch.uint8), out)


def _pack(codes: Tensor, out: Tensor) -> Tensor:
    """Codes [..., K], one a byte, to bytes [..., K / 2]."""
    pairs = codes.view(torch.int16)  # little-endian: the even element is the low byte
    return out.copy_(pairs.bitwise_right_shift(4).bitwise_or_(pairs).bitwise_and_(0xFF))


def unpack(packed: Tensor) -> Tensor:
    """Bytes [..., K / 2] to bytes [..., K], each with one code in its upper half and zeros below."""
    pairs = packed.to(torch.int16)
    even, odd = pairs.bitwise_and(0x0F).bitwise_left_shift_(4), pairs.bitwise_and_(0xF0).bitwise_left_shift_(8)
    return even.bitwise_or_(odd).view(torch.uint8)
