"""Parser of the values of `--data-path`, a blend of token shards in Megatron-LM's syntax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from megafp8.utils.numbers import is_number


@dataclass(frozen=True)
class Blend:
    """Token shards and their sampling weights.

    Attributes:
        prefixes: path prefixes of the shards.
        weights: sampling weight of each, not normalized; None draws every sample of each shard once.
    """

    prefixes: tuple[str, ...]
    weights: Optional[tuple[float, ...]]


def parse_blend(words: Sequence[str]) -> Blend:
    """Parse `PREFIX`, `PREFIX PREFIX ...` or `WEIGHT PREFIX WEIGHT PREFIX ...`.

    Raises:
        ValueError: weights and prefixes do not alternate, or a weight is not a positive ASCII number or vanishes when
            normalized.
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
        raise ValueError(f"weights must be above 0, and {', '.join(bad)} is not")
    total = sum(weights)
    if any(weight / total == 0 for weight in weights):
        raise ValueError(
            f"the smallest weight, {min(weights):g}, rounds to 0 relative to the sum, {total:g}: use weights such as "
            "0.7 and 0.3"
        )
    return Blend(tuple(words[1::2]), tuple(weights))


def _as_number(word: str) -> Optional[float]:
    try:
        number = float(word)
    except ValueError:
        return None
    if math.isfinite(number) and not is_number(word):  # float() accepts the digits of every script
        raise ValueError(f"a weight must be in the digits 0 to 9, and {word!r} is not")
    return number
