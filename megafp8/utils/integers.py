"""Arithmetic of sizes and seeds."""

from __future__ import annotations

import math

_WORD = 1 << 32
MOST_PARTS = 1 << 14
"""Parts that are tried. A wrong flag may ask for 10^18."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def fitting_size(size: int, *amounts: int) -> int:
    """The number of parts nearest below `size` that divides all amounts: one that also divides `size`, if above 1.

    A divisor of a parallel size divides the number of ranks that it was chosen for.
    """
    common = math.gcd(*amounts)
    return max(
        range(1, min(size, MOST_PARTS) + 1),
        key=lambda parts: (common % parts == 0, size % parts == 0 and parts > 1, parts),
    )


def numpy_seed(*numbers: int) -> int | list[int]:
    """A seed of numpy's `RandomState` from one or more numbers in [0, 2^64); numpy takes words of 32 bits."""
    words: list[int] = []
    for number in numbers:
        words += [number] if number < _WORD else [number % _WORD, number // _WORD]
    return words if len(words) > 1 else words[0]
