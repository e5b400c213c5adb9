"""When a run computes by its recipes, and when in high precision: `--fp8-schedule bf16:100,fp8:900,bf16`.

The stretches in their order, each with its last step; the last one has none and goes on to the end. `fp8` (or `fp4`) is
the run with its recipes and its precision map, `bf16` (`fp32` without --bf16) the same run in high precision.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Optional

from megafp8.config.schema import PrecisionConfig

QUANTIZED = ("fp8", "fp4")
HIGH = ("bf16", "fp32")


class Stretch(NamedTuple):
    """Some steps on end.

    Attributes:
        precision: a word of QUANTIZED or HIGH.
        last_step: None for the last stretch.
    """

    precision: str
    last_step: Optional[int]

    @property
    def is_quantized(self) -> bool:
        """Does the run compute by its recipes?"""
        return self.precision in QUANTIZED


@functools.lru_cache(maxsize=16)
def parse_schedule(text: str) -> tuple[Stretch, ...]:
    """Read `bf16:100,fp8:900,bf16`.

    Raises:
        ValueError: it is no schedule; the message says why.
    """
    stretches: list[Stretch] = []
    parts = text.split(",")
    for part in parts:
        word, colon, step = part.strip().partition(":")
        if word not in (*QUANTIZED, *HIGH):
            raise ValueError(f"{word!r} is none of {', '.join((*HIGH, *QUANTIZED))}")
        if colon and not step.isdecimal():
            raise ValueError(f"{part.strip()!r}: the last step of a stretch is a whole number")
        stretches.append(Stretch(word, int(step) if colon else None))
    steps = [stretch.last_step for stretch in stretches[:-1]]
    if None in steps:
        raise ValueError("every stretch but the last has its last step, as in bf16:100,fp8:900,bf16")
    if stretches[-1].last_step is not None:
        raise ValueError(
            f"{parts[-1].strip()!r}: the last stretch goes to the end of the run and has no last step: give "
            f"{stretches[-1].precision}, or another stretch behind it"
        )
    if any(later <= earlier for earlier, later in zip([0, *steps], steps)):  # noqa: B905
        raise ValueError(f"last steps rise from 1: {', '.join(map(str, steps))}")
    if any(a.is_quantized == b.is_quantized for a, b in zip(stretches, stretches[1:])):  # noqa: B905
        raise ValueError("stretches in high precision and quantized ones take turns")
    return tuple(stretches)


def is_quantized_at(precision: PrecisionConfig, step: int) -> bool:
    """Whether a step (the first is 1) computes by the run's recipes; always without a schedule."""
    if precision.fp8_schedule is None:
        return True
    stretches = parse_schedule(precision.fp8_schedule)
    return next(each for each in stretches if each.last_step is None or step <= each.last_step).is_quantized
