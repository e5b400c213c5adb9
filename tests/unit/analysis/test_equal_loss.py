"""Tokens and time at equal loss: ratios of pairs, their intervals, and the columns of a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megafp8.analysis.compare import compare_runs
from megafp8.analysis.pairing import Pair
from megafp8.analysis.runs import load_run, load_runs
from megafp8.analysis.seed_statistics import (
    equal_loss_ratio,
    ratio_interval,
    reached_at,
    validation_losses_over_time,
)
from megafp8.analysis.tables import equal_loss_table, to_markdown

BASE = {10: 4.0, 20: 3.0, 30: 2.5}


def pair_of(write_run: Callable[..., Path], own: dict[int, float]) -> Pair:
    base, run = (
        write_run(name, [3.0] * 30, validations=validations, step_fields={"memory_peak_bytes": None})
        for name, validations in (("base", BASE), ("own", own))
    )
    return Pair(load_run(base), load_run(run))


def test_a_loss_is_reached_between_validations() -> None:
    x, losses = np.array([0.0, 10.0, 20.0]), np.array([4.0, 3.0, 3.5])
    assert reached_at(x, losses, 3.25) == 7.5
    assert reached_at(x, losses, 3.0) == 10
    assert reached_at(x, losses, 2.9) is None  # never
    assert reached_at(x, losses, 4.1) is None  # before the first validation


@pytest.mark.parametrize(
    ("own", "ratio"),
    [
        (BASE, 1.0),
        ({10: 3.5, 20: 2.5, 30: 2.0}, 20 / 30),  # reaches the baseline's last loss after 20 steps
        ({10: 4.2, 20: 3.5, 30: 3.0}, 30 / 20),  # its last loss is one that the baseline has after 20
        ({30: 2.5}, None),
        ({10: 4.0, 20: math.inf}, None),
    ],
)
def test_both_runs_are_taken_to_the_loss_that_both_reach(write_run, own: dict[int, float], ratio: float | None) -> None:
    found = equal_loss_ratio(pair_of(write_run, own))
    assert found == (None if ratio is None else pytest.approx(ratio))


def test_time_is_that_of_the_steps(write_run) -> None:
    pair = pair_of(write_run, {10: 3.5, 20: 2.5, 30: 2.0})
    assert equal_loss_ratio(pair, validation_losses_over_time) == pytest.approx(20 / 30)


def test_the_interval_of_a_ratio_covers_it() -> None:
    generator, num_trials = np.random.default_rng(5), 400
    covered = 0
    for _ in range(num_trials):
        interval = ratio_interval((1.1 * np.exp(0.05 * generator.standard_normal(3))).tolist())
        assert interval.low is not None and interval.high is not None
        covered += interval.low <= 1.1 <= interval.high
    assert covered / num_trials == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / num_trials))


def loss_after(share: np.ndarray, is_decayed: bool) -> np.ndarray:
    """Validation loss after a share of the baseline's tokens; steeper at the end where the learning rate decays."""
    return 2 + 1.2 * np.sqrt(0.05 / (0.05 + share)) - is_decayed * 0.5 * np.maximum(0, share - 0.7)


@pytest.mark.parametrize("is_decayed", [False, True])
@pytest.mark.parametrize(("ratio", "noise"), [(1.0, 0.003), (1.2, 0.001), (0.9, 0.003)])
def test_intervals_cover_the_ratio_of_curves(ratio: float, noise: float, is_decayed: bool) -> None:
    """Five pairs of curves: a run takes `ratio` times the tokens. A seed shifts both curves of a pair, their rounding
    shifts one, and every validation has noise. Asked: 93 to 97%."""
    generator, shares, num_trials = np.random.default_rng(1), np.arange(1, 21) / 20, 1500
    covered = 0
    for _ in range(num_trials):
        ratios = []
        for _ in range(5):
            seed, rounding = generator.normal(0, 0.01), generator.normal(0, 0.003)
            base = loss_after(shares, is_decayed) + seed + generator.normal(0, noise, 20)
            own = loss_after(shares / ratio, is_decayed) + seed + rounding + generator.normal(0, noise, 20)
            found = equal_loss_ratio(Pair(base=base, run=own), lambda losses: (shares, losses))
            assert found is not None
            ratios.append(found)
        interval = ratio_interval(ratios)
        assert interval.low is not None and interval.high is not None
        covered += interval.low <= ratio <= interval.high
    assert 0.93 <= covered / num_trials <= 0.97


def test_a_comparison_has_the_ratios_with_bands(write_run) -> None:
    folders = []
    for seed, shift in ((1, 0.0), (2, 0.1)):
        config = {"training": {"seed": seed}}
        folders += [
            write_run(f"bf16/seed{seed}", [3.0] * 30, validations=BASE, config=config),
            write_run(f"fp8/seed{seed}", [3.0] * 30, validations={10: 4.2, 20: 3.5, 30: 3.0 + shift}, config=config,
                      recipe="fp8"),
        ]  # fmt: skip
    comparison = compare_runs(load_runs(folders), baseline="bf16")
    base, own = comparison.recipes
    assert base.equal_loss_tokens is None
    assert own.equal_loss_tokens is not None and own.equal_loss_tokens.mean == pytest.approx(math.sqrt(1.5 * 30 / 19))
    table = equal_loss_table(comparison)
    assert table is not None and table.header == ("run", "tokens at equal loss", "time at equal loss")
    assert "the larger of a pair's last losses" in to_markdown(comparison)
