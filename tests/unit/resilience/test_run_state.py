"""Reading the state of a run, also of one that cannot update it any more."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import hostile_files
import pytest

from megafp8.launch.node_check import read_report
from megafp8.metrics import records
from megafp8.resilience.run_lock import read_holder
from megafp8.resilience.run_state import (
    RECORDS_FILE,
    RUN_STATE_FILE,
    SILENT_S,
    RunState,
    current_state,
    last_recorded_step,
    read_run_state,
)
from megafp8.utils.process import Process, current_process, pid_namespace, read_proc_stat


def write(folder: Path, process: Process, state: str = "running", age_s: float = 0.0) -> RunState:
    content = RunState(
        state=state, world_size=2, process=process, started_at=1.0, updated_at=time.time() - age_s, step=7
    )
    (folder / RUN_STATE_FILE).write_text(json.dumps(content.to_plain()))
    return content


@pytest.fixture
def child() -> subprocess.Popen:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def process_of(pid: int) -> Process:
    return dataclasses.replace(current_process(), pid=pid, started=read_proc_stat(pid)[1])


def test_run_state_reads_back(tmp_path: Path) -> None:
    assert read_run_state(tmp_path) is None and current_state(tmp_path) is None
    written = write(tmp_path, current_process())
    assert read_run_state(tmp_path) == written == current_state(tmp_path)


def test_unknown_fields_of_newer_versions_are_ignored(tmp_path: Path) -> None:
    written = write(tmp_path, current_process())
    (tmp_path / RUN_STATE_FILE).write_text(json.dumps(written.to_plain() | {"weather": "fine"}))
    assert read_run_state(tmp_path) == written


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"state": "done"}', "null"])
def test_an_unreadable_state_file_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / RUN_STATE_FILE).write_text(text)
    assert read_run_state(tmp_path) is None


def test_a_killed_run_has_died(tmp_path: Path, child: subprocess.Popen) -> None:
    write(tmp_path, process_of(child.pid), age_s=2 * SILENT_S)
    assert current_state(tmp_path).state == "running", "however long it is silent, it is there"
    child.send_signal(signal.SIGSTOP)
    assert current_state(tmp_path).state == "running", "also when it is stopped"
    child.kill()
    for _ in range(200):  # no process has asked for its status yet: it stays a zombie
        if read_proc_stat(child.pid)[0] == "Z":
            break
        time.sleep(0.01)
    assert current_state(tmp_path).state == "died"
    assert f"process {child.pid} on " in current_state(tmp_path).reason


def test_a_reused_pid_is_another_process(tmp_path: Path, child: subprocess.Popen) -> None:
    write(tmp_path, dataclasses.replace(process_of(child.pid), started=1))
    assert current_state(tmp_path).state == "died"


@pytest.mark.parametrize(("age_s", "state"), [(SILENT_S / 2, "running"), (SILENT_S * 2, "died")])
def test_on_another_machine_only_a_stale_heartbeat_means_death(tmp_path: Path, age_s: float, state: str) -> None:
    elsewhere = dataclasses.replace(current_process(), host="other", place="another boot")
    assert elsewhere.is_alive() is None
    write(tmp_path, elsewhere, age_s=age_s)
    assert current_state(tmp_path).state == state


@pytest.mark.parametrize("state", ["done", "preempted", "failed", "stopped"])
def test_a_final_state_is_kept(tmp_path: Path, state: str) -> None:
    write(tmp_path, Process("other", "elsewhere", 1, 1), state, age_s=1e6)
    assert current_state(tmp_path).state == state


def test_a_host_is_identified_by_boot_and_namespace() -> None:
    boot, namespace = pid_namespace().split()
    assert len(boot) == 36 and namespace.startswith("pid:[")
    assert current_process().is_alive() and current_process().pid == os.getpid()


def test_the_last_recorded_step(tmp_path: Path) -> None:
    assert RECORDS_FILE == records.RECORDS_FILE
    assert last_recorded_step(tmp_path) == 0
    lines = [f'{{"kind": "step", "step": {step}}}\n' for step in range(1, 5000)]
    (tmp_path / RECORDS_FILE).write_text("".join(lines) + '{"kind": "event", "step": 9999}\n{"kind": "step", "st')
    assert last_recorded_step(tmp_path) == 4999


@pytest.mark.parametrize("hostile", ["fifo", "directory", "too large", *hostile_files.JSON])
def test_a_hostile_file_counts_as_missing(hostile: str, tmp_path: Path) -> None:
    for name in (RUN_STATE_FILE, RECORDS_FILE, "run.lock", "n0.json"):
        if hostile in hostile_files.KINDS:
            hostile_files.KINDS[hostile](tmp_path / name)
        else:
            (tmp_path / name).write_bytes(hostile_files.JSON[hostile])
    assert read_run_state(tmp_path) is None and current_state(tmp_path) is None
    assert last_recorded_step(tmp_path) == 0
    assert read_holder(tmp_path / "run.lock") is None
    assert read_report(tmp_path, "n0") is None
