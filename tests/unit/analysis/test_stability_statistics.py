"""Coverage of the stability suite's intervals, by simulation, and its powers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megafp8.analysis.stability_statistics import (
    detectable_gap,
    edge_interval,
    excess_interval,
    power_of,
    seeds_needed,
    seeds_needed_by_signs,
    sign_p_value,
)

NUM_TRIALS = 400
# Four standard errors of a fraction near 95% over the trials.
TOLERANCE = 4 * math.sqrt(0.95 * 0.05 / NUM_TRIALS)


@pytest.mark.parametrize(("num_seeds", "gap", "noise"), [(5, 0.004, 0.002), (5, 0.0, 0.01), (3, 0.02, 0.005)])
def test_the_excess_over_the_spread_is_covered(num_seeds: int, gap: float, noise: float) -> None:
    generator, spread, covered = np.random.default_rng(1), 0.01, 0
    for _ in range(NUM_TRIALS):
        base = 3 * (1 + spread * generator.standard_normal(num_seeds))
        gaps = gap + noise * generator.standard_normal(num_seeds)
        interval = excess_interval(gaps.tolist(), base.tolist())
        assert interval.low is not None and interval.high is not None
        covered += interval.low <= gap - spread <= interval.high
    assert covered / NUM_TRIALS == pytest.approx(0.95, abs=TOLERANCE)


def test_the_interval_of_an_edge_covers_differences_between_the_rates_of_a_grid() -> None:
    generator, step, difference, covered = np.random.default_rng(2), 1.0, -0.7, 0
    for _ in range(NUM_TRIALS):
        base = 3 + 0.6 * generator.standard_normal(3)
        own = base + difference + 0.4 * generator.standard_normal(3)
        octaves = np.floor(own / step) * step - np.floor(base / step) * step
        interval = edge_interval(octaves.tolist(), step)
        assert interval.low is not None and interval.high is not None
        covered += interval.low <= difference <= interval.high
    assert covered / NUM_TRIALS >= 0.95 - TOLERANCE


def test_verdicts_without_an_effect_are_wrong_as_often_as_the_confidence_allows() -> None:
    generator = np.random.default_rng(3)
    gaps = generator.standard_normal((20000, 5))
    t = gaps.mean(1) / (gaps.std(1, ddof=1) / math.sqrt(5))
    assert (t > 2.776).mean() == pytest.approx(power_of(1e-9, 5), abs=0.004)
    assert power_of(1e-9, 5) == pytest.approx(0.025, abs=1e-3)  # one of the two tails


def test_the_needed_seeds_reach_the_power_and_one_fewer_does_not() -> None:
    needed = seeds_needed(0.01, 0.012)
    assert needed is not None
    assert power_of(0.01 / 0.012, needed) >= 0.8 > power_of(0.01 / 0.012, needed - 1)
    assert seeds_needed(-0.01, 0.01) is None
    assert seeds_needed(0.01, 0.0) == 2


def test_the_detectable_gap_needs_just_these_seeds() -> None:
    gap = detectable_gap(0.02, 5)
    assert power_of(gap / 0.02, 5) == pytest.approx(0.8, abs=1e-6)
    assert seeds_needed(gap * 1.001, 0.02) == 5


def test_signs_decide_from_five_seeds_on() -> None:
    assert sign_p_value(5, 0) == pytest.approx(1 / 32) and sign_p_value(4, 0) > 0.05
    assert sign_p_value(4, 1) == pytest.approx(6 / 32) and sign_p_value(0, 0) == 1.0
    assert sign_p_value(9, 1) == pytest.approx(11 / 1024)


def test_the_pairs_that_a_sign_test_needs_reach_the_power_and_fewer_do_not() -> None:
    """Four of five pairs are worse: by simulation, how often a sign test over the needed pairs finds it."""
    needed, generator = seeds_needed_by_signs(4, 1, 5), np.random.default_rng(6)
    assert needed is not None and needed > 5

    def power(num_pairs: int) -> float:
        worse = generator.binomial(num_pairs, 0.8, size=4000)
        return float(np.mean([sign_p_value(int(number), int(num_pairs - number)) <= 0.05 for number in worse]))

    assert power(needed) >= 0.8 - 0.025 and power(needed - 1) < 0.8 + 0.025
    assert seeds_needed_by_signs(4, 1, 10) == 2 * needed  # half of the pairs are ties
    assert seeds_needed_by_signs(2, 0, 2) == 5
    assert seeds_needed_by_signs(2, 2, 5) is None is seeds_needed_by_signs(0, 0, 5)
