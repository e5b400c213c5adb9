"""What switching to a recipe costs, from runs that fork from checkpoints of BF16 runs, the trunks.

From each fork every recipe trains some steps on the same batches, and so does BF16. The cost after k steps is

    (loss of the recipe - loss of BF16) / loss of BF16,   both k steps after the fork, on the same validation data.

It is the cost of switching, at this phase of the learning rate, and not that of a whole run: there the state before the
fork would be the recipe's, too. Two runs from one state differ by the recipe and by rounding, and have not had the time
to drift apart, so that the difference has far less noise than that of whole runs.

Forks of one trunk share its weights. Their mean is one value, and the interval is Student's t over trunks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

import numpy as np

from megafp8.analysis.pairing import is_control
from megafp8.analysis.runs import LoadedRun, load_run
from megafp8.analysis.seed_statistics import BLIND, CONFIDENCE, Interval, mean_interval, validation_gaps
from megafp8.config.variants import BASELINE, EMULATED_FORM, FORKS
from megafp8.errors import DataError
from megafp8.metrics.records import VALID, VALID_HIGH_PRECISION
from megafp8.recipes.known_bad import KNOWN_BAD
from megafp8.resilience.run_state import finished_state, has_diverged

FOLDER_NAME = re.compile(r"seed(-?\d+)-step(\d+)")
COSTS, GAINS, NO_DIFFERENCE, DIVERGED, NOISE = "costs", "gains", "not distinguishable", "diverged", "noise floor"
GROWING, FALLING, SATURATING, UNKNOWN = "growing", "falling", "saturating", "course not decided"
SATURATED_FRACTION = 0.25
"""A cost saturates if less than this part of it came in the second half of the steps, with all of the interval."""


@dataclass(frozen=True, order=True)
class ForkPoint:
    """Where runs fork: the trunk, by its seed, and its step."""

    seed: int
    step: int


@dataclass(frozen=True, kw_only=True)
class ForkCost:
    """The cost of one recipe.

    Attributes:
        offsets: steps after the fork at which both were validated, ascending.
        own: cost at each offset, as the recipe computes the loss; of the control and others without a difference, too.
        plain: the same with all GEMMs of the validation in high precision; empty if that was not recorded.
        growth: cost at the last offset minus that at the middle one.
        by_trunk: mean cost at the last offset of each trunk's forks, by seed.
        num_forks: of all trunks.
        full: gap at the end of whole runs of the same seeds, if there are any.
    """

    name: str
    offsets: tuple[int, ...]
    own: tuple[Interval, ...]
    plain: tuple[Interval, ...]
    growth: Interval
    by_trunk: Mapping[int, float]
    num_forks: int
    full: Optional[Interval] = None

    @property
    def cost(self) -> Interval:
        """At the last offset."""
        return self.own[-1]

    @property
    def verdict(self) -> str:
        """What the interval says."""
        if not math.isfinite(self.cost.mean):
            return DIVERGED
        if is_control(self.name):
            return NOISE
        if self.cost.low is None or self.cost.high is None or self.cost.low <= 0 <= self.cost.high:
            return NO_DIFFERENCE
        return COSTS if self.cost.low > 0 else GAINS

    @property
    def course(self) -> str:
        """Whether the cost still changes in the second half of the steps; empty where there is none."""
        if self.verdict not in (COSTS, GAINS) or self.growth.low is None or self.growth.high is None:
            return ""
        # Of a gain, which is below zero, the growth is, too.
        low, high = sorted(math.copysign(1, self.cost.mean) * end for end in (self.growth.low, self.growth.high))
        if max(abs(low), abs(high)) < SATURATED_FRACTION * abs(self.cost.mean):
            return SATURATING
        return GROWING if low > 0 else FALLING if high < 0 else UNKNOWN

    @property
    def half_width(self) -> Optional[float]:
        """Of the interval at the last offset."""
        return None if self.cost.high is None else self.cost.high - self.cost.mean

    @property
    def disagrees(self) -> bool:
        """Whether the intervals of forks and of whole runs have nothing in common."""
        full, cost = self.full, self.cost
        if full is None or None in (full.low, full.high, cost.low, cost.high):
            return False
        return bool(full.low > cost.high or full.high < cost.low)  # type: ignore[operator]


@dataclass(frozen=True, kw_only=True)
class ForkReport:
    """The costs of all recipes.

    Attributes:
        info: a fork of the baseline, for the conditions.
        length: steps of a fork.
        points: that the baseline has.
        controls: costs of the known-bad controls against their good forms; empty if there are none.
        unfinished: names of forks without a result.
    """

    info: LoadedRun
    length: int
    points: tuple[ForkPoint, ...]
    costs: tuple[ForkCost, ...]
    controls: tuple[ForkCost, ...]
    unfinished: tuple[str, ...]

    @property
    def is_blind(self) -> bool:
        """Whether there are known-bad controls, and none of them was found."""
        return bool(self.controls) and not any(is_found(control) for control in self.controls)

    def verdict_on(self, cost: ForkCost) -> str:
        """The verdict on a recipe."""
        return BLIND if self.is_blind and cost.verdict in (COSTS, GAINS, NO_DIFFERENCE) else cost.verdict


def is_found(control: ForkCost) -> bool:
    """Whether a known-bad control is worse than its good form."""
    return control.verdict in (COSTS, DIVERGED)


def read_forks(folder: Path) -> ForkReport:
    """Read the forks below `FOLDER/forks`, and whole runs below FOLDER.

    Raises:
        DataError: there are no finished forks of the baseline, or no validations.
    """
    forks: dict[str, dict[ForkPoint, LoadedRun]] = {}
    unfinished, diverged = list[str](), dict[str, set[ForkPoint]]()
    for path in sorted((folder / FORKS).glob("*/seed*-step*")):
        if (match := FOLDER_NAME.fullmatch(path.name)) is None:
            continue
        name, point = path.parent.name, ForkPoint(int(match[1]), int(match[2]))
        if has_diverged(path):
            diverged.setdefault(name, set()).add(point)
        elif finished_state(path) is None:
            unfinished.append(f"{name}/{path.name}")
        else:
            forks.setdefault(name, {})[point] = load_run(path)
    base = forks.pop(BASELINE, None)
    if not base:
        raise DataError(f"{folder / FORKS / BASELINE} has no finished fork, with which others could be compared")
    controls = [
        cost
        for name, (good, _) in KNOWN_BAD.items()
        if (cost := cost_of(name, forks.get(f"{good}{EMULATED_FORM}", {}), forks.get(name, {}), diverged.get(name, ())))
    ]
    # The good form of a control is a recipe as any other, unless that recipe has forks of its own.
    repeated = {f"{good}{EMULATED_FORM}" for good, _ in KNOWN_BAD.values() if controls and good in forks}
    whole = last_losses(folder / BASELINE)
    costs = [
        cost
        for name in dict.fromkeys([*forks, *diverged])
        if name not in {BASELINE, *KNOWN_BAD, *repeated}
        and (cost := cost_of(name, base, forks.get(name, {}), diverged.get(name, ())))
    ]
    costs = [replace(cost, full=full_gap(whole, last_losses(folder / cost.name))) for cost in costs]
    point, last = max(base.items(), key=lambda item: item[1].steps[-1].step)
    length = last.steps[-1].step - point.step
    return ForkReport(
        info=last, length=length, points=tuple(sorted(base)), costs=tuple(costs),
        controls=tuple(controls), unfinished=tuple(unfinished),
    )  # fmt: skip


def cost_of(
    name: str, base: Mapping[ForkPoint, LoadedRun], runs: Mapping[ForkPoint, LoadedRun],
    diverged: Collection[ForkPoint] = (),
) -> Optional[ForkCost]:  # fmt: skip
    """The cost of a recipe at the points that it and the baseline have; None without such a point.

    Args:
        diverged: points from which it diverged: an infinite cost.
    """
    points = sorted(set(base) & {*runs, *diverged})
    if not points:
        return None
    none = {point: dict.fromkeys(losses(base[point], base[point], point, VALID), math.inf) for point in points}
    own, plain = (
        {point: losses(runs[point], base[point], point, split) if point in runs else none[point] for point in points}
        for split in (VALID, VALID_HIGH_PRECISION)
    )
    offsets = common_offsets(own.values())
    if not offsets:
        raise DataError(f"{name}: the forks have no common steps of validation")
    table = by_trunk(own, offsets)
    has_plain = bool(runs) and common_offsets(plain.values()) == offsets
    with np.errstate(invalid="ignore"):  # after a divergence
        growth = {seed: values[-1] - values[middle_of(offsets)] for seed, values in table.items()}
    return ForkCost(
        name=name, offsets=offsets, own=over_trunks(table),
        plain=over_trunks(by_trunk(plain, offsets)) if has_plain else (),
        growth=mean_interval(list(growth.values())), by_trunk={seed: values[-1] for seed, values in table.items()},
        num_forks=len(points),
    )  # fmt: skip


def losses(run: LoadedRun, base: LoadedRun, point: ForkPoint, split: str) -> dict[int, float]:
    """Relative cost by steps after the fork."""
    gaps = validation_gaps(base, run, split)
    return {step - point.step: gap for step, gap in gaps.items() if step > point.step}


def common_offsets(curves: Iterable[Mapping[int, float]]) -> tuple[int, ...]:
    """Offsets that all curves have, ascending."""
    return tuple(sorted(set.intersection(*map(set, curves))))


def middle_of(offsets: Sequence[int]) -> int:
    """Index of the first offset that is at least half of the last one."""
    return next(index for index, offset in enumerate(offsets) if 2 * offset >= offsets[-1])


def by_trunk(curves: Mapping[ForkPoint, Mapping[int, float]], offsets: Sequence[int]) -> dict[int, np.ndarray]:
    """Mean curve of each trunk's forks, [offsets], by seed."""
    found: dict[int, list[list[float]]] = {}
    for point, curve in curves.items():
        found.setdefault(point.seed, []).append([curve[offset] for offset in offsets])
    return {seed: np.mean(values, axis=0) for seed, values in found.items()}


def over_trunks(curves: Mapping[int, np.ndarray], confidence: float = CONFIDENCE) -> tuple[Interval, ...]:
    """Interval over trunks at each offset."""
    return tuple(mean_interval(list(values), confidence) for values in np.array(list(curves.values())).T)


def last_losses(folder: Path) -> dict[str, float]:
    """The last validation losses of whole runs `FOLDER/seedN` that are done, by the names of their folders."""
    done = [load_run(path) for path in sorted(folder.glob("seed*")) if finished_state(path) is not None]
    return {run.folder.name: run.last_validation.loss for run in done if run.last_validation is not None}


def full_gap(base: Mapping[str, float], runs: Mapping[str, float]) -> Optional[Interval]:
    """Gap at the end of whole runs to those of the baseline; None without pairs."""
    gaps = [(loss - base[name]) / base[name] for name, loss in runs.items() if name in base]
    return mean_interval(gaps) if gaps else None
