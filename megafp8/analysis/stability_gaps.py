"""Gaps of a stability suite: recipes against the baseline's own spread, known-bad controls against their good forms.

A divergence is an infinite loss, of a run and of its reference alike, and no pair is dropped for one:

    run diverged, reference not    the run is worse; the gap is +infinity
    reference diverged, run not    the run is better; the gap is -infinity
    both diverged                  a tie, which counts in neither direction; the gap is NaN

Means and Student's intervals need finite gaps. As soon as a run of either side diverged, the verdict is that of a
one-sided sign test over the pairs without ties.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from megafp8.analysis import stability_statistics
from megafp8.analysis.pairing import is_control
from megafp8.analysis.seed_statistics import (
    BEYOND,
    CONFIDENCE,
    CONTROL,
    UNDECIDED,
    Interval,
    gap_verdict,
    mean_interval,
)
from megafp8.analysis.stability_runs import SuiteRun, losses_by_seed
from megafp8.config.variants import BASELINE

WORSE, BETTER, INDISTINCT = "worse", "better at this size", "not distinguishable at this size"


@dataclass(frozen=True, kw_only=True)
class SuiteGap:
    """A recipe or known-bad control against its reference, over paired seeds.

    Attributes:
        reference: what it is compared with.
        gaps_fraction: relative gaps of the final validation loss, by seed; not finite where a run diverged.
        gap: None with a divergence or without two pairs.
        excess: gap minus the baseline's spread, for pairs compared with that spread.
        detectable_fraction: smallest gap that these seeds show with a probability of 80%; None with a divergence.
        seeds_needed: paired seeds that would show the observed gap four times in five; with divergences, the observed
            share of worse pairs. None if that is no more than half, or the mean gap is not positive.
        num_diverged: pairs in which it diverged.
        num_reference_diverged: pairs in which the reference diverged.
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
    num_reference_diverged: int = 0


def compare_losses(runs: Sequence[SuiteRun], name: str, reference: str, verdict: str) -> SuiteGap:
    """The gaps of all seeds in which both have a result, with a verdict to replace."""
    own, base = losses_by_seed(runs, name), losses_by_seed(runs, reference)
    seeds = [seed for seed in own if seed in base]
    return SuiteGap(
        name=name, reference=reference, verdict=verdict,
        gaps_fraction=tuple(relative_gap(own[seed], base[seed]) for seed in seeds),
        num_diverged=sum(math.isinf(own[seed]) for seed in seeds),
        num_reference_diverged=sum(math.isinf(base[seed]) for seed in seeds),
    )  # fmt: skip


def relative_gap(loss: float, reference: float) -> float:
    """Gap as a fraction of the reference's loss. An infinite loss is a divergence; two of them give NaN."""
    return -math.inf if math.isinf(reference) and math.isfinite(loss) else (loss - reference) / reference


def count_signs(gaps: Sequence[float]) -> tuple[int, int]:
    """Pairs that are worse, and pairs that are better; ties are neither."""
    return sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)


def spread_row(runs: Sequence[SuiteRun], name: str) -> SuiteGap:
    """A recipe against the baseline: within or beyond the baseline's own spread over its seeds.

    A divergence of the recipe is beyond, as long as the baseline never diverged. If it did, it has no spread: then the
    row is beyond only if the recipe diverged in more seeds by a sign test over the seeds in which one of them did.
    """
    row = compare_losses(runs, name, BASELINE, CONTROL if is_control(name) else UNDECIDED)
    gaps, base_losses = row.gaps_fraction, list(losses_by_seed(runs, BASELINE).values())
    if not all(map(math.isfinite, base_losses)):
        one_sided = count_signs([gap for gap in gaps if math.isinf(gap)])
        is_beyond = stability_statistics.sign_p_value(*one_sided) <= 1 - CONFIDENCE
    else:
        is_beyond = row.num_diverged > 0
    if is_beyond and not is_control(name):
        return dataclasses.replace(row, verdict=BEYOND)
    if not all(map(math.isfinite, (*gaps, *base_losses))) or len(gaps) < 2 or len(base_losses) < 2:
        return row
    excess = stability_statistics.excess_interval(gaps, base_losses)
    verdict = row.verdict if is_control(name) else gap_verdict(excess, 0.0)
    return dataclasses.replace(row, verdict=verdict, gap=mean_interval(gaps), excess=excess)


def control_row(row: SuiteGap) -> SuiteGap:
    """A known-bad control against its good form: worse, or not distinguishable with what would be needed.

    Student's interval of the mean gap decides; with a divergence on either side, sign tests at the same confidence.
    """
    gaps = row.gaps_fraction
    if len(gaps) < 2:
        return row
    if not all(map(math.isfinite, gaps)):
        return judge_signs(row)
    gap = mean_interval(gaps)
    assert gap.low is not None and gap.high is not None and gap.spread is not None
    verdict = WORSE if gap.low > 0 else BETTER if gap.high < 0 else INDISTINCT
    return dataclasses.replace(
        row, gap=gap, verdict=verdict,
        detectable_fraction=stability_statistics.detectable_gap(gap.spread, len(gaps)),
        seeds_needed=stability_statistics.seeds_needed(gap.mean, gap.spread),
    )  # fmt: skip


def judge_signs(row: SuiteGap) -> SuiteGap:
    """The verdict of pairs with divergences, and the pairs that would show the observed share of worse ones."""
    num_worse, num_better = count_signs(row.gaps_fraction)
    is_worse = stability_statistics.sign_p_value(num_worse, num_better) <= 1 - CONFIDENCE
    is_better = stability_statistics.sign_p_value(num_better, num_worse) <= 1 - CONFIDENCE
    needed = stability_statistics.seeds_needed_by_signs(num_worse, num_better, len(row.gaps_fraction))
    verdict = WORSE if is_worse else BETTER if is_better else INDISTINCT
    return dataclasses.replace(row, verdict=verdict, seeds_needed=needed)
