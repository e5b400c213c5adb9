"""Rounding of FP32 to BF16 at random, up or down with the probability that its expectation is exact.

The random bits are a hash of an element's position in its weight, the number of an update and 32 further bits of the
element. There is no generator to save, and ranks with copies of a weight draw the same bits. `kernels/ema.py` has the
same arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Odd steps of the seed from element to element and from update to update, and the factors of the hash lowbias32
# (Wellons 2018, "Prospecting for hash functions").
POSITION_STEP, UPDATE_STEP = 0x9E3779B9, 0x85EBCA6B
FIRST_FACTOR, SECOND_FACTOR = 0x7FEB352D, 0x846CA68B
WORD, LOW_HALF, NAN_HALF = 0xFFFFFFFF, 0xFFFF, 0x7FC0


def round_at_random(values: Tensor, of_element: Tensor, first: int, update: int) -> Tensor:
    """Round to BF16.

    Args:
        values: FP32, flat. A finite value that rounds up above the largest BF16 number becomes infinite; infinities
            stay.
        of_element: FP32, of the same shape, whose bits are those of the element.
        first: position of the first element.
    """
    positions = torch.arange(first, first + values.numel(), device=values.device)
    # 64-bit products wrap, which leaves their low 32 bits right.
    x = (positions * POSITION_STEP + update * UPDATE_STEP) & WORD
    x ^= of_element.contiguous().view(torch.int32).to(torch.int64) & WORD
    x ^= x >> 16
    x = (x * FIRST_FACTOR) & WORD
    x ^= x >> 15
    x = (x * SECOND_FACTOR) & WORD
    x ^= x >> 16
    # Added below the last bit that stays, random bits carry into it as often as the value lies above it. This is
    # rounding of the magnitude; the sign is a bit of its own.
    bits = values.contiguous().view(torch.int32).to(torch.int64) + (x & LOW_HALF)
    halves = torch.where(values.isnan(), NAN_HALF, bits >> 16)  # the carry could leave the exponent of a NaN
    return halves.to(torch.int16).view(torch.bfloat16)
