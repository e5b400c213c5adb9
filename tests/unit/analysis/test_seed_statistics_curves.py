"""Running means, gaps and bands, compared with plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from megafp8.analysis.runs import load_run
from megafp8.analysis.seed_statistics import (
    interval_band,
    mean_interval,
    over_seeds,
    relative_gap,
    smooth,
    validation_gap,
    validation_losses_over_time,
)


def slow_smooth(values, window: int, keeps_width: bool):
    half = window // 2
    means = []
    for i in range(len(values)):
        before, after = min(half, i), min(half, len(values) - 1 - i)
        if not keeps_width:
            before = after = min(before, after)
        part = [value for value in values[i - before : i + after + 1] if np.isfinite(value)]
        means.append(np.mean(part) if part else np.nan)
    return means


@pytest.mark.parametrize("keeps_width", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5, 50])
def test_smooth_against_a_plain_loop(window: int, keeps_width: bool) -> None:
    values = np.random.default_rng(0).normal(size=23)
    values[[3, 4, 5, 20]] = [np.nan, np.inf, -np.inf, np.nan]
    np.testing.assert_allclose(
        smooth(values, window, keeps_width=keeps_width), slow_smooth(values, window, keeps_width), rtol=1e-12
    )


def test_smoothing_keeps_a_straight_line() -> None:
    line = np.linspace(9.0, 1.0, 30)
    np.testing.assert_allclose(smooth(line, 9), line)
    assert smooth(np.array([]), 5).shape == (0,)


def test_gaps_are_taken_at_common_steps(write_run) -> None:
    base = load_run(write_run("a", [4.0, 2.0, 1.0, 1.0], validations={2: 2.0, 4: 1.0}))
    run = load_run(write_run("b", [2.2, 0.9], first_step=2, validations={3: 7.0, 4: 1.5}))
    tokens, gap = relative_gap(base, run)
    assert tokens.tolist() == [2000, 3000]
    np.testing.assert_allclose(gap, [0.1, -0.1])
    tokens, gap = validation_gap(base, run)
    assert (tokens.tolist(), gap.tolist()) == ([4000], [0.5])


def test_a_band_of_seeds_ends_where_the_shortest_run_does() -> None:
    curves = [(np.array([1.0, 2.0, 3.0]), np.array([4.0, 6.0, 9.0])), (np.array([1.0, 4.0]), np.array([2.0, 8.0]))]
    curve = over_seeds(curves)
    assert curve.x.tolist() == [1.0, 3.0]
    assert (curve.mean.tolist(), curve.low.tolist(), curve.high.tolist()) == ([3.0, 7.0], [2.0, 6.0], [4.0, 8.0])
    band = over_seeds(curves, interval_band(0.9))
    assert band.high[1] == pytest.approx(mean_interval([6.0, 8.0], 0.9).high)
    assert np.isnan(over_seeds(curves[:1], interval_band(0.9)).low).all()


def test_time_is_the_sum_of_previous_steps(write_run) -> None:
    run = load_run(write_run("a", [4.0] * 5, validations={2: 3.0, 5: 2.0}))  # steps of 10 ms
    seconds, losses = validation_losses_over_time(run)
    assert seconds == pytest.approx([0.02, 0.05])
    assert losses.tolist() == [3.0, 2.0]
