"""Many concurrent runs without training: their ends are distinguished, and a signal reaches the running ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megafp8.launch.process_pool import OUTPUT_FILE, PooledRun, ProcessPool, RunOutcome
from megafp8.resilience.run_state import finished_state

RUN = Path(__file__).with_name("fake_run.py")


def fake(folder: Path, ends: str) -> PooledRun:
    return PooledRun(name=folder.name, command=(sys.executable, str(RUN), str(folder), ends), folder=folder)


def batch(parallel: int, told: list[str], gpus: Sequence[str] = ()) -> ProcessPool:
    return ProcessPool(
        parallel, gpus, on_start=lambda run, gpus: told.append(f"start {run.name}"),
        on_end=lambda outcome: told.append(f"end {outcome.run.name}"),
    )  # fmt: skip


def run(parallel: int, runs: list[PooledRun], gpus: Sequence[str] = ()) -> dict[str, RunOutcome]:
    return {outcome.run.name: outcome for outcome in batch(parallel, [], gpus).run(runs)}


def test_one_failed_run_does_not_stop_others(tmp_path: Path) -> None:
    ends = {"a": "done:60:60", "b": "65:0:7", "c": "nothing", "d": "done:60:60"}
    outcomes = run(2, [fake(tmp_path / name, end) for name, end in ends.items()])
    assert sorted(name for name, outcome in outcomes.items() if outcome.is_done) == ["a", "d"]
    assert "failed at step 0" in outcomes["b"].reason
    assert outcomes["c"].reason == "its command ended with status 3 before the run started"
    assert finished_state(tmp_path / "d") is not None and finished_state(tmp_path / "c") is None


def test_the_end_of_a_failed_runs_output_is_reported_and_all_is_kept(tmp_path: Path) -> None:
    words = "for line in range(40): print('line', line)\nraise SystemExit(2)"
    talker = PooledRun(name="t", command=(sys.executable, "-c", words), folder=tmp_path / "t")
    for _ in range(2):
        tail = run(1, [talker])["t"].tail.splitlines()
        assert tail[0] == "line 25" and tail[-1] == "line 39"
    assert len((tmp_path / "t" / OUTPUT_FILE).read_text().splitlines()) == 80


def test_an_old_state_is_not_used_for_a_new_start(tmp_path: Path) -> None:
    run(1, [fake(tmp_path / "a", "done:60:60")])
    assert finished_state(tmp_path / "a") is not None
    again = PooledRun(name="a", command=(sys.executable, "-c", "raise SystemExit(64)"), folder=tmp_path / "a")
    assert "status 64 before the run started" in run(1, [again])["a"].reason


def test_each_run_has_its_own_gpus(tmp_path: Path) -> None:
    words = "import os, time; time.sleep(0.6); print(os.environ['CUDA_VISIBLE_DEVICES'])"
    runs = [
        PooledRun(name=name, command=(sys.executable, "-c", words), folder=tmp_path / name, gpus=2) for name in "abcd"
    ]
    outcomes = run(3, runs, gpus=("0", "1", "5", "7", "8"))
    seen = [outcomes[name].tail for name in "abcd"]
    assert seen[:2] == ["0,1", "5,7"]
    assert all(len({*line.split(",")} & {"0", "1", "5", "7", "8"}) == 2 for line in seen)


def test_after_a_signal_runs_save_and_none_starts(tmp_path: Path) -> None:
    told: list[str] = []
    waits = [fake(tmp_path / name, "wait:5:5") for name in ("a", "b", "c")]

    def interrupt() -> None:
        deadline = time.monotonic() + 30
        while not all((tmp_path / name / "waits").exists() for name in ("a", "b")) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    both = batch(2, told)
    outcomes = both.run(waits)
    thread.join()
    assert both.is_stopping
    assert sorted(outcome.run.name for outcome in outcomes) == ["a", "b"]
    assert all(outcome.reason.startswith("preempted at step 5") and outcome.is_stopped for outcome in outcomes)
    assert "start c" not in told
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_signal_before_a_run_started_is_not_a_failure(tmp_path: Path) -> None:
    ends = {"ended": "os.kill(os.getpid(), signal.SIGTERM)", "crashed": "os.kill(os.getpid(), signal.SIGKILL)"}
    runs = [
        PooledRun(name=name, command=(sys.executable, "-c", f"import os, signal; {words}"), folder=tmp_path / name)
        for name, words in ends.items()
    ]
    outcomes = run(2, runs)
    assert outcomes["ended"].is_stopped and not outcomes["crashed"].is_stopped
    assert outcomes["crashed"].reason == "its command ended with signal 9 before the run started"


@pytest.mark.parametrize(("when", "number"), [("before", signal.SIGHUP), ("after", signal.SIGTERM)])
def test_a_signal_between_two_starts_reaches_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, number: signal.Signals
) -> None:
    """It arrives while the second process is created, before it is in any list."""
    runs, made = [fake(tmp_path / name, "wait:5:5") for name in "abc"], []

    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments: Any, **options: Any):
            made.append(self)
            if len(made) == 2 and when == "before":
                os.kill(os.getpid(), number)
            super().__init__(*arguments, **options)
            while not (tmp_path / "ab"[len(made) - 1] / "waits").exists():
                assert self.poll() is None
                time.sleep(0.02)
            if len(made) == 2 and when == "after":
                os.kill(os.getpid(), number)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    outcomes = run(2, runs)
    assert [outcomes[name].reason for name in sorted(outcomes)] == ["preempted at step 5, status 75"] * 2
    assert len(made) == 2
