"""Intervals and powers of the stability suite. Their coverage is tested by simulation.

A gap is compared with the spread of the baseline over its seeds, which is itself an estimate. `excess_interval` is the
generalized confidence interval of `mean gap - spread`: the two estimates are independent for normal values, so the
quantiles of `d - T s / sqrt(n)  -  spread sqrt((m - 1) / X)`, with Student's T and chi-squared X, give an interval
(Weerahandi, "Generalized Confidence Intervals", JASA 88, 1993).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional

import numpy as np

from megafp8.analysis.seed_statistics import CONFIDENCE, Interval, mean_interval, student_quantile

POWER = 0.8
NUM_QUANTILES = 400  # of each of the two distributions
MOST_SEEDS = 10_000


def relative_spread(losses: Sequence[float]) -> float:
    """Standard deviation over the mean of a baseline's losses over its seeds, with n - 1."""
    return float(np.std(losses, ddof=1) / np.mean(losses))


def excess_interval(gaps: Sequence[float], losses: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Mean gap minus the relative spread of the baseline's losses, with its interval.

    Args:
        gaps: relative gaps of pairs, at least two and finite.
        losses: of the baseline over its seeds, at least two and finite.
    """
    from scipy.special import chdtri, stdtrit

    gap, spread = mean_interval(gaps), relative_spread(losses)
    assert gap.spread is not None
    middles = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    errors = stdtrit(len(gaps) - 1, middles) * gap.spread / math.sqrt(len(gaps))
    spreads = spread * np.sqrt((len(losses) - 1) / chdtri(len(losses) - 1, middles))
    excess = np.subtract.outer(gap.mean - errors, spreads)
    low, high = np.quantile(excess, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(mean=gap.mean - spread, low=float(low), high=float(high))


def power_of(effect: float, num_seeds: int, confidence: float = CONFIDENCE) -> float:
    """Probability that the interval of the mean lies above zero.

    Args:
        effect: true mean gap in standard deviations of a pair's gap.
    """
    from scipy.special import nctdtr

    critical = student_quantile(confidence, num_seeds - 1)
    return float(1 - nctdtr(num_seeds - 1, effect * math.sqrt(num_seeds), critical))


def seeds_needed(gap: float, spread: float, confidence: float = CONFIDENCE) -> Optional[int]:
    """Number of paired seeds that show a gap of this size with a probability of 80%; None for a gap not above zero."""
    if not gap > 0:
        return None
    if not spread > 0:
        return 2
    low, high = 1, 2
    while power_of(gap / spread, high, confidence) < POWER:
        low, high = high, 2 * high
        if high > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(gap / spread, middle, confidence) >= POWER else (middle, high)
    return high


def detectable_gap(spread: float, num_seeds: int, confidence: float = CONFIDENCE) -> float:
    """Smallest true gap that this number of seeds shows with a probability of 80%."""
    low, high = 0.0, 1.0
    while power_of(high, num_seeds, confidence) < POWER:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if power_of(middle, num_seeds, confidence) >= POWER else (middle, high)
    return spread * high


def sign_p_value(num_worse: int, num_better: int) -> float:
    """Probability of at least this many worse pairs if both directions are equally likely: a one-sided sign test.

    Pairs without a direction are not counted. Five worse pairs of five are the fewest that reach 0.05.
    """
    from scipy.special import bdtrc

    return float(bdtrc(num_worse - 1, num_worse + num_better, 0.5)) if num_worse else 1.0


def seeds_needed_by_signs(
    num_worse: int, num_better: int, num_pairs: int, confidence: float = CONFIDENCE
) -> Optional[int]:
    """Smallest number of pairs in which a sign test finds the observed share of worse ones with a probability of 80%.

    Args:
        num_pairs: with those without a direction, of which the same share is expected.

    Returns:
        None if no more than half of the pairs with a direction are worse.
    """
    from scipy.special import bdtrc

    if num_worse <= num_better:
        return None
    share, critical = num_worse / (num_worse + num_better), 1
    for number in range(1, MOST_SEEDS):
        while bdtrc(critical - 1, number, 0.5) > 1 - confidence:
            critical += 1
        if critical <= number and bdtrc(critical - 1, number, share) >= POWER:
            return math.ceil(number * num_pairs / (num_worse + num_better))
    return None


def edge_interval(octaves: Sequence[float], step: float, confidence: float = CONFIDENCE) -> Interval:
    """Mean difference of the largest stable learning rates, with its interval.

    An edge lies between the last stable and the first diverged rate of a grid. The difference of two such edges is
    known to one step, by which the interval is widened on both sides. An edge below the grid counts as one step below
    its first rate, which is the most that it can be.

    Args:
        octaves: log2 of the ratio of the two rates, for each seed.
        step: of the grid in octaves.
    """
    found = mean_interval(octaves, confidence)
    if found.low is None or found.high is None:
        return found
    return Interval(mean=found.mean, low=found.low - step, high=found.high + step, spread=found.spread)
