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
from megafp8.metrics.records import TaskScores

BITS = {("bf16", 1): 2.0, ("bf16", 2): 1.0, ("fp8", 1): 2.04, ("fp8", 2): 1.04}


@pytest.fixture
def runs(write_run: Callable[..., Path]) -> list[LoadedRun]:
    names = [(name, seed, {"training": {"seed": seed}}) for name, seed in BITS]
    return load_runs([
        write_run(f"{name}/seed{seed}", [4.0] * 8, validations={4: 3.0, 8: 2.0}, recipe=name, config=config)
        for name, seed, config in names
    ])  # fmt: skip


def compared(runs: list[LoadedRun], accuracy: Optional[float] = 0.5, num_scored: int = 4) -> Comparison:
    scored = [
        dataclasses.replace(run, evals=(run.evals[0], dataclasses.replace(run.evals[1], tasks={
            "quiz": TaskScores(num_questions=9, bits_per_byte=bits, accuracy=accuracy, normalized_accuracy=accuracy)
        }))) if index < num_scored else run
        for index, (run, bits) in enumerate(zip(runs, BITS.values(), strict=True))
    ]  # fmt: skip
    return compare_runs(scored, baseline="bf16")


def test_gaps_are_those_of_pairs(runs: list[LoadedRun]) -> None:
    comparison = compared(runs)
    task = comparison.recipes[1].tasks["quiz"]
    assert task.gap.mean == pytest.approx((0.02 + 0.04) / 2) and task.bits_per_byte == pytest.approx(1.54)
    table = tables.task_table(comparison)
    assert table is not None
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.to_markdown().splitlines() if "quiz" in line
    ]
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
