"""Intervals and verdicts, compared with tables, an integral and simulated draws."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megafp8.analysis.seed_statistics import (
    BEYOND,
    UNDECIDED,
    WITHIN,
    Interval,
    gap_verdict,
    mean_interval,
    welch_p_value,
)

# Two-sided quantiles of Student's t from printed tables: (values, confidence) -> t.
TABLE = {(2, 0.95): 12.706, (3, 0.95): 4.303, (5, 0.95): 2.776, (11, 0.95): 2.228, (3, 0.90): 2.920, (5, 0.99): 4.604}


def slow_quantile(degrees: int, probability: float) -> float:
    """The quantile of Student's t, from its density by the trapezoidal rule and bisection."""
    constant = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))

    def below(limit: float) -> float:
        x = np.linspace(0.0, limit, 200_001)
        density = constant * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
        return 0.5 + float(np.trapezoid(density, x))

    low, high = 0.0, 100.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return low


@pytest.mark.parametrize(("count", "confidence"), TABLE)
def test_interval_half_widths_match_printed_tables(count: int, confidence: float) -> None:
    values = np.random.default_rng(count).normal(3.0, 0.5, count)
    interval = mean_interval(values.tolist(), confidence)
    assert interval.mean == pytest.approx(values.mean())
    expected = TABLE[count, confidence] * values.std(ddof=1) / math.sqrt(count)
    assert interval.high - interval.mean == pytest.approx(expected, rel=2e-4)
    assert interval.mean - interval.low == pytest.approx(interval.high - interval.mean)


@pytest.mark.parametrize(("count", "confidence"), [(3, 0.95), (4, 0.8), (8, 0.99)])
def test_quantiles_match_a_slow_reference(count: int, confidence: float) -> None:
    values = [float(index**2) for index in range(count)]
    expected = slow_quantile(count - 1, (1 + confidence) / 2) * np.std(values, ddof=1) / math.sqrt(count)
    interval = mean_interval(values, confidence)
    assert interval.high - interval.mean == pytest.approx(expected, rel=1e-5)


def test_intervals_have_their_stated_coverage() -> None:
    """Of 3000 experiments with three seeds each: 95% within three standard errors of 0.4% each."""
    draws = np.random.default_rng(0).normal(0.2, 0.1, (3000, 3))
    intervals = [mean_interval(row) for row in draws]
    held = np.mean([interval.low <= 0.2 <= interval.high for interval in intervals])
    assert held == pytest.approx(0.95, abs=0.012)


def test_a_gap_equal_to_the_bound_is_rarely_decided() -> None:
    """A gap of exactly the bound is called within, or beyond, in one case of forty each."""
    draws = np.random.default_rng(1).normal(0.5, 0.1, (3000, 3))
    verdicts = [gap_verdict(mean_interval(row), 0.5) for row in draws]
    for verdict in (WITHIN, BEYOND):
        assert verdicts.count(verdict) / 3000 == pytest.approx(0.025, abs=0.009)


def test_one_value_has_no_interval() -> None:
    interval = mean_interval([0.1])
    assert interval == Interval(mean=0.1)
    assert gap_verdict(interval, 0.5) == UNDECIDED


def test_verdicts() -> None:
    def around(mean: float) -> Interval:
        return Interval(mean=mean, low=mean - 0.1, high=mean + 0.1, spread=0.1)

    assert gap_verdict(around(0.3), 0.5) == gap_verdict(around(-7.0), 0.5) == gap_verdict(around(0.4), 0.5) == WITHIN
    assert gap_verdict(around(0.45), 0.5) == gap_verdict(around(0.6), 0.5) == UNDECIDED
    assert gap_verdict(around(0.61), 0.5) == BEYOND


def test_a_run_that_diverged_is_beyond() -> None:
    interval = mean_interval([0.1, math.nan, 0.1])
    assert math.isnan(interval.mean) and math.isnan(interval.spread)
    assert gap_verdict(interval, 0.5) == gap_verdict(mean_interval([math.inf]), 0.5) == BEYOND


def test_the_test_of_agreement_rejects_equal_groups_as_often_as_its_level() -> None:
    generator, num_trials = np.random.default_rng(4), 2000
    spreads = (1.0, 3.0, 0.5, 2.0)
    values = [
        welch_p_value([(spread * generator.standard_normal(4)).tolist() for spread in spreads])
        for _ in range(num_trials)
    ]
    rejected = np.mean([value is not None and value < 0.05 for value in values])
    assert rejected == pytest.approx(0.05, abs=0.025)  # the approximation is known to be liberal for few values
    apart = welch_p_value([[0.0, 0.1, -0.1], [1.0, 1.1, 0.9], [0.0, 0.1, -0.1]])
    assert apart is not None and apart < 0.01


def test_the_test_of_agreement_needs_two_groups_of_two_values() -> None:
    assert welch_p_value([[1.0, 2.0]]) is None
    assert welch_p_value([[1.0, 2.0], [1.0]]) is None
    assert welch_p_value([[1.0, 1.0], [1.0, 1.0]]) == 1.0
    assert welch_p_value([[1.0, 1.0], [2.0, 2.0]]) == 0.0
