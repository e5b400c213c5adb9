"""A study's runs as local processes: what starts, how many run concurrently, on which GPUs, and how they end."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megafp8.errors import INTERNAL, PREEMPTED, ConfigError, RunFolderInUse
from megafp8.launch.process_pool import PooledRun, RunOutcome
from megafp8.launch.study import StudyRun, expand
from megafp8.launch.study_execution import (
    check_gpus,
    is_due,
    outcome_status,
    outcome_text,
    run_here,
    run_progress,
    train_command,
    visible_gpus,
)
from megafp8.resilience.run_state import RunState
from megafp8.utils.process import current_process

SCRIPT = Path(__file__).with_name("study_script.py")


@pytest.fixture
def study_of(write_study):
    """Runs with given ends, by learning rate."""

    def make(ends: dict[str, list[str]], more: str = "") -> list[StudyRun]:
        study = write_study(f"grid: {{lr: [{', '.join(ends)}], hidden_size: [32], train_iters: [60]{more}}}")
        study.folder.mkdir(exist_ok=True)
        (study.folder / "ends.json").write_text(json.dumps(ends))
        return expand(study)

    return make


def start(runs: list[StudyRun], parallel=None, gpus=()) -> tuple[int, list[str]]:
    told: list[str] = []
    due = [run for run in runs if is_due(run_progress(run))]
    return run_here(due, SCRIPT, parallel, gpus, told.append), told


def log(runs: list[StudyRun]) -> list[dict]:
    return [json.loads(line) for line in (runs[0].folder.parent / "log.jsonl").read_text().splitlines()]


def at_once(told: list[str]) -> int:
    """The maximum number of concurrent runs."""
    return max(itertools.accumulate(1 if line.startswith("starts") else -1 for line in told))


def test_done_runs_are_skipped_and_failed_ones_run_again(study_of) -> None:
    runs = study_of({"1": ["done:60:60"], "2": ["66:0:3", "done:60:60"], "3": ["nothing", "done:60:60"]})
    status, told = start(runs)
    assert status == 66
    assert [run_progress(run).state for run in runs] == ["done", "failed", "waiting"]
    assert any("failed" in line and "output.log" in line for line in told)
    assert start(runs)[0] == 0
    assert [run_progress(run).state for run in runs] == ["done"] * 3
    assert start(runs) == (0, [])
    assert [line["lr"] for line in log(runs)] == ["1", "2", "3", "2", "3"]


def test_a_failure_that_is_a_result_does_not_decide_the_status(study_of) -> None:
    runs = study_of({"1": ["65:9:9"], "2": ["66:0:3"], "3": ["done:60:60"]})
    assert run_here(runs, SCRIPT, None, (), lambda _: None, results=(65,)) == 66
    assert run_here(runs[:1], SCRIPT, None, (), lambda _: None, results=(65,)) == 0
    assert run_here(runs[:1], SCRIPT, None, (), lambda _: None) == 65


@pytest.mark.parametrize("parallel", [1, 2])
def test_the_number_of_concurrent_runs_is_limited(study_of, parallel: int) -> None:
    runs = study_of({str(lr): ["done:60:60"] for lr in (1, 2, 3, 4)})
    status, told = start(runs, parallel=parallel)
    assert status == 0 and len(log(runs)) == 4 and at_once(told) == parallel


def test_every_run_has_its_own_gpus(study_of) -> None:
    runs = study_of({str(lr): ["done:60:60"] for lr in (1, 2, 3, 4)})
    status, told = start(runs, gpus=("0", "5"))
    lines = log(runs)
    assert status == 0 and at_once(told) == 2 and {line["gpus"] for line in lines} == {"0", "5"}
    for first, second in itertools.combinations(lines, 2):
        concurrent = first["from"] < second["to"] and second["from"] < first["to"]
        assert not concurrent or first["gpus"] != second["gpus"]


def test_too_many_gpus_are_refused_before_anything_starts(study_of) -> None:
    runs = study_of({"1": ["done"]}, ", gpus: [1, 4]")
    with pytest.raises(ConfigError, match="gpus4: needs more GPUs .gpus. than the 2"):
        check_gpus(runs, ("0", "1"))


def test_after_a_signal_runs_save_and_none_starts(study_of) -> None:
    runs = study_of({"1": ["wait:7:7", "done:60:60"], "2": ["done:60:60"]})
    folder = runs[0].folder

    def stop() -> None:
        deadline = time.monotonic() + 30
        while not (folder / "waits").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    status, _ = start(runs)
    thread.join()
    assert status == PREEMPTED
    assert [run_progress(run).state for run in runs] == ["preempted", "waiting"]
    assert start(runs)[0] == 0


def test_a_failed_start_does_not_report_the_previous_state(study_of) -> None:
    runs = study_of({"1": ["66:0:3", "nothing"]})
    assert start(runs)[0] == 66
    status, told = start(runs)
    assert status == 3 and told[-1].startswith("failed") and "status 3 before the run started" in told[-1]


def test_a_run_stopped_by_its_flags_has_not_failed(study_of) -> None:
    status, told = start(study_of({"1": ["stopped:20:20"]}))
    assert status == 0 and told[-1].startswith("stopped")


@pytest.mark.parametrize(
    ("state", "returned", "status", "words"),
    [
        ("running", 1, 0, "running    a, started by another process"),
        (None, RunFolderInUse.exit_status, 0, "running    a, started by another process"),
        ("died", 1, 1, "died       a: died at step 0"),
        (None, 1, 1, "failed     a: its command ended with status 1"),
        (None, -signal.SIGTERM, INTERNAL, "preempted  a: its command ended with signal 15"),
    ],
    ids=["torchrun's 1 and a run that goes on", "folder in use", "died", "never began", "stopped before it began"],
)
def test_a_run_started_by_another_process_has_not_failed(
    state: str | None, returned: int, status: int, words: str, tmp_path: Path
) -> None:
    left = None if state is None else RunState(
        state=state, world_size=2, process=current_process(), started_at=0.0, updated_at=0.0
    )  # fmt: skip
    run = PooledRun(name="a", command=(), folder=tmp_path)
    outcome = RunOutcome(run=run, state=left, returned=returned, seconds=1.0, tail="")
    assert outcome_status(outcome) == status
    assert outcome_text(outcome).startswith(words)


def test_ranks_are_started_by_torchrun(study_of) -> None:
    single, wide = study_of({"1": ["done"]}, ", gpus: [1, 2]")
    assert train_command(single, SCRIPT)[:2] == [sys.executable, str(SCRIPT)]
    words = train_command(wide, SCRIPT)
    assert words[1:3] == ["-m", "torch.distributed.run"] and words[words.index("--nproc-per-node") + 1] == "2"


def test_visible_gpus(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-aa")
    assert visible_gpus() == ("3", "GPU-aa")
    for hidden, shown in (("-1", ()), ("2,-1,3", ("2",))):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert visible_gpus() == shown
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    shim = tmp_path / "nvidia-smi"
    shim.write_text("#!/bin/sh\nprintf 'GPU 0: NVIDIA H200 (UUID: a)\\n  MIG 1g\\nGPU 1: NVIDIA H200 (UUID: b)\\n'\n")
    shim.chmod(0o755)
    assert subprocess.run([shim], capture_output=True).returncode == 0
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert visible_gpus() == ("0", "1")
