"""Verdicts of a stability suite, from the records of its runs.

Every verdict rests on paired seeds: two runs of a pair have the same initial weights and the same batches. A run that
ended with non-finite numbers or a spike has diverged; its loss counts as infinite. Runs without a result are named, and
the verdict of the part is without them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.analysis import stability_statistics
from megafp8.analysis.pairing import is_control
from megafp8.analysis.runs import LoadedRun, describe_unfinished, is_unfinished, load_run
from megafp8.analysis.seed_statistics import BEYOND, CONTROL, UNDECIDED, Interval, gap_verdict, mean_interval
from megafp8.analysis.stability_faults import FaultRow, fault_rows
from megafp8.errors import DataError
from megafp8.metrics.records import RECORDS_FILE
from megafp8.utils.files import UnreadableFile, read_text
from megafp8.utils.strict_json import parse_json

SUITE_FILE = "stability.json"  # of launch/stability.py
BASELINE = "bf16"
WORSE, BETTER, INDISTINCT = "worse", "better at this size", "not distinguishable at this size"
AS_WIDE, NARROWER, WIDER = "as wide", "narrower", "wider"
# Of what the best run learned, from which on a finite run counts as diverged. Runs that fall back to the frequencies of
# tokens alone still learn most of it: in the tiny size they lose an eighth.
LOST_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """A run of a part.

    Attributes:
        choice: names of its options: recipe, seed, and others of the part.
        run: its records; None without any.
        problem: why it has no result; empty if it is done or diverged.
    """

    part: str
    choice: Mapping[str, str]
    run: Optional[LoadedRun]
    is_diverged: bool = False
    problem: str = ""

    @property
    def recipe(self) -> str:
        """Name of its recipe or control."""
        return self.choice["recipe"]

    @property
    def seed(self) -> str:
        """Its seed, as `seed3`."""
        return self.choice["seed"]

    @property
    def final_loss(self) -> Optional[float]:
        """Last validation loss; infinite after a divergence, None without a result."""
        if self.is_diverged:
            return math.inf
        last = self.run.last_validation if self.run else None
        if self.problem or last is None:
            return None
        return last.loss if math.isfinite(last.loss) else math.inf


@dataclass(frozen=True, kw_only=True)
class SuiteGap:
    """A recipe or known-bad control against its reference, over paired seeds.

    Attributes:
        reference: what it is compared with.
        gaps_fraction: relative gaps of the final validation loss, by seed; infinite where it diverged.
        gap: None with a divergence or without two pairs.
        excess: gap minus the baseline's spread, for pairs compared with that spread.
        detectable_fraction: smallest gap that these seeds show with a probability of 80%.
        seeds_needed: paired seeds that would show the observed gap four times in five; None if it is not positive.
    """

    name: str
    reference: str
    verdict: str
    gaps_fraction: tuple[float, ...]
    gap: Optional[Interval] = None
    excess: Optional[Interval] = None
    detectable_fraction: Optional[float] = None
    seeds_needed: Optional[int] = None
    num_diverged: int = 0


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """The stable range of learning rates of a recipe.

    Attributes:
        rates: of the sweep, ascending.
        losses: final losses by seed and rate; infinite after a divergence, None without a result.
        edges: largest stable rate by seed; None if none is stable.
        octaves: log2 of the mean ratio of its edges to the baseline's, with its interval.
        is_open: whether some seed did not diverge at the largest rate, so that its range is only known to reach it.
    """

    name: str
    rates: tuple[float, ...]
    losses: Mapping[str, tuple[Optional[float], ...]]
    edges: Mapping[str, Optional[float]]
    verdict: str = ""
    octaves: Optional[Interval] = None
    is_open: bool = False


@dataclass(frozen=True, kw_only=True)
class SuiteReport:
    """All verdicts of a suite.

    Attributes:
        info: content of the suite's file, without its runs.
        spread_fraction: standard deviation of the baseline's final loss over its seeds; None without two.
        problems: runs without a result.
    """

    info: Mapping[str, Any]
    runs: tuple[SuiteRun, ...]
    spread_fraction: Optional[float]
    pairs: tuple[SuiteGap, ...]
    sweep: tuple[SweepRow, ...]
    controls: tuple[SuiteGap, ...]
    continuation: tuple[SuiteGap, ...]
    faults: tuple[FaultRow, ...]
    problems: tuple[str, ...]

    def of_part(self, part: str) -> list[SuiteRun]:
        """The runs of a part."""
        return [run for run in self.runs if run.part == part]

    def to_plain(self) -> dict[str, Any]:
        """Everything but the records, for JSON."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "runs"}
        rows = {
            key: [dataclasses.asdict(row) for row in value]
            for key, value in plain.items()
            if value and dataclasses.is_dataclass(next(iter(value), None) if isinstance(value, tuple) else None)
        }
        results = [
            {"part": run.part, **run.choice, "final_loss": run.final_loss, "is_diverged": run.is_diverged}
            for run in self.runs
        ]
        return {**plain, **rows, "runs": results}


