"""Stable ranges of the learning rate in a stability suite, from sweeps to divergence.

A stable range ends before the first rate that diverges. A finite loss above the limit at a rate below a stable one is
of a run that learned too slowly, and ends no range. Two ranges can lie outside the grid:

    no rate is stable         the range ends below the first rate: it counts as one step below it, its upper limit
    no rate diverges          the range is open: it counts as the last rate, its lower limit

Limits decide only in the direction in which they hold, over the seeds that are compared. A recipe without a stable
rate in some seed is never `wider` or `as wide`, and one whose range is open in some seed is never `narrower`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from megafp8.analysis import stability_statistics
from megafp8.analysis.seed_statistics import UNDECIDED, Interval
from megafp8.analysis.stability_runs import SuiteRun, names_of
from megafp8.config.variants import BASELINE

AS_WIDE, NARROWER, WIDER = "as wide", "narrower", "wider"
# Of what the best run learned, from which on a finite run counts as diverged. Runs that fall back to the frequencies of
# tokens alone still learn most of it: in the tiny size they lose an eighth.
LOST_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """The stable range of learning rates of a recipe.

    Attributes:
        rates: of the sweep, ascending.
        losses: final losses by seed and rate; infinite after a divergence, None without a result.
        edges: largest stable rate by seed; None if none is stable. Seeds whose edge is not known yet are left out.
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

    @property
    def num_unstable(self) -> int:
        """Seeds without a stable rate."""
        return sum(edge is None for edge in self.edges.values())

    @property
    def step(self) -> float:
        """Largest step of the grid in octaves."""
        return max(math.log2(after / before) for before, after in zip(self.rates, self.rates[1:], strict=False))


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
    finals = [run.final_loss for run in runs if run.final_loss is not None and math.isfinite(run.final_loss)]
    if not first or not finals:
        return math.inf
    best = min(finals)
    return best + LOST_FRACTION * (sum(first) / len(first) - best)


def sweep_row(runs: Sequence[SuiteRun], name: str, limit: float) -> SweepRow:
    """Losses and edges of one recipe."""
    rates = tuple(sorted({rate_of(run) for run in runs}))
    losses: dict[str, tuple[Optional[float], ...]] = {}
    edges: dict[str, Optional[float]] = {}
    is_open = False
    for seed in dict.fromkeys(run.seed for run in runs):
        by_rate = {rate_of(run): run.final_loss for run in runs if run.seed == seed}
        losses[seed] = tuple(by_rate.get(rate) for rate in rates)
        start = range_start(losses[seed], limit)
        end = next(
            (index for index in range(start, len(rates)) if not is_stable(losses[seed][index], limit)), len(rates)
        )
        if end < len(rates) and losses[seed][end] is None:
            continue  # the run that may begin or end the range has no result yet
        edges[seed] = rates[end - 1] if end > start else None
        is_open |= start < end == len(rates)
    return SweepRow(name=name, rates=rates, losses=losses, edges=edges, is_open=is_open)


def is_stable(loss: Optional[float], limit: float) -> bool:
    """Whether a run has a result and did not diverge."""
    return loss is not None and math.isfinite(loss) and loss <= limit


def range_start(losses: Sequence[Optional[float]], limit: float) -> int:
    """Index of the first rate whose run did not learn too slowly, that is, end with a finite loss above the limit.

    If it is stable, the range begins there. It is the number of rates if all runs learned too slowly.
    """
    are_slow = (loss is not None and limit < loss < math.inf for loss in losses)
    return next((index for index, slow in enumerate(are_slow) if not slow), len(losses))


def rate_of(run: SuiteRun) -> float:
    """The learning rate of a run."""
    return float(run.choice["lr"].removeprefix("lr"))


def compared_sweep(row: SweepRow, base: SweepRow) -> SweepRow:
    """A stable range against the baseline's, over the seeds in which all runs of both have a result."""
    seeds = [
        seed for seed in row.edges
        if seed in base.edges and None not in (*row.losses[seed], *base.losses[seed])
    ]  # fmt: skip
    has_no_edge = any(row.edges[seed] is None and base.edges[seed] is None for seed in seeds)
    if len(seeds) < 2 or has_no_edge:
        return dataclasses.replace(row, verdict=UNDECIDED)

    def is_open(each: SweepRow) -> bool:
        return any(each.edges[seed] == each.rates[-1] for seed in seeds)

    def is_unstable(each: SweepRow) -> bool:
        return any(each.edges[seed] is None for seed in seeds)

    def edge_octave(edge: Optional[float]) -> float:
        return math.log2(row.rates[0]) - row.step if edge is None else math.log2(edge)

    ratios = [edge_octave(row.edges[seed]) - edge_octave(base.edges[seed]) for seed in seeds]
    octaves = stability_statistics.edge_interval(ratios, row.step)
    assert octaves.low is not None and octaves.high is not None
    verdict = UNDECIDED
    if octaves.high < 0 and not (is_open(row) or is_unstable(base)):
        verdict = NARROWER
    elif octaves.low > 0 and not (is_open(base) or is_unstable(row)):
        verdict = WIDER
    elif max(-octaves.low, octaves.high) <= row.step and not (is_open(row) and is_open(base)):
        verdict = AS_WIDE  # no seed is without an edge: the edges are the same in all of them
    return dataclasses.replace(row, verdict=verdict, octaves=octaves)
