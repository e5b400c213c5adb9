"""What `--data-path` and `--split` mean, in Megatron's spelling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from megafp8.config.derived import split_shares
from megafp8.errors import ConfigError


@dataclass(frozen=True)
class Blend:
    """Shards and how often each is drawn from.

    Attributes:
        prefixes: shards.
        weights: share of the samples of each, not normalized; None draws each shard's samples once.
    """

    prefixes: tuple[str, ...]
    weights: Optional[tuple[float, ...]]


def parse_blend(values: Sequence[str], flag: str) -> Blend:
    """Parse `PREFIX`, `PREFIX PREFIX ...` or `WEIGHT PREFIX WEIGHT PREFIX ...`.

    Args:
        values: the words after the flag.
        flag: for the message.

    Raises:
        ConfigError: some words in the places of weights are numbers and others not, or a weight is not positive.
    """
    if len(values) % 2 == 1:
        return Blend(tuple(values), None)
    weights = [_as_number(word) for word in values[0::2]]
    if all(weight is None for weight in weights):
        return Blend(tuple(values), None)
    bad = [word for word, weight in zip(values[0::2], weights, strict=True) if weight is None or not weight > 0]
    if bad:
        raise ConfigError(
            f"{flag} {' '.join(values)}: {', '.join(map(repr, bad))} should be a positive weight. Give either shards "
            "alone, or each shard after its weight."
        )
    return Blend(tuple(values[1::2]), tuple(weight for weight in weights if weight is not None))


def check_split(split: str) -> None:
    """Check that `--split` is one to three numbers with commas between, not all zero; Megatron takes any text.

    Raises:
        ConfigError: it is not.
    """
    try:
        split_shares(split)
    except ValueError as error:
        raise ConfigError(
            f"--split {split} should be the shares of training, validation and test, for example 969,30,1 or 99,1,0."
        ) from error


def _as_number(word: str) -> Optional[float]:
    try:
        return float(word)
    except ValueError:
        return None
