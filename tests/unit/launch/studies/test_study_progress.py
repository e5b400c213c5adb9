"""The progress of a study's runs, and the remaining time."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from megafp8.device.gpus import GPUS
from megafp8.launch.study import StudyRun, expand
from megafp8.launch.study_execution import is_due, predicted_seconds, run_progress, status_text, write_study_file
from megafp8.resilience.run_state import RUN_STATE_FILE, RunState
from megafp8.utils.process import Process, current_process

GONE = dataclasses.replace(current_process(), pid=2**22 + 1)


def write_state(run: StudyRun, state: str, process: Process = GONE, seconds: float = 10.0, **fields) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    content = RunState(
        state=state, world_size=1, process=process, started_at=now - seconds, updated_at=now,
        **{"step": 3, "last_step": 10} | fields,
    )  # fmt: skip
    (run.folder / RUN_STATE_FILE).write_text(json.dumps(content.to_plain()))


@pytest.fixture
def study(write_study):
    recipes = "{bf16: '', fp8: --fp8-format hybrid --fp8-recipe tensorwise}"
    return write_study(f"grid: {{lr: [1], recipe: {recipes}, hidden_size: [32, 64, 96], train_iters: [10]}}")


@pytest.mark.parametrize(
    ("state", "due"),
    [("done", False), ("failed", True), ("preempted", True), ("stopped", True), ("running", True)],
)
def test_unfinished_runs_are_restarted(study, state: str, due: bool) -> None:
    run = expand(study)[0]
    write_state(run, state)  # its process is gone: `running` is `died`
    assert is_due(run_progress(run)) is due


def test_a_running_run_is_not_restarted(study) -> None:
    first, second = expand(study)[:2]
    write_state(first, "running", current_process())
    assert not is_due(run_progress(first)) and is_due(run_progress(second))


def test_a_line_for_each_run(study) -> None:
    runs = expand(study)
    write_state(runs[0], "done", step=10)
    write_state(runs[1], "failed", reason="DataError: a shard\nis short", exit_status=66)
    *lines, counts = status_text([run_progress(run) for run in runs]).splitlines()
    assert len(lines) == len(runs)
    assert lines[0].split() == ["done", runs[0].label, runs[0].id, "step", "10", "of", "10"]
    assert lines[1].startswith("failed") and lines[1].endswith("step 3 of 10  DataError: a shard")
    assert lines[2].startswith("waiting")
    assert counts == "1 done, 1 failed, 4 waiting"


def test_times_are_those_of_the_nearest_finished_run_of_the_recipe(study) -> None:
    runs = expand(study)
    write_state(runs[0], "done", step=10, seconds=100.0)
    write_state(runs[1], "done", step=10, seconds=150.0)
    write_state(runs[2], "done", step=10, seconds=9999.0, starts=2)  # another start's time does not count
    every = [run_progress(run) for run in runs]
    assert predicted_seconds(runs[0], every, None) == pytest.approx(100.0, rel=1e-3)
    assert predicted_seconds(runs[2], every, None) == pytest.approx(150 * runs[2].flops / runs[1].flops, rel=1e-3)
    assert predicted_seconds(runs[3], every, None) is None  # FP8: none is finished


def test_times_on_a_gpu_come_from_the_planner(study) -> None:
    run = expand(study)[0]
    slow, fast = (predicted_seconds(run, [], GPUS[name]) for name in ("h100", "b200"))
    assert 0 < fast <= slow


def test_a_report_finds_runs_by_the_study_file(study) -> None:
    runs = expand(study)
    content = json.loads(write_study_file(study, runs).read_text())
    assert [run["folder"] for run in content["runs"]] == [f"{run.label}-{run.id}" for run in runs]
    assert content["runs"][-1]["choice"] == {
        "lr": "lr1", "recipe": "fp8", "hidden_size": "hidden_size96", "train_iters": "train_iters10",
    }  # fmt: skip
