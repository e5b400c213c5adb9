"""Arithmetic of sizes and seeds."""

from __future__ import annotations

_WORD = 1 << 32


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def numpy_seed(*numbers: int) -> int | list[int]:
    """A seed of numpy's `RandomState` from one or more numbers in [0, 2^64); numpy takes words of 32 bits."""
    words: list[int] = []
    for number in numbers:
        words += [number] if number < _WORD else [number % _WORD, number // _WORD]
    return words if len(words) > 1 else words[0]
