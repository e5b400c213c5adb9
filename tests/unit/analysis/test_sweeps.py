"""Hyperparameters at one size: the ranking, its text and its figure."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from megafp8.analysis import sweeps
from megafp8.analysis.scaling_page import publish_study
from megafp8.analysis.scaling_report import ScalingReport, analyse, headline, to_text
from megafp8.analysis.study_points import load_points
from megafp8.cli import report as report_command

LOSSES = {("1e-3", "10"): (3.2, 3.4), ("3e-3", "10"): (3.0, 3.1), ("3e-3", "100"): (2.9, 3.1), ("1e-2", "10"): (9.0,)}


def write_study(write_run: Callable[..., Path], folder: Path, validated: bool = True, **changes: object) -> Path:
    """A study of learning rates and warm-ups with two seeds, of which one run is not there."""
    runs = []
    for (lr, warmup), losses in LOSSES.items():
        for seed, loss in enumerate(losses, start=1):
            name = f"lr{lr}-{warmup}-seed{seed}"
            path = write_run(
                name, [loss] * 20, validations={20: loss} if validated else {}, num_parameters=1000,
                flops_per_token=6000.0,
                config={"training": {"seed": seed}, "optimizer": {"lr": float(lr), "lr_warmup_iters": int(warmup)}},
            )  # fmt: skip
            state = {"state": "done", "world_size": 1, "started_at": 0, "updated_at": 0,
                     "process": {"host": "h", "place": "p", "pid": 1, "started": 1}}  # fmt: skip
            (path / "run_state.json").write_text(json.dumps(state))
            choice = {"lr": f"lr{lr}", "warmup": f"warmup{warmup}", "seed": f"seed{seed}"} | changes
            runs.append({"label": name, "folder": name, "choice": choice})
    runs.append({"label": "lost", "folder": "lost", "choice": {}})
    (folder / "study.json").write_text(json.dumps({"name": "rates", "runs": runs}))
    return folder


@pytest.fixture
def report(write_run: Callable[..., Path], tmp_path: Path) -> ScalingReport:
    return analyse(load_points(write_study(write_run, tmp_path)))


def test_the_report_opens_with_the_best_settings(report: ScalingReport) -> None:
    text = headline(report)
    assert text.startswith(
        "The best of 4 settings is lr 3e-3, warmup 100: validation loss 3.0000, 0.0500 below lr 3e-3"
    )
    assert "no more than the spread of seeds" in text and text.endswith("1 of 8 runs is not done.")
    assert "baseline" not in text
    assert not any("law" in note for note in report.notes)
    assert "Ranking" in to_text(report)


def test_settings_are_ranked_and_the_best_is_marked(report: ScalingReport) -> None:
    rows = sweeps.ranking_table(report.cells, report.loss_name).rows
    assert [row[:4] for row in rows] == [
        ("1", "best", "3e-3", "100"), ("2", "", "3e-3", "10"), ("3", "", "1e-3", "10"), ("4", "", "1e-2", "10"),
    ]  # fmt: skip


def test_one_lucky_seed_is_not_the_best(write_run: Callable[..., Path], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(LOSSES, ("1e-2", "10"), (2.0,))
    found = analyse(load_points(write_study(write_run, tmp_path)))
    assert headline(found).startswith("The best of 4 settings is lr 3e-3, warmup 100")


def test_a_diverged_setting_is_the_last(write_run: Callable[..., Path], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(LOSSES, ("1e-3", "10"), (math.nan, math.nan))
    found = analyse(load_points(write_study(write_run, tmp_path)))
    assert sweeps.ranked(found.cells)[-1].options["lr"] == "lr1e-3"
    sweeps.plot_coordinates(found.cells, found.loss_name)


def test_runs_without_a_validation_are_ranked_by_the_loss_of_training(write_run, tmp_path: Path) -> None:
    found = analyse(load_points(write_study(write_run, tmp_path, validated=False)))
    assert "warmup 100: training loss 3.0000" in headline(found)


def test_a_study_without_a_hyperparameter_keeps_its_report(report: ScalingReport, write_run, tmp_path: Path) -> None:
    study = load_points(write_study(write_run, tmp_path, lr="a", warmup="b"))
    assert headline(analyse(study)).startswith("There is no baseline")


def test_files_of_a_sweep(write_run: Callable[..., Path], tmp_path: Path) -> None:
    output = tmp_path / "report"
    publish_study(write_study(write_run, tmp_path), output)
    assert {path.name for path in output.iterdir()} == {
        "report.html", "report.md", "report.json", "points.json", "sweep.svg", "ranking.csv"
    }  # fmt: skip
    rows = list(csv.DictReader((output / "ranking.csv").open()))
    assert (rows[0]["lr"], rows[0]["is_best"], rows[1]["is_best"]) == ("3e-3", "True", "False")
    assert json.loads((output / "report.json").read_text())["ranking"][0]["warmup"] == "100"
    assert "sweep.svg" in (output / "report.md").read_text()
    assert "no law" not in (output / "report.html").read_text()
    again, _ = publish_study(output / "points.json", None)
    assert headline(again).startswith("The best of 4 settings")


def test_a_folder_of_runs_is_ranked_by_the_settings_that_differ(write_run, tmp_path: Path, capsys) -> None:
    (write_study(write_run, tmp_path) / "study.json").unlink()
    assert report_command.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "The best of 4 settings is --lr 0.003, --lr-warmup-iters 100: validation loss 3.0000" in text


def test_values_are_in_their_order() -> None:
    assert sweeps.positions(["10", "9", "x", "9"]) == [0.5, 0.0, 1.0, 0.0]
    assert sweeps.positions(["a"]) == [0.0]


def test_the_figure_has_a_line_for_each_setting(report: ScalingReport) -> None:
    axes = sweeps.plot_coordinates(report.cells, report.loss_name).axes[0]
    lines = [line for line in axes.get_lines() if len(line.get_xdata()) == 3]
    assert len(lines) == 4
    best = max(lines, key=lambda line: line.get_linewidth())
    assert list(best.get_ydata()) == [0.5, 1.0, 0.0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["lr", "warmup", "validation loss"]
