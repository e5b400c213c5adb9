"""Verdicts of a stability suite with divergences: of recipes, of baselines and good forms, and at every rate.

How often a verdict is wrong is found by simulation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Optional

import numpy as np
import pytest

from megafp8.analysis.seed_statistics import UNDECIDED
from megafp8.analysis.stability_gaps import (
    BETTER,
    INDISTINCT,
    WORSE,
    compare_losses,
    control_row,
    relative_gap,
    spread_row,
)
from megafp8.analysis.stability_page import gap_text, needed_text, sweep_cells
from megafp8.analysis.stability_runs import SuiteRun
from megafp8.analysis.stability_sweep import AS_WIDE, NARROWER, WIDER, SweepRow, compared_sweep, sweep_rows

BAD = math.inf  # a run that diverged
FINE = (3.00, 3.06, 2.97, 3.03, 2.94)


def suite_run(recipe: str, seed: int, loss: Optional[float], lr: float = 0.001) -> SuiteRun:
    """A run with a final loss; None without a result."""
    choice = {"recipe": recipe, "seed": f"seed{seed}", "lr": f"lr{lr}"}
    if loss is None:
        return SuiteRun(part="part", choice=choice, run=None, problem="not started")
    records = SimpleNamespace(steps=[SimpleNamespace(loss=5.5)], last_validation=SimpleNamespace(loss=loss))
    return SuiteRun(part="part", choice=choice, run=records, is_diverged=math.isinf(loss))  # type: ignore[arg-type]


def pairs_of(own: Sequence[float], base: Sequence[float], names: tuple[str, str] = ("bad", "good")) -> list[SuiteRun]:
    return [suite_run(name, seed, loss) for name, losses in zip(names, (own, base), strict=True)
            for seed, loss in enumerate(losses)]  # fmt: skip


def test_gaps_of_divergences_have_a_direction() -> None:
    assert relative_gap(BAD, 3.0) == math.inf and relative_gap(3.0, BAD) == -math.inf
    assert math.isnan(relative_gap(BAD, BAD)) and relative_gap(3.3, 3.0) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("own", "base", "verdict", "text", "needed"),
    [
        # (divergences of the control, of its good form)
        ((BAD, BAD, BAD, BAD, 2.9), FINE, INDISTINCT, "4 of 5 diverged", True),
        ((BAD,) * 5, FINE, WORSE, "5 of 5 diverged", False),
        ((3.1,) * 5, (BAD, BAD, BAD, BAD, 3.0), INDISTINCT, "0 of 5 diverged, good in 4", False),
        ((3.1,) * 5, (BAD,) * 5, BETTER, "0 of 5 diverged, good in 5", False),
        ((BAD,) * 5, (BAD,) * 5, INDISTINCT, "5 of 5 diverged, good in 5", False),
        ((BAD, 3.1, 3.1, 3.1, 3.1), (BAD, 3.0, 3.0, 3.0, 3.0), INDISTINCT, "1 of 5 diverged, good in 1", True),
        ((BAD,), (3.0,), "not decided", "1 of 1 diverged", False),
    ],
)  # fmt: skip
def test_divergences_of_both_forms_count(own, base, verdict: str, text: str, needed: bool) -> None:
    row = control_row(compare_losses(pairs_of(own, base), "bad", "good", UNDECIDED))
    assert (row.verdict, gap_text(row)) == (verdict, text)
    assert (needed_text(row) != "-") == needed and (not needed or row.seeds_needed > len(own))


@pytest.mark.parametrize(
    ("own", "base", "verdict"),
    [
        (FINE, (BAD, BAD, BAD, 3.0, 3.1), "not decided"),  # bf16 has no spread
        ((BAD,) * 5, (3.0, 3.1, 3.2, 3.0, BAD), "not decided"),  # four seeds with a divergence of the recipe alone
        ((BAD,) * 6, (3.0, 3.1, 3.2, 3.0, 3.1, BAD), "beyond"),
        ((BAD, *FINE[1:]), FINE, "beyond"),
        (FINE, FINE, "within"),
    ],
)  # fmt: skip
def test_a_baseline_that_diverged_has_no_spread(own, base, verdict: str) -> None:
    row = spread_row(pairs_of(own, base, ("fp8", "bf16")), "fp8")
    assert row.verdict == verdict and row.num_reference_diverged == sum(map(math.isinf, base))
    assert (row.gap is None) == any(map(math.isinf, (*own, *base)))


def test_equal_forms_that_diverge_are_told_apart_no_more_often_than_the_confidence_allows() -> None:
    generator, num_trials = np.random.default_rng(7), 3000
    found: Counter[str] = Counter()
    for _ in range(num_trials):
        losses = 3 + 0.05 * generator.standard_normal((2, 7))
        losses[generator.random((2, 7)) < 0.3] = BAD
        found[control_row(compare_losses(pairs_of(*losses.tolist()), "bad", "good", UNDECIDED)).verdict] += 1
    tolerance = 4 * math.sqrt(0.05 * 0.95 / num_trials)
    assert found[WORSE] / num_trials <= 0.05 + tolerance and found[BETTER] / num_trials <= 0.05 + tolerance
    assert found[WORSE] > 0 and found[BETTER] > 0


RATES = (0.001, 0.002, 0.004, 0.008)


def sweep_of(table: Mapping[str, Sequence[Sequence[Optional[float]]]]) -> SweepRow:
    """The row of `fp8`, from the losses by seed of `fp8` and `bf16`."""
    runs = [
        suite_run(recipe, seed, loss, lr)
        for recipe, seeds in table.items() for seed, losses in enumerate(seeds)
        for lr, loss in zip(RATES, losses, strict=True)
    ]  # fmt: skip
    return next(row for row in sweep_rows(runs) if row.name == "fp8")


BASE, NEVER, OPEN = (3, 3, 3, BAD), (BAD,) * 4, (3,) * 4
NARROW, SLOW = (3, BAD, BAD, BAD), 3.3  # a loss above the limit, 3.25


@pytest.mark.parametrize(
    ("base", "own", "verdict", "edge"),
    [
        ([BASE] * 2, [NEVER] * 2, NARROWER, "none in 2 of 2 seeds"),
        ([BASE] * 3, [NEVER, BASE, BASE], "not decided", "0.004, none in 1 of 3 seeds"),
        ([NEVER] * 2, [BASE] * 2, WIDER, "0.004"),
        ([NEVER] * 2, [NEVER] * 2, "not decided", "none in 2 of 2 seeds"),
        ([BASE] * 2, [BASE] * 2, AS_WIDE, "0.004"),
        ([OPEN] * 2, [NARROW] * 2, NARROWER, "0.001"),
        ([OPEN] * 2, [OPEN] * 2, "not decided", "0.008 (end of the sweep)"),
        ([NARROW] * 2, [NEVER] * 2, "not decided", "none in 2 of 2 seeds"),  # a step apart
        ([(3.2, 3, 3, BAD)] * 2, [(SLOW, 3, 3, BAD)] * 2, AS_WIDE, "0.004"),
        ([BASE] * 2, [(SLOW,) * 4] * 2, NARROWER, "none in 2 of 2 seeds"),
        ([BASE] * 2, [(BAD, 3, 3, BAD)] * 2, NARROWER, "none in 2 of 2 seeds"),
        # without some results: the range of the third seed is not known, or it is and not compared
        ([BASE] * 3, [BASE, BASE, (SLOW, None, 3, BAD)], AS_WIDE, "0.004"),
        ([BASE] * 3, [NARROW, NARROW, (3, 3, None, 3)], NARROWER, "0.001"),
        ([BASE] * 2, [(SLOW, None, 3, BAD)] * 2, "not decided", "-"),
        ([NARROW] * 3, [BASE, BASE, (BAD, None, 3, 3)], WIDER, "0.004, none in 1 of 3 seeds"),
        ([BASE, BASE, (BAD, None, 3, 3)], [NARROW] * 3, NARROWER, "0.001"),
        ([BASE, BASE, OPEN], [NARROW, NARROW, (BAD, None, None, None)], NARROWER, "0.001, none in 1 of 3 seeds"),
        ([NARROW, NARROW, OPEN], [BASE, BASE, (3, BAD, None, BAD)], WIDER, "0.001 to 0.004"),
    ],
)  # fmt: skip
def test_a_recipe_without_a_stable_rate_is_not_passed_over(base, own, verdict: str, edge: str) -> None:
    row = sweep_of({"bf16": base, "fp8": own})
    assert (row.verdict, sweep_cells(row)[2]) == (verdict, edge)


@pytest.mark.parametrize("num_seeds", [2, 3])
@pytest.mark.parametrize("difference", [0.0, -2.5])
def test_verdicts_of_ranges_at_the_ends_of_a_grid_are_rarely_wrong(num_seeds: int, difference: float) -> None:
    """Ranges that often end below or above the grid; the truth is equal ranges, or ones more than a step narrower."""
    generator, num_trials, found = np.random.default_rng(8), 2000, Counter[str]()

    def row_of(name: str, octaves: np.ndarray) -> SweepRow:
        """A sweep of rates 2, 4, 8, 16 and 32."""
        floors = np.floor(octaves)
        return SweepRow(
            name=name, rates=tuple(2.0**octave for octave in range(1, 6)), is_open=bool((floors >= 5).any()),
            losses={f"seed{seed}": (3.0,) for seed in range(num_seeds)},
            edges={f"seed{seed}": None if floor < 1 else 2.0 ** min(floor, 5) for seed, floor in enumerate(floors)},
        )  # fmt: skip

    for _ in range(num_trials):
        middle = generator.uniform(0.5, 5.5)
        base = middle + 0.3 * generator.standard_normal(num_seeds)
        own = base + difference + 0.8 * generator.standard_normal(num_seeds)
        found[compared_sweep(row_of("fp8", own), row_of("bf16", base)).verdict] += 1
    wrong = (WIDER, AS_WIDE) if difference else (NARROWER, WIDER)
    assert all(found[verdict] / num_trials <= 0.025 + 0.014 for verdict in wrong), found
    assert found[NARROWER if difference else AS_WIDE] > 0
