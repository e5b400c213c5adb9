"""Scales of Adam's moments in FP16 and FP8 (E4M3): one FP32 number for a tensor.

What is stored is the moment divided by its dequant scale, which brings the largest magnitude to the format's: those of
Transformer Engine's Adam, except that

- a scale has 20 significant bits. So the largest magnitude is stored as the format's to the bit, and whoever reads the
  moment in FP32, as a checkpoint has it, and stores it again finds the same scale and the same codes. (With 24 bits the
  quotient of the product may be the number beside it.)
- a moment that is all zero has the smallest normal number for a scale, not zero, whose inverse makes NaN of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.recipes.formats import E4M3

# Largest magnitude that is stored; codes of E4M3 are kept as uint8. FP16's is Transformer Engine's choice.
FORMAT_MAX = {torch.uint8: E4M3.max, torch.float16: torch.finfo(torch.float16).max / 2}
# Below it the inverse of a scale overflows.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
SPARE_BITS = 4  # of FP32's 24
INFINITY = 0x7F800000  # in bits


def dequant_scale_of(largest: Tensor, format_max: Tensor | float) -> Tensor:
    """What stored numbers of moments are multiplied with.

    Args:
        largest: largest magnitudes of moments, FP32 of any shape.
        format_max: of `FORMAT_MAX`, alike or one number.

    Returns:
        FP32, at least `SMALLEST_SCALE`, its inverse finite; infinity where `largest` is not finite.
    """
    # The bits of a GPU's NaN are the largest integer there is: rounded up, they would be those of -0.
    bits = (largest / format_max).clamp(min=SMALLEST_SCALE).view(torch.int32).clamp(max=INFINITY)
    return ((bits + (1 << (SPARE_BITS - 1))) & -(1 << SPARE_BITS)).view(torch.float32)