def load_suite(folder: Path) -> tuple[dict[str, Any], list[SuiteRun]]:
    """Read the suite's file and the records of its runs.

    Raises:
        DataError: the folder has no suite, or its file is damaged.
    """
    path = folder / SUITE_FILE
    try:
        info = parse_json(read_text(path))
        entries = info.pop("runs")
        loaded: dict[str, SuiteRun] = {}
        runs = []
        for entry in entries:
            choice = {key: value for key, value in entry.items() if key not in ("part", "folder", "tokens")}
            name = entry["folder"]
            if name not in loaded:
                loaded[name] = load_suite_run(folder / name, entry["part"], choice)
            runs.append(dataclasses.replace(loaded[name], part=entry["part"], choice=choice))
    except (UnreadableFile, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no file of a stability suite: {error}") from error
    return info, runs


def load_suite_run(folder: Path, part: str, choice: Mapping[str, str]) -> SuiteRun:
    """Read one run."""
    run = load_run(folder) if (folder / RECORDS_FILE).is_file() else None
    if run is None:
        return SuiteRun(part=part, choice=choice, run=None, problem="not started")
    if not is_unfinished(folder):
        return SuiteRun(part=part, choice=choice, run=run)
    state = describe_unfinished(folder)
    problem = "" if state.is_diverged else state.reason
    return SuiteRun(part=part, choice=choice, run=run, is_diverged=state.is_diverged, problem=problem)


def build_report(folder: Path) -> SuiteReport:
    """Judge the runs of a suite.

    Raises:
        DataError: as `load_suite`.
    """
    info, runs = load_suite(folder)
    of_part: dict[str, list[SuiteRun]] = {}
    for run in runs:
        of_part.setdefault(run.part, []).append(run)
    pairs, sweep = of_part.get("pairs", []), of_part.get("sweep", [])
    controls, continuation = of_part.get("controls", []), of_part.get("continuation", [])
    faults = [run for run in of_part.get("faults", []) if run.run is not None and not run.problem]
    base_losses = finite_losses(pairs, BASELINE)
    return SuiteReport(
        info=info,
        runs=tuple(runs),
        spread_fraction=stability_statistics.relative_spread(base_losses) if len(base_losses) > 1 else None,
        pairs=tuple(spread_row(pairs, name, base_losses) for name in names_of(pairs) if name != BASELINE),
        sweep=tuple(sweep_rows(sweep)),
        controls=tuple(control_row(controls, bad, good) for bad, good in info.get("known_bad", {}).items() if controls),
        continuation=tuple(
            spread_row(continuation, name, finite_losses(continuation, BASELINE))
            for name in names_of(continuation) if name != BASELINE
        ),
        faults=tuple(planted_rows(faults, info.get("fault_step"))),
        problems=tuple(
            f"{run.part}: {' '.join(run.choice.values())}: {run.problem or 'no validation'}"
            for run in runs if run.final_loss is None
        ),
    )  # fmt: skip


def planted_rows(runs: Sequence[SuiteRun], first_step: Optional[int]) -> list[FaultRow]:
    """The rows of planted faults, from the losses and events of runs with a result."""
    if first_step is None:
        return []
    of_arm = {(run.recipe, run.choice["fault"], run.seed): run.run for run in runs if run.run is not None}
    losses = {arm: run.series("loss").tolist() for arm, run in of_arm.items()}
    return fault_rows(losses, {arm: run.events for arm, run in of_arm.items()}, first_step)


def names_of(runs: Sequence[SuiteRun]) -> list[str]:
    """The recipes of a part, in order."""
    return list(dict.fromkeys(run.recipe for run in runs))


def losses_by_seed(runs: Sequence[SuiteRun], name: str) -> dict[str, float]:
    """Final losses of a recipe by seed, of the runs that have a result."""
    return {run.seed: run.final_loss for run in runs if run.recipe == name and run.final_loss is not None}


def finite_losses(runs: Sequence[SuiteRun], name: str) -> list[float]:
    """Finite final losses of a recipe."""
    return [loss for loss in losses_by_seed(runs, name).values() if math.isfinite(loss)]


def paired_gaps(runs: Sequence[SuiteRun], name: str, reference: str) -> list[float]:
    """Relative gaps of the seeds in which both have a result and the reference did not diverge."""
    own, base = losses_by_seed(runs, name), losses_by_seed(runs, reference)
    return [(own[seed] - base[seed]) / base[seed] for seed in own if math.isfinite(base.get(seed, math.inf))]


def spread_row(runs: Sequence[SuiteRun], name: str, base_losses: Sequence[float]) -> SuiteGap:
    """A recipe against the baseline: within or beyond the baseline's own spread over its seeds."""
    gaps = paired_gaps(runs, name, BASELINE)
    num_diverged = sum(not math.isfinite(gap) for gap in gaps)
    row = SuiteGap(
        name=name, reference=BASELINE, gaps_fraction=tuple(gaps), num_diverged=num_diverged,
        verdict=CONTROL if is_control(name) else BEYOND if num_diverged else UNDECIDED,
    )  # fmt: skip
    if num_diverged or len(gaps) < 2 or len(base_losses) < 2:
        return row
    excess = stability_statistics.excess_interval(gaps, base_losses)
    verdict = row.verdict if is_control(name) else gap_verdict(excess, 0.0)
    return dataclasses.replace(row, verdict=verdict, gap=mean_interval(gaps), excess=excess)


def control_row(runs: Sequence[SuiteRun], bad: str, good: str) -> SuiteGap:
    """A known-bad control against its good form: worse, or not distinguishable with what would be needed."""
    gaps = paired_gaps(runs, bad, good)
    num_diverged = sum(not math.isfinite(gap) for gap in gaps)
    row = SuiteGap(name=bad, reference=good, gaps_fraction=tuple(gaps), num_diverged=num_diverged, verdict=INDISTINCT)
    if num_diverged:
        is_worse = stability_statistics.is_worse_by_signs([gap > 0 for gap in gaps])
        return dataclasses.replace(row, verdict=WORSE if is_worse else INDISTINCT)
    if len(gaps) < 2:
        return dataclasses.replace(row, verdict=UNDECIDED)
    gap = mean_interval(gaps)
    assert gap.low is not None and gap.high is not None and gap.spread is not None
    verdict = WORSE if gap.low > 0 else BETTER if gap.high < 0 else INDISTINCT
    return dataclasses.replace(
        row, gap=gap, verdict=verdict,
        detectable_fraction=stability_statistics.detectable_gap(gap.spread, len(gaps)),
        seeds_needed=stability_statistics.seeds_needed(gap.mean, gap.spread),
    )  # fmt: skip


def sweep_rows(runs: Sequence[SuiteRun]) -> list[SweepRow]:
    """The stable range of every recipe, and how it compares with the baseline's."""
    if not runs:
        return []
    limit = divergence_limit(runs)
    found = [sweep_row([run for run in runs if run.recipe == name], name, limit) for name in names_of(runs)]
    base = next((row for row in found if row.name == BASELINE), None)
    return [row if base is None or row is base else compared_sweep(row, base) for row in found]


def divergence_limit(runs: Sequence[SuiteRun]) -> float:
    """Final loss from which on a run has diverged: it lost a tenth of what the best run learned."""
    first = [run.run.steps[0].loss for run in runs if run.run is not None and run.run.steps]
    finals = [run.final_loss for run in runs if run.final_loss is not None]
    if not first or not finals:
        return math.inf
    best = min(finals)
    return best + LOST_FRACTION * (sum(first) / len(first) - best)


def sweep_row(runs: Sequence[SuiteRun], name: str, limit: float) -> SweepRow:
    """Losses and edges of one recipe. The stable range ends before the first rate that diverges."""
    rates = tuple(sorted({float(run.choice["lr"].removeprefix("lr")) for run in runs}))
    losses: dict[str, tuple[Optional[float], ...]] = {}
    edges: dict[str, Optional[float]] = {}
    is_open = False
    for seed in dict.fromkeys(run.seed for run in runs):
        by_rate = {float(run.choice["lr"].removeprefix("lr")): run.final_loss for run in runs if run.seed == seed}
        losses[seed] = tuple(by_rate.get(rate) for rate in rates)
        stable = []
        for rate, loss in zip(rates, losses[seed], strict=True):
            if loss is None or loss > limit:
                break
            stable.append(rate)
        if len(stable) < len(rates) and losses[seed][len(stable)] is None:
            continue  # the run that may end the range has no result yet
        edges[seed] = stable[-1] if stable else None
        is_open |= len(stable) == len(rates)
    return SweepRow(name=name, rates=rates, losses=losses, edges=edges, is_open=is_open)


def compared_sweep(row: SweepRow, base: SweepRow) -> SweepRow:
    """A stable range against the baseline's, over the seeds of both."""
    complete = {seed for seed in row.edges if None not in (*row.losses[seed], *base.losses.get(seed, (None,)))}
    ratios = [
        math.log2(own / other)
        for seed, own in row.edges.items()
        if seed in complete and own is not None and (other := base.edges.get(seed)) is not None
    ]
    if len(ratios) < 2:
        return dataclasses.replace(row, verdict=UNDECIDED)
    step = max(math.log2(after / before) for before, after in zip(row.rates, row.rates[1:], strict=False))
    octaves = stability_statistics.edge_interval(ratios, step)
    assert octaves.low is not None and octaves.high is not None
    is_narrower, is_wider = octaves.high <= 0 and octaves.mean < 0, octaves.low >= 0 and octaves.mean > 0
    if row.is_open and base.is_open:
        verdict = UNDECIDED  # neither range ends in the sweep
    elif is_narrower:
        verdict = NARROWER
    elif is_wider:
        verdict = WIDER
    else:
        verdict = AS_WIDE if max(-octaves.low, octaves.high) <= step else UNDECIDED
    return dataclasses.replace(row, verdict=verdict, octaves=octaves)
