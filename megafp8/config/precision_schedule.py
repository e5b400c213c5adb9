"""Phases of precision: `--fp8-schedule`.

A schedule such as `bf16:100,fp8:900,bf16` lists phases, each with its last step; the last phase has none and lasts to
the end of the run. In an `fp8` or `fp4` phase the run uses its recipes and its precision map; in a `bf16` phase (`fp32`
without --bf16) it computes in high precision. In `fp4[*:fprop=bf16;layers.30-31.*=bf16]` the entries in brackets follow
those of the map.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from typing import ClassVar, NamedTuple, Optional

from megafp8.config.schema import PrecisionConfig
from megafp8.recipes.base import HIGH_PRECISION_DTYPES

RECIPE_FAMILIES = ("fp8", "fp4")


class PhaseEntry(str):
    """The text of an entry of a phase."""

    source: ClassVar[str] = "--fp8-schedule"


class SchedulePhase(NamedTuple):
    """Consecutive steps of one precision.

    Attributes:
        precision: one of `RECIPE_FAMILIES` or `HIGH_PRECISION_DTYPES`.
        last_step: None for the last phase.
        entries: of a precision map, after those of the run.
    """

    precision: str
    last_step: Optional[int]
    entries: tuple[str, ...] = ()

    @property
    def is_quantized(self) -> bool:
        """Whether the run uses its recipes in this phase."""
        return self.precision in RECIPE_FAMILIES

    def __str__(self) -> str:
        """As in the schedule, without the last step: `fp4[*:fprop=bf16]`."""
        return self.precision + (f"[{';'.join(self.entries)}]" if self.entries else "")

    def apply(self, precision: PrecisionConfig) -> PrecisionConfig:
        """The precision of a step of this phase, which has no schedule."""
        if not self.is_quantized:
            return without_recipes(precision)
        entries = (*precision.precision_map, *(PhaseEntry(entry) for entry in self.entries))
        return dataclasses.replace(precision, precision_map=entries, fp8_schedule=None)


_PHASE = re.compile(r"(?P<precision>[^\[\]:]*)(?:\[(?P<entries>[^\[\]]*)\])?(?::(?P<step>[^\[\]:]*))?")
_BETWEEN_PHASES = re.compile(r",(?![^\[]*\])")  # an entry has commas between its GEMMs


@functools.lru_cache(maxsize=16)
def parse_schedule(text: str) -> tuple[SchedulePhase, ...]:
    """Parse a schedule such as `bf16:100,fp8:900,fp8[*:fprop=bf16;layers.30-31.*=bf16]`.

    Raises:
        ValueError: it is not a valid schedule, with the reason.
    """
    phases: list[SchedulePhase] = []
    parts = [part.strip() for part in _BETWEEN_PHASES.split(text)]
    for part in parts:
        found = _PHASE.fullmatch(part)
        if found is None:
            raise ValueError(
                f"{part!r}: give PRECISION:LAST_STEP, or PRECISION[ENTRY;ENTRY]:LAST_STEP; an entry has no brackets of "
                "its own, and a range of layers is layers.0-3.*"
            )
        word, entries, step = found.groups()
        if word not in (*RECIPE_FAMILIES, *HIGH_PRECISION_DTYPES):
            raise ValueError(f"{word!r} is not one of {', '.join((*HIGH_PRECISION_DTYPES, *RECIPE_FAMILIES))}")
        if step is not None and not (step.isascii() and step.isdecimal()):
            raise ValueError(f"{part!r}: the last step of a phase must be an integer")
        if entries is not None and (word in HIGH_PRECISION_DTYPES or not entries.strip()):
            raise ValueError(
                f"{part!r}: brackets have the entries of a precision map in a phase of fp8 or fp4, as in "
                "fp8[*:fprop=bf16]"
            )
        given = tuple(entry.strip() for entry in (entries or "").split(";") if entry.strip())
        phases.append(SchedulePhase(word, None if step is None else int(step), given))
    steps = [phase.last_step for phase in phases[:-1] if phase.last_step is not None]
    if len(steps) < len(phases) - 1:
        raise ValueError("every phase except the last needs its last step, as in bf16:100,fp8:900,bf16")
    if phases[-1].last_step is not None:
        raise ValueError(
            f"{parts[-1]!r}: the last phase lasts to the end of the run and takes no step: give {phases[-1]}, or add "
            "another phase after it"
        )
    if any(later <= earlier for earlier, later in zip([0, *steps], steps)):  # noqa: B905
        raise ValueError(f"last steps must increase, starting from at least 1: {', '.join(map(str, steps))}")
    if any((a.is_quantized, a.entries) == (b.is_quantized, b.entries) for a, b in itertools.pairwise(phases)):
        raise ValueError("a phase must differ from the one before it, in high precision or in its entries")
    return tuple(phases)


def without_recipes(precision: PrecisionConfig) -> PrecisionConfig:
    """The same with all GEMMs in high precision in all steps."""
    return dataclasses.replace(precision, fp8_format=None, fp4_format=None, precision_map=(), fp8_schedule=None)


def phase_at(precision: PrecisionConfig, step: int) -> Optional[SchedulePhase]:
    """The phase of a step (counted from 1); None without a schedule."""
    if precision.fp8_schedule is None:
        return None
    phases = parse_schedule(precision.fp8_schedule)
    return next(phase for phase in phases if phase.last_step is None or step <= phase.last_step)


def precision_at(precision: PrecisionConfig, step: int) -> PrecisionConfig:
    """The precision of a step (counted from 1), without a schedule."""
    phase = phase_at(precision, step)
    return precision if phase is None else phase.apply(precision)


def is_quantized_at(precision: PrecisionConfig, step: int) -> bool:
    """Whether a step (counted from 1) uses the run's recipes; always true without a schedule."""
    phase = phase_at(precision, step)
    return phase is None or phase.is_quantized


def precisions(precision: PrecisionConfig) -> Iterator[PrecisionConfig]:
    """The precision without entries of phases, then that of each phase with entries; none has a schedule."""
    yield dataclasses.replace(precision, fp8_schedule=None)
    yield from (phase.apply(precision) for phase in phases_with_entries(precision))


def readable_phases(precision: PrecisionConfig) -> tuple[SchedulePhase, ...]:
    """The phases; none without a schedule, and where it cannot be read, which a rule reports."""
    try:
        return () if precision.fp8_schedule is None else parse_schedule(precision.fp8_schedule)
    except ValueError:
        return ()


def phases_with_entries(precision: PrecisionConfig) -> Iterator[SchedulePhase]:
    """The phases that change the precision map."""
    yield from (phase for phase in readable_phases(precision) if phase.entries)
