"""What the words after `--data-path` mean, in Megatron's spelling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class Blend:
    """Shards and how often each is drawn from.

    Attributes:
        prefixes: shards.
        weights: share of the samples of each, not normalized; None draws each shard's samples once.
    """

    prefixes: tuple[str, ...]
    weights: Optional[tuple[float, ...]]


def parse_blend(words: Sequence[str]) -> Blend:
    """Parse `PREFIX`, `PREFIX PREFIX ...` or `WEIGHT PREFIX WEIGHT PREFIX ...`.

    Raises:
        ValueError: numbers and prefixes do not alternate, a weight is not a positive number in ASCII, or it is 0 as a
            share of their sum; with the reason.
    """
    if len(words) == 1:
        return Blend(tuple(words), None)
    numbers = [_as_number(word) for word in words]
    if all(number is None for number in numbers):
        return Blend(tuple(words), None)
    weights = [number for number in numbers[0::2] if number is not None]
    if len(words) % 2 or len(weights) < len(words) // 2 or any(number is not None for number in numbers[1::2]):
        raise ValueError("weights and prefixes must alternate (weight prefix weight prefix), or be prefixes only")
    bad = [word for word, weight in zip(words[0::2], weights, strict=True) if not (0 < weight < math.inf)]
    if bad:
        raise ValueError(f"a weight must be above 0, and {', '.join(bad)} is not")
    total = sum(weights)
    if any(weight / total == 0 for weight in weights):
        raise ValueError(
            f"the smallest weight, {min(weights):g}, is 0 as a share of their sum, {total:g}: give weights such as "
            "0.7 and 0.3"
        )
    return Blend(tuple(words[1::2]), tuple(weights))


def _as_number(word: str) -> Optional[float]:
    try:
        number = float(word)
    except ValueError:
        return None
    if not word.isascii():  # Python reads the digits of every script
        raise ValueError(f"a weight must be in the digits 0 to 9, and {word!r} is not")
    return number
