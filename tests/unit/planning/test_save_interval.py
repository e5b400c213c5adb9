"""The best save interval by simulation, against Young's and Daly's formulas and the figures that Daly published."""

from __future__ import annotations

import pytest
from goodput_runs import small_inputs

from megafp8.planning.goodput_inputs import GoodputInputs
from megafp8.planning.save_interval import daly_interval_s, find_best_interval, interpolated_optimum, young_interval_s

MINUTE, HOUR = 60.0, 3600.0
# Daly, FGCS 22(3), 2006, figures 3 to 5: a save of 5 minutes, a restart of 10, optima in minutes.
PUBLISHED = {24 * HOUR: 117, 6 * HOUR: 57, 15 * MINUTE: 9.1}


def failing(mtbf_s: float, save_s: float, **changes) -> GoodputInputs:
    """Independent failures, synchronous saves and steps much shorter than these."""
    values = {"step_s": save_s / 50, "stall_s": save_s, "write_s": save_s, "gpu_failures_per_s": 1 / mtbf_s}
    return small_inputs(**values | {"save_interval": None} | changes)


def best_s(inputs: GoodputInputs) -> float:
    best = find_best_interval(inputs)
    assert best is not None
    return best.steps * inputs.step_s


@pytest.mark.parametrize(("mtbf_s", "minutes"), PUBLISHED.items())
def test_formula_gives_published_optima(mtbf_s, minutes) -> None:
    assert daly_interval_s(5 * MINUTE, mtbf_s) / MINUTE == pytest.approx(minutes, rel=0.01)


@pytest.mark.parametrize("mtbf_s", [24 * HOUR, 6 * HOUR])
def test_simulation_finds_published_optima_within_5_percent(mtbf_s) -> None:
    found_s = best_s(failing(mtbf_s, 5 * MINUTE, restart_s=10 * MINUTE))
    assert found_s / MINUTE == pytest.approx(PUBLISHED[mtbf_s], rel=0.05)


@pytest.mark.parametrize("ratio", [1e-4, 1e-3])
@pytest.mark.parametrize("seed", [1, 2])
def test_simulation_finds_both_formulas_optimum_within_5_percent(ratio, seed) -> None:
    """A save much shorter than the time between failures: the assumption of both."""
    found_s = best_s(failing(10_000, 10_000 * ratio, seed=seed))
    assert found_s == pytest.approx(young_interval_s(10_000 * ratio, 10_000), rel=0.05)
    assert found_s == pytest.approx(daly_interval_s(10_000 * ratio, 10_000), rel=0.05)


def test_asynchronous_saves_are_more_frequent_but_not_than_they_take() -> None:
    """With a stall of 1 s Young's formula gives 141 s, but each save takes 400 s."""
    found_s = best_s(failing(10_000, 1.0, step_s=1.0, write_s=400.0))
    assert 300 < found_s < 600


def test_without_failures_there_is_no_best_interval() -> None:
    assert find_best_interval(small_inputs(stall_s=1, write_s=1)) is None


def test_saves_that_cost_nothing_follow_every_step() -> None:
    assert find_best_interval(small_inputs(gpu_failures_per_s=1e-3)).steps == 1


def test_runs_that_never_progress_are_not_an_error() -> None:
    best = find_best_interval(failing(10.0, 5.0, restart_s=10_000))
    assert best is not None and max(best.fractions.values()) < 0.01


def test_interpolation_finds_the_minimum_of_its_own_shape() -> None:
    fractions = {steps: 1 / (1 + steps / 7000 + 30 / steps) for steps in (200, 283, 400, 566, 800, 1131)}
    assert interpolated_optimum(fractions, 400) == pytest.approx((30 * 7000) ** 0.5, abs=1)
    rising = {steps: 1 / (1 + steps / 7000) for steps in (200, 283, 400, 566, 800)}
    assert interpolated_optimum(rising, 200) == 200
