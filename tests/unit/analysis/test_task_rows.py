"""Scores of questions in a comparison."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Optional

import pytest

from megafp8.analysis import tables
from megafp8.analysis.compare import Comparison, compare_runs
from megafp8.analysis.comparison_page import render_page
from megafp8.analysis.runs import LoadedRun, load_runs
from megafp8.analysis.scaling_report import analyse, to_markdown
from megafp8.analysis.study_points import StudyPoints, load_points, points_of
from megafp8.metrics.records import TaskScores

BITS = {("bf16", 1): 2.0, ("bf16", 2): 1.0, ("fp8", 1): 2.04, ("fp8", 2): 1.04}


@pytest.fixture
def runs(write_run: Callable[..., Path]) -> list[LoadedRun]:
    names = [(name, seed, {"training": {"seed": seed}}) for name, seed in BITS]
    return load_runs([
        write_run(f"{name}/seed{seed}", [4.0] * 8, validations={4: 3.0, 8: 2.0}, recipe=name, config=config,
                  num_parameters=1000, flops_per_token=6e3)
        for name, seed, config in names
    ])  # fmt: skip


def scored(runs: list[LoadedRun], accuracy: Optional[float], num_scored: int = 4) -> list[LoadedRun]:
    return [
        dataclasses.replace(run, evals=(run.evals[0], dataclasses.replace(run.evals[1], tasks={
            "quiz": TaskScores(num_questions=9, bits_per_byte=bits, accuracy=accuracy, normalized_accuracy=accuracy)
        }))) if index < num_scored else run
        for index, (run, bits) in enumerate(zip(runs, BITS.values(), strict=True))
    ]  # fmt: skip


def compared(runs: list[LoadedRun], accuracy: Optional[float] = 0.5, num_scored: int = 4) -> Comparison:
    return compare_runs(scored(runs, accuracy, num_scored), baseline="bf16")


def rows_of(markdown: str) -> list[list[str]]:
    """The lines of the task."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines() if "quiz" in line]


def test_gaps_are_those_of_pairs(runs: list[LoadedRun]) -> None:
    comparison = compared(runs)
    task = comparison.recipes[1].tasks["quiz"]
    assert task.gap.mean == pytest.approx((0.02 + 0.04) / 2) and task.bits_per_byte == pytest.approx(1.54)
    table = tables.task_table(comparison)
    assert table is not None
    rows = rows_of(table.to_markdown())
    assert rows[0] == ["quiz", "bf16", "1.5000", "baseline", "-", "50.00%", "50.00%"]
    assert rows[1][:4] == ["quiz", "fp8", "1.5400", "+3.00%"] and rows[1][4].startswith("-9.71% to")
    assert json.loads(tables.to_json(comparison))["recipes"][1]["tasks"]["quiz"]["accuracy"] == 0.5
    assert "Scores of questions" in render_page(comparison, runs, title="scores")


def test_continuations_have_no_accuracy(runs: list[LoadedRun]) -> None:
    table = tables.task_table(compared(runs, accuracy=None))
    assert table is not None and "| -" in table.to_markdown().splitlines()[-1]


@pytest.mark.parametrize("num_scored", [0, 3])
def test_a_task_that_not_all_pairs_have_is_left_out(runs: list[LoadedRun], num_scored: int) -> None:
    comparison = compared(runs, num_scored=num_scored)
    assert not comparison.recipes[1].tasks
    assert (tables.task_table(comparison) is None) == (num_scored == 0)


def test_a_study_has_the_means_over_its_seeds(runs: list[LoadedRun], tmp_path: Path) -> None:
    known = scored(runs, 0.25)
    points = StudyPoints(name="scores", points=points_of([(run, {"recipe": run.name.split("/")[0]}) for run in known]))
    (tmp_path / "points.json").write_text(points.to_json())
    report = analyse(load_points(tmp_path / "points.json"))
    assert [cell.tasks["quiz"].bits_per_byte for cell in report.cells] == pytest.approx([1.5, 1.54])
    row = rows_of(to_markdown(report, "laws.svg"))[1]
    assert row[:2] == ["quiz", "fp8"] and row[-4:] == ["1.5400", "25.00%", "25.00%", "2"]
    assert json.loads(report.to_json())["cells"][1]["tasks"]["quiz"]["num_questions"] == 9
    # A seed without them: no mean is over fewer seeds than the loss.
    assert analyse(StudyPoints(name="scores", points=points_of(
        [(run, {"recipe": "bf16"}) for run in (known[0], dataclasses.replace(known[1], evals=runs[1].evals))]
    ))).cells[0].tasks == {}  # fmt: skip
