"""The cost of switching by forks: what is averaged, verdicts, and how often the intervals have the true cost."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megafp8.analysis import forks, forks_page
from megafp8.analysis.forks import over_trunks, read_forks
from megafp8.analysis.seed_statistics import Interval
from megafp8.errors import DataError, NumericsError
from megafp8.resilience.run_state import RUN_STATE_FILE, RunState
from megafp8.utils.process import current_process

STEPS, LENGTH = (40, 80), 8


def finish(folder: Path, how: str = "done", exit_status: int = 0) -> None:
    now = time.time()
    state = RunState(
        state=how, step=1, saved_step=1, exit_status=exit_status, world_size=1, process=current_process(),
        started_at=now, updated_at=now,
    )  # fmt: skip
    (folder / RUN_STATE_FILE).write_text(json.dumps(state.to_plain()))


def write_forks(
    write_run: Callable[..., Path], costs: dict[str, Callable[[int, int, int], float]], seeds: range = range(1, 5)
) -> Path:
    """Forks whose validation loss is 2 for the baseline and 2 (1 + cost(seed, step, offset)) for others.

    Returns:
        The folder with all of them.
    """
    folder = None
    for name, cost in {"bf16": lambda *_: 0.0, **costs}.items():
        for seed in seeds:
            for step in STEPS:
                evals = {step + each: 2 * (1 + cost(seed, step, each)) for each in range(2, LENGTH + 1, 2)}
                path = write_run(
                    f"forks/{name}/seed{seed}-step{step}", [2.0] * LENGTH, first_step=step + 1, validations=evals
                )
                finish(path)
                folder = path.parents[2]
    assert folder is not None
    return folder


def test_forks_of_a_trunk_count_once(write_run: Callable[..., Path]) -> None:
    """Costs differ between trunks by a thousandth and between the forks of one by a hundredth, which cancels."""
    offsets = {40: -0.01, 80: 0.01}
    folder = write_forks(write_run, {"mxfp8": lambda seed, step, _: 0.05 + 0.001 * seed + offsets[step]})
    (cost,) = read_forks(folder).costs
    assert cost.by_trunk == pytest.approx({seed: 0.05 + 0.001 * seed for seed in range(1, 5)})
    assert cost.num_forks == 8 and cost.offsets == (2, 4, 6, 8)
    half = 3.182 * np.std([1, 2, 3, 4], ddof=1) / 2 * 0.001
    assert cost.half_width == pytest.approx(half, rel=1e-3)
    assert cost.verdict == forks.COSTS and cost.course == forks.SATURATING


@pytest.mark.parametrize(
    ("cost", "verdict", "course"),
    [
        (lambda seed, _, offset: 0.01 * offset + 1e-4 * seed, forks.COSTS, forks.GROWING),
        (lambda seed, _, offset: 0.2 - 0.02 * offset + 1e-4 * seed, forks.COSTS, forks.FALLING),
        (lambda seed, *_: -0.01 + 1e-4 * seed, forks.GAINS, forks.SATURATING),
        (lambda seed, _, offset: -0.01 * offset + 1e-4 * seed, forks.GAINS, forks.GROWING),
        (lambda seed, _, offset: -0.2 + 0.02 * offset + 1e-4 * seed, forks.GAINS, forks.FALLING),
        (lambda seed, *_: 0.01 * (-1) ** seed, forks.NO_DIFFERENCE, ""),
        (lambda seed, *_: math.inf if seed == 2 else 0.0, forks.DIVERGED, ""),
    ],
)
def test_verdicts(
    write_run: Callable[..., Path], cost: Callable[[int, int, int], float], verdict: str, course: str
) -> None:
    (found,) = read_forks(write_forks(write_run, {"mxfp8": cost})).costs
    assert (found.verdict, found.course) == (verdict, course)


@pytest.mark.parametrize("how_many", [1, 8])
def test_a_fork_that_ends_with_non_finite_numbers_is_no_survivor(write_run: Callable[..., Path], how_many: int) -> None:
    """Also a known-bad control that diverges is found, by some or by all of its forks."""
    costs = {name: (lambda seed, *_: 0.01 + 1e-4 * seed) for name in ("tensorwise", "mxfp8-emulated", "mxfp8-floor")}
    folder = write_forks(write_run, costs)
    for name in ("tensorwise", "mxfp8-floor"):
        for path in sorted((folder / "forks" / name).iterdir())[:how_many]:
            finish(path, "failed", exit_status=NumericsError.exit_status)
    report, _ = forks_page.publish_forks(folder)
    ((_, recipe), (control,)) = report.costs, report.controls
    assert recipe.verdict == control.verdict == forks.DIVERGED and recipe.num_forks == 8
    assert not report.is_blind and report.unfinished == ()
    assert "tensorwise diverged within 8 steps." in forks_page.to_text(report)


def test_coverage_is_that_of_the_interval() -> None:
    """With effects of trunks and forks, and noise that is correlated along the curve: 95% within 3 standard errors."""
    draws, num_simulations, hits, width = np.random.default_rng(3), 2000, 0, []
    for _ in range(num_simulations):
        trunks = {}
        for seed in range(4):
            effect = draws.normal(scale=2e-4)
            # Along the curve the noise is a random walk.
            walks = np.cumsum(draws.normal(scale=5e-5, size=(3, 4)), axis=1)
            trunks[seed] = 1e-3 + effect + np.mean(draws.normal(scale=3e-4, size=(3, 1)) + walks, axis=0)
        last = over_trunks(trunks)[-1]
        assert last.low is not None and last.high is not None
        hits += last.low <= 1e-3 <= last.high
        width.append(last.high - last.low)
    assert 0.935 < hits / num_simulations < 0.965


def test_the_page_says_what_was_found(write_run: Callable[..., Path]) -> None:
    costs = {
        "bf16-control": lambda seed, *_: 1e-4 * (-1) ** seed,
        "tensorwise": lambda seed, step, offset: 0.01 + 1e-4 * seed,
    }
    folder = write_forks(write_run, costs)
    report, written = forks_page.publish_forks(folder)
    assert [path.name for path in written] == ["forks.html", "forks.md", "forks.json", "forks.csv", "forks.svg"]
    text = forks_page.to_text(report)
    assert "Switching to tensorwise costs +1.02% ±0.02% after 8 steps, saturating." in text
    assert "Another order of summation: 0.00% ±0.02% after 8 steps." in text
    assert "4 trunks in BF16, forks at steps 40, 80, 8 steps each" in written[0].read_text()
    plain = json.loads(written[2].read_text())
    assert [cost["verdict"] for cost in plain["costs"]] == [forks.NOISE, forks.COSTS]
    assert len(written[3].read_text().splitlines()) == 1 + 2 * 4


@pytest.mark.parametrize("is_found", [True, False])
def test_a_comparison_that_finds_no_control_is_blind(write_run: Callable[..., Path], is_found: bool) -> None:
    """A control is compared with its good form, not with BF16."""
    costs = {
        "tensorwise": lambda seed, *_: 0.01 + 1e-4 * seed,
        "mxfp8-emulated": lambda seed, *_: 0.05 + 1e-4 * seed,
        "mxfp8-floor": lambda seed, *_: 0.05 + 1e-4 * seed + (0.002 + 1e-5 * seed if is_found else 1e-4 * (-1) ** seed),
    }
    report, written = forks_page.publish_forks(write_forks(write_run, costs))
    ((good, recipe), (control,)) = report.costs, report.controls
    assert (good.name, recipe.name) == ("mxfp8-emulated", "tensorwise")  # no forks of mxfp8 itself are there
    assert control.name == "mxfp8-floor" and report.is_blind != is_found
    assert report.verdict_on(recipe) == (forks.COSTS if is_found else forks.BLIND)
    text, page = forks_page.to_text(report), written[0].read_text()
    expected = "1 of 1 known-bad controls found: mxfp8-floor." if is_found else "Blind: of mxfp8-floor, which are known"
    assert expected in text and expected in page and ("Switching to tensorwise" in text) == is_found
    assert "Known-bad controls" in page and ("worse" if is_found else "not found") in text
    assert json.loads(written[2].read_text())["is_blind"] != is_found


def test_a_good_form_is_left_out_where_its_recipe_is_compared(write_run: Callable[..., Path]) -> None:
    """And only there: other recipes may have such names."""
    names = ("mxfp8", "mxfp8-emulated", "blockwise", "blockwise-emulated")
    costs = {name: (lambda seed, *_: 0.01 + 1e-4 * seed) for name in (*names, "mxfp8-floor")}
    report = read_forks(write_forks(write_run, costs))
    assert [cost.name for cost in report.costs] == ["blockwise", "blockwise-emulated", "mxfp8"]


def test_whole_runs_that_disagree_are_named(write_run: Callable[..., Path]) -> None:
    folder = write_forks(write_run, {"mxfp8": lambda seed, *_: 0.01 + 1e-4 * seed})
    for seed in (1, 2, 3):
        finish(write_run(f"bf16/seed{seed}", [2.0], validations={4: 2.0}))
        finish(write_run(f"mxfp8/seed{seed}", [2.0], validations={4: 2.2 + 0.001 * seed}))
    report = read_forks(folder)
    assert report.costs[0].disagrees
    assert any("forks (" in text and "disagree" in text for text in forks_page.warnings(report))


def test_a_folder_without_forks_of_the_baseline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no finished fork"):
        read_forks(tmp_path)


def test_one_trunk_has_no_interval(write_run: Callable[..., Path]) -> None:
    report = read_forks(write_forks(write_run, {"mxfp8": lambda *_: 0.01}, range(1, 2)))
    assert report.costs[0].verdict == forks.NO_DIFFERENCE and report.costs[0].cost == Interval(mean=pytest.approx(0.01))
    assert "One trunk gives no interval" in " ".join(forks_page.warnings(report))
