"""Verdicts and page of a stability suite, on runs made from a few numbers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megafp8.analysis.seed_statistics import UNDECIDED
from megafp8.analysis.stability import build_report
from megafp8.analysis.stability_gaps import BETTER, INDISTINCT, WORSE
from megafp8.analysis.stability_page import publish_suite, render_page, to_text
from megafp8.analysis.stability_runs import SUITE_FILE
from megafp8.analysis.stability_sweep import NARROWER
from megafp8.errors import DataError, NumericsError
from megafp8.resilience.run_state import RUN_STATE_FILE, RunState
from megafp8.utils.process import current_process

SPREAD = (3.00, 3.06, 2.97, 3.03, 2.94)  # final losses of bf16 over five seeds: 1.6%


@pytest.fixture
def suite(tmp_path: Path, write_run: Callable[..., Path]) -> Callable[..., None]:
    """Adds a run to a suite of one part: its final loss, or None for a run that diverged."""
    runs: list[dict[str, Any]] = []

    def add(part: str, recipe: str, seed: int, loss: float | None, **choice: str) -> None:
        name = f"{part}-{recipe}-seed{seed}{''.join(choice.values())}"
        folder = write_run(
            name, [6.0, 4.0, loss or 5.0], validations={1: 4.5} | ({3: loss} if loss else {}),
            config={"training": {"seed": seed}}, recipe=recipe,
        )  # fmt: skip
        if loss is None:
            write_state(folder, NumericsError.exit_status)
        runs.append({"part": part, "folder": name, "recipe": recipe, "seed": f"seed{seed}", **choice})
        content = {"size": "tiny", "seeds": 5, "known_bad": {"bad": "good"}, "runs": runs}
        (tmp_path / SUITE_FILE).write_text(json.dumps(content))

    return add


def write_state(folder: Path, exit_status: int, state_name: str = "failed") -> None:
    state = RunState(
        state=state_name, step=2, saved_step=2, reason="loss is not finite", exit_status=exit_status, world_size=1,
        process=current_process(), started_at=time.time(), updated_at=time.time(),
    )  # fmt: skip
    (folder / RUN_STATE_FILE).write_text(json.dumps(state.to_plain()))


def add_pairs(suite: Callable[..., None], factor: float, noise: float = 0.001) -> None:
    for seed, loss in enumerate(SPREAD, start=1):
        suite("pairs", "bf16", seed, loss)
        suite("pairs", "fp8", seed, loss * (factor + noise * (-1) ** seed))


@pytest.mark.parametrize(("factor", "verdict"), [(1.001, "within"), (1.2, "beyond"), (1.03, "not decided")])
def test_a_gap_is_compared_with_the_spread_of_the_baseline(suite, tmp_path: Path, factor: float, verdict: str) -> None:
    add_pairs(suite, factor)
    report = build_report(tmp_path)
    assert report.spread_fraction == pytest.approx(0.0158, abs=1e-3)
    (row,) = report.pairs
    assert row.verdict == verdict and row.gap is not None
    assert row.gap.mean == pytest.approx(factor - 1 - 0.0002, abs=1e-6)


def test_a_divergence_is_beyond_any_spread(suite, tmp_path: Path) -> None:
    add_pairs(suite, 1.0)
    suite("pairs", "bf16", 6, 3.0)
    suite("pairs", "fp8", 6, None)
    (row,) = build_report(tmp_path).pairs
    assert (row.verdict, row.num_diverged) == ("beyond", 1)


def test_a_known_bad_control_is_worse_or_says_what_it_takes(suite, tmp_path: Path) -> None:
    for seed, loss in enumerate(SPREAD, start=1):
        suite("controls", "good", seed, loss)
        suite("controls", "bad", seed, loss * (1.01 + 0.002 * (-1) ** seed))
    (row,) = build_report(tmp_path).controls
    assert (row.verdict, row.reference) == (WORSE, "good")


def test_a_control_that_cannot_be_told_apart_names_the_seeds_that_could(suite, tmp_path: Path) -> None:
    for seed, loss in enumerate(SPREAD, start=1):
        suite("controls", "good", seed, loss)
        suite("controls", "bad", seed, loss * (1.004 + 0.01 * (-1) ** seed))
    (row,) = build_report(tmp_path).controls
    assert row.verdict == INDISTINCT and row.seeds_needed is not None and row.detectable_fraction is not None
    assert row.seeds_needed > 5 and row.detectable_fraction > 0.01


def test_a_control_that_comes_out_better_is_not_called_indistinct(suite, tmp_path: Path) -> None:
    for seed, loss in enumerate(SPREAD, start=1):
        suite("controls", "good", seed, loss)
        suite("controls", "bad", seed, loss * (0.98 + 0.002 * (-1) ** seed))
    assert build_report(tmp_path).controls[0].verdict == BETTER


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_a_suite_that_finds_no_control_is_blind(suite, tmp_path: Path, factor: float) -> None:
    """Also a gap that would be within or beyond is no verdict then."""
    add_pairs(suite, factor)
    for seed, loss in enumerate(SPREAD, start=1):
        suite("controls", "good", seed, loss)
        suite("controls", "bad", seed, loss * (1 + 0.01 * (-1) ** seed))
    report, (page, _) = publish_suite(tmp_path)
    assert report.is_blind and [row.verdict for row in report.pairs] == ["blind"]
    assert to_text(report).startswith("Blind: none of the known-bad controls") and ">blind<" in page.read_text()


def test_a_run_without_a_result_leaves_the_end_of_a_range_open(suite, tmp_path: Path) -> None:
    for seed in (1, 2):
        add_sweep(suite, "bf16", [3.0, 2.9, None], seed)
    (tmp_path / "sweep-bf16-seed2lr0.002" / "records.jsonl").unlink()
    assert build_report(tmp_path).sweep[0].edges == {"seed1": 0.002}


def test_divergences_of_a_control_are_compared_by_their_signs(suite, tmp_path: Path) -> None:
    for seed, loss in enumerate(SPREAD, start=1):
        suite("controls", "good", seed, loss)
        suite("controls", "bad", seed, None if seed == 1 else loss * 1.01)
    (row,) = build_report(tmp_path).controls
    assert (row.verdict, row.num_diverged) == (WORSE, 1)


def add_sweep(suite: Callable[..., None], recipe: str, losses: list[float | None], seed: int) -> None:
    for octave, loss in enumerate(losses):
        suite("sweep", recipe, seed, loss, lr=f"lr{0.001 * 2**octave:g}")


def test_the_stable_range_ends_before_the_first_divergence(suite, tmp_path: Path) -> None:
    for seed in (1, 2):
        add_sweep(suite, "bf16", [3.0, 2.9, 2.8, 3.0, 3.1, None], seed)
        add_sweep(suite, "fp8", [3.0, 2.9, 5.5, 3.0, None, None], seed)  # 5.5 lost more than a tenth of 6.0 - 2.8
    base, row = build_report(tmp_path).sweep
    assert base.edges == {"seed1": 0.016, "seed2": 0.016} and not base.is_open
    assert row.edges == {"seed1": 0.002, "seed2": 0.002}
    assert row.verdict == NARROWER and row.octaves is not None
    assert (row.octaves.mean, row.octaves.low, row.octaves.high) == (-3, -4, -2)


def test_a_sweep_without_divergences_decides_nothing(suite, tmp_path: Path) -> None:
    for seed in (1, 2):
        add_sweep(suite, "bf16", [3.0, 2.9], seed)
        add_sweep(suite, "fp8", [3.0, 2.9], seed)
    base, row = build_report(tmp_path).sweep
    assert base.is_open and row.verdict == "not decided"


def test_page_and_json_have_the_verdicts_and_name_missing_runs(suite, tmp_path: Path) -> None:
    add_pairs(suite, 1.001)
    for seed in (1, 2):
        add_sweep(suite, "bf16", [3.0, 2.9, None], seed)
        add_sweep(suite, "fp8", [3.0, None, None], seed)
    for seed, loss in enumerate(SPREAD, start=1):
        suite("controls", "good", seed, loss)
        suite("controls", "bad", seed, loss * 1.02)
    (tmp_path / "controls-good-seed5" / "records.jsonl").unlink()
    report, (page, data) = publish_suite(tmp_path)
    text = page.read_text()
    for name in ("pairs", "sweep", "controls"):
        assert f'<section id="{name}">' in text
    assert text.count("<svg") == 2 * 4  # wide and narrow
    assert "controls: good seed5: not started" in text and "1 of 1 known-bad controls" in text
    assert json.loads(data.read_text())["pairs"][0]["verdict"] == "within"
    assert "Known-bad controls" in to_text(report)
    assert render_page(report) == text


def test_a_run_that_ended_before_it_started_is_told_from_one_that_was_not(suite, tmp_path: Path) -> None:
    for seed in (1, 2):
        suite("pairs", "bf16", seed, 3.0)
        (tmp_path / f"pairs-bf16-seed{seed}" / "records.jsonl").unlink()
    (tmp_path / "pairs-bf16-seed2" / "output.log").write_text("flags: 1 problem")
    first, other = build_report(tmp_path).problems
    assert first == "pairs: bf16 seed1: not started"
    assert other.startswith("pairs: bf16 seed2: ended before it started, see ") and other.endswith("output.log")


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=SUITE_FILE):
        build_report(tmp_path)


def test_controls_are_judged_by_their_forks(tmp_path: Path, write_run: Callable[..., Path]) -> None:
    """A trunk is a pair, by the mean of its forks. Divergences of either form count; what has no result is named."""
    losses = {"mxfp8-emulated": 1.001, "mxfp8-floor": 1.02, "nvfp4-emulated": 1.0, "nvfp4-plain": 1.0}
    diverged = {("mxfp8-floor", 5), ("nvfp4-emulated", 2)}
    for name, factor in losses.items():
        for seed in range(1, 6):
            for step in (4, 8):
                moved = 0.01 * (-1) ** seed if name == "nvfp4-plain" else (-1) ** (step // 4) * 1e-3
                folder = write_run(
                    f"controls/forks/{name}/seed{seed}-step{step}", [3.0, 3.0], first_step=step + 1,
                    validations={step + 2: 3 * factor + moved},
                )  # fmt: skip
                is_cut = (name, seed) in diverged
                write_state(folder, NumericsError.exit_status if is_cut else 0, "failed" if is_cut else "done")
    names = [
        f"{name}/seed{seed}-step{step}" for name in (*losses, "e5m2-forward") for seed in range(1, 6) for step in (4, 8)
    ]
    known_bad = {
        "mxfp8-floor": "mxfp8-emulated",
        "nvfp4-plain": "nvfp4-emulated",
        "e5m2-forward": "tensorwise-emulated",
    }
    content = {"parts": ["controls"], "known_bad": known_bad, "control_forks": names, "runs": []}
    (tmp_path / SUITE_FILE).write_text(json.dumps(content))
    report = build_report(tmp_path)
    found = {row.name: (row.verdict, row.num_diverged, row.num_reference_diverged) for row in report.controls}
    expected = {"mxfp8-floor": (WORSE, 1, 0), "nvfp4-plain": (INDISTINCT, 0, 1), "e5m2-forward": (UNDECIDED, 0, 0)}
    assert found == expected and not report.is_blind
    assert report.controls[0].gaps_fraction[0] == pytest.approx(1.02 / 1.001 - 1, abs=1e-6)
    assert report.problems == (
        "controls: 10 of 50 forks have no result: e5m2-forward/seed1-step4, e5m2-forward/seed1-step8, "
        "e5m2-forward/seed2-step4, ...",
    )
    assert "1 of 3 known-bad controls" in to_text(report)
