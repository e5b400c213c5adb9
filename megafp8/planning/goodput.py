"""Goodput of a run: effective training time and its range, tokens per day, where time goes, what to improve first."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

from megafp8.errors import ConfigError
from megafp8.planning.goodput_inputs import DAY_S, GoodputInputs, input_problems
from megafp8.planning.goodput_simulation import PARTS, Outcome, simulate
from megafp8.planning.save_interval import (
    BestInterval,
    daly_interval_s,
    find_best_interval,
    long_run_fraction,
    young_interval_s,
)

MIN_COVERAGE = 0.9


@dataclass(frozen=True)
class RunRange:
    """A range that contains the result of another run with probability `coverage`."""

    low: float
    high: float
    coverage: float


@dataclass(frozen=True)
class Improvement:
    """The gain from halving one cost."""

    name: str
    effective_fraction: float
    gain_fraction: float
    """Difference of the effective training time to that without the change, in long simulated runs."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The result of a goodput study.

    Attributes:
        save_interval: steps between saves in all that follows; None: a run without failures does not save.
        best: the search for the best interval; None without failures.
        at_intervals: interval in steps and effective training time, by where the interval comes from.
        run_fractions: effective training time of each simulated run.
        effective_fraction: their mean.
        standard_error: of that mean.
        interval: of the effective training time of a single run.
        parts: mean fraction of the elapsed time by part.
        improvements: by gain.
        num_failures, num_planned: means over the simulated runs.
    """

    inputs: GoodputInputs
    save_interval: Optional[int]
    best: Optional[BestInterval]
    at_intervals: dict[str, tuple[int, float]]
    run_fractions: list[float]
    effective_fraction: float
    standard_error: float
    interval: RunRange
    parts: dict[str, float]
    num_failures: float
    num_planned: float
    improvements: list[Improvement]

    @property
    def tokens_per_day(self) -> float:
        """Tokens of steps that are not lost, per day of elapsed time."""
        return self.effective_fraction * self.full_speed_tokens_per_day

    @property
    def full_speed_tokens_per_day(self) -> float:
        """Tokens per day without any interruption."""
        return self.inputs.tokens_per_step * DAY_S / self.inputs.step_s


def study_goodput(inputs: GoodputInputs) -> Goodput:
    """Simulate the run and its variants.

    Raises:
        ConfigError: with every input that is out of range.
    """
    if problems := list(input_problems(inputs)):
        raise ConfigError(problems)
    best = find_best_interval(inputs)
    used = inputs.save_interval or (best.steps if best else None)
    outcomes = [
        simulate(inputs, used, inputs.duration_s, f"{inputs.seed}/{replica}") for replica in range(inputs.replicas)
    ]
    fractions = [outcome.effective_fraction for outcome in outcomes]
    return Goodput(
        inputs=inputs,
        save_interval=used,
        best=best,
        at_intervals=compare_intervals(inputs, best),
        run_fractions=fractions,
        effective_fraction=statistics.fmean(fractions),
        standard_error=statistics.stdev(fractions) / math.sqrt(len(fractions)),
        interval=prediction_interval(fractions),
        parts=mean_parts(outcomes),
        num_failures=statistics.fmean(outcome.num_failures for outcome in outcomes),
        num_planned=statistics.fmean(outcome.num_planned for outcome in outcomes),
        improvements=find_improvements(inputs, used),
    )


def prediction_interval(values: Sequence[float]) -> RunRange:
    """The range between two order statistics that contains a further value with a probability of at least 90%.

    With n exchangeable values, a further one lies between the j-th smallest and the j-th largest with probability
    (n + 1 - 2 j) / (n + 1), whatever their distribution; values that are equal only increase it. n must be at least 19.
    """
    ordered, count = sorted(values), len(values)
    rank = int((count + 1) * (1 - MIN_COVERAGE) / 2 + 1e-9)
    if rank < 1:
        raise ValueError(f"{count} values are too few for a coverage of {MIN_COVERAGE}")
    return RunRange(ordered[rank - 1], ordered[-rank], (count + 1 - 2 * rank) / (count + 1))


def mean_parts(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Mean fraction of the elapsed time by part."""
    total_s = math.fsum(seconds for outcome in outcomes for seconds in outcome.parts_s.values())
    return {part: math.fsum(outcome.parts_s[part] for outcome in outcomes) / total_s for part in PARTS}


def compare_intervals(inputs: GoodputInputs, best: Optional[BestInterval]) -> dict[str, tuple[int, float]]:
    """Effective training time at the best, the two formulas' and the given interval, in the same long run."""
    intervals, known = {}, {}
    if best is not None:
        known = best.fractions
        mtbf_s = inputs.mean_time_between_failures_s
        formulas_s = {
            "Young's formula": young_interval_s(inputs.stall_s, mtbf_s),
            "Daly's formula": daly_interval_s(inputs.stall_s, mtbf_s),
        }
        intervals["best by simulation"] = best.steps
        intervals |= {name: max(1, round(seconds / inputs.step_s)) for name, seconds in formulas_s.items()}
    if inputs.save_interval is not None:
        intervals["--save-interval"] = inputs.save_interval
    return {
        name: (steps, known[steps] if steps in known else long_run_fraction(inputs, steps))
        for name, steps in intervals.items()
    }


def halved_costs(inputs: GoodputInputs) -> Iterator[tuple[str, GoodputInputs]]:
    """The inputs with each cost halved in turn, as far as the cost is not zero."""

    def halved(*names: str) -> GoodputInputs:
        return dataclasses.replace(inputs, **{name: getattr(inputs, name) / 2 for name in names})

    if inputs.gpu_failures_per_s:
        yield "failures of GPUs", halved("gpu_failures_per_s")
    if inputs.node_failures_per_s:
        yield "failures of nodes", halved("node_failures_per_s")
    if inputs.failures_per_s and inputs.detection_s:
        yield "detection of crashes", halved("detection_s")
    if inputs.failures_per_s and inputs.hang_fraction and inputs.hang_detection_s:
        yield "detection of hangs", halved("hang_detection_s")
    if inputs.restart_s:
        yield "restart", halved("restart_s")
    if inputs.load_s:
        yield "loading a checkpoint", halved("load_s")
    if inputs.stall_s:
        yield "stall of a save", halved("stall_s") if inputs.is_async else halved("stall_s", "write_s")
    if inputs.is_async:
        yield "writing a checkpoint", dataclasses.replace(inputs, write_s=max(inputs.stall_s, inputs.write_s / 2))
    if inputs.spare_nodes is not None and inputs.hardware_fraction and inputs.repair_s:
        yield "repair of a node", halved("repair_s")
    if inputs.maintenance_interval_s is not None:
        yield (
            "planned interruptions",
            dataclasses.replace(inputs, maintenance_interval_s=2 * inputs.maintenance_interval_s),
        )
    if inputs.stragglers_per_s and inputs.straggler_slowdown > 1:
        yield "stragglers", halved("stragglers_per_s")


def find_improvements(inputs: GoodputInputs, save_interval: Optional[int]) -> list[Improvement]:
    """The gain from halving each cost at the same save interval, the largest first."""
    before = long_run_fraction(inputs, save_interval)
    found = []
    for name, changed in halved_costs(inputs):
        after = long_run_fraction(changed, save_interval)
        found.append(Improvement(name, after, after - before))
    return sorted(found, key=lambda improvement: -improvement.gain_fraction)
