"""Only failed checkpoints may end a run. Full or missing log disks and closed terminals lose log lines only."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faulty_run import COMMON, STEPS
from forked_runs import ForkedRun, members

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.directory import complete_steps
from megafp8.resilience.run_state import RUN_STATE_FILE, current_state
from megafp8.utils.process import STOPPED_STATE, read_proc_stat

HOST = "127.0.0.1"


@pytest.fixture
def log_folder() -> Iterator[Path]:
    """Folder for the run's output. A socket's path in it must be short."""
    with tempfile.TemporaryDirectory(prefix="run_") as name:
        yield Path(name)


@contextmanager
def started(flags: str, plan: str, log_folder: Path) -> Iterator[ForkedRun]:
    """A run of one rank, which does not outlive the block."""
    run = ForkedRun(1, f"{COMMON} --num-threads 1 {flags}", plan, None, log_folder)
    try:
        yield run
    finally:
        run.kill()


@contextmanager
def stopped(run: ForkedRun) -> Iterator[None]:
    """Wait until the rank has stopped itself. It continues after the block."""
    (process,) = run.processes
    while (read_proc_stat(process.pid or 0) or "?")[0] != STOPPED_STATE:
        assert process.is_alive(), run.output(0)
        time.sleep(0.02)
    yield
    for pid in members(process.pid):
        os.kill(pid, signal.SIGCONT)


def test_a_full_disk_and_a_removed_folder_do_not_stop_a_run(tmp_path: Path, cache: Path, log_folder: Path) -> None:
    """Records never fit, TensorBoard's folder is removed, and some steps cannot write the state."""
    folder, boards = tmp_path / "run", tmp_path / "boards"
    state_file = folder / RUN_STATE_FILE
    folder.mkdir()
    (folder / "records.jsonl").symlink_to("/dev/full")
    flags = f"--data-cache-path {cache} --save {folder} --tensorboard-dir {boards}"
    with started(flags, "stop:step=5,at=step.begin;stop:step=9,at=step.begin", log_folder) as run:
        with stopped(run):
            shutil.rmtree(boards)
            state_file.unlink()
            state_file.mkdir()  # a disk that refuses only this file
        with stopped(run):
            state_file.rmdir()
        ended = run.wait(600)
    assert ended.statuses == (0,), ended.report()
    assert complete_steps(folder)[-1] == STEPS
    assert any(boards.iterdir())
    state = current_state(folder)
    assert state is not None and (state.state, state.step, state.saved_step) == ("done", STEPS, STEPS)
    output = ended.output[0]
    assert "Traceback" not in output
    assert output.count("records.jsonl cannot be written: the disk is full; training continues") == 1
    (lost,) = [line for line in output.splitlines() if "records were lost in all" in line]
    assert int(lost.split("records.jsonl: ")[1].split()[0]) > STEPS, "the run, its steps, evaluations and events"
    assert output.count("the folder is gone, and what was in it; it is created again") == 1
    assert output.count(f"{RUN_STATE_FILE} cannot be written: a folder has its name") == 1
    assert output.count(f"{RUN_STATE_FILE} can be written again") == 1


def test_trackers_that_die_do_not_stop_a_run(tmp_path: Path, cache: Path, log_folder: Path) -> None:
    """MLflow's server does not answer, the process that sends to it is killed, and a reader of the port is gone."""
    pytest.importorskip("mlflow"), pytest.importorskip("prometheus_client")
    folder, port = tmp_path / "run", free_port()
    flags = f"--data-cache-path {cache} --save {folder} --metrics-port {port} --mlflow-experiment faults "
    with started(f"{flags} --mlflow-tracking-uri http://{HOST}:9", "stop:step=9,at=step.begin", log_folder) as run:
        with stopped(run):
            socket.create_connection((HOST, port)).close()
            (sender,) = [pid for pid in members(run.processes[0].pid) if b"mlflow_sender" in command_of(pid)]
            os.kill(sender, signal.SIGKILL)
        ended = run.wait(600)
    assert ended.statuses == (0,), ended.report()
    assert complete_steps(folder)[-1] == STEPS and len(load_run(folder).steps) == STEPS
    assert ended.output[0].count("the process that sends records ended with status -9") == 1


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_standard_output_on_a_full_disk_does_not_stop_a_run(tmp_path: Path, cache: Path, log_folder: Path) -> None:
    (log_folder / "output0").symlink_to("/dev/full")
    folder = tmp_path / "run"
    flags = f"--data-cache-path {cache} --save {folder} --log-interval 1 --exit-interval 2"
    with started(flags, "", log_folder) as run:
        run.processes[0].join()
        (log_folder / "output0").unlink()  # reading it would never end
        assert run.wait(600).statuses == (0,)
    assert [record.step for record in load_run(folder).steps] == [1, 2]


def test_a_hang_with_stderr_on_a_full_disk_has_its_exit_status(tmp_path: Path, cache: Path, log_folder: Path) -> None:
    """A rank that hangs exits with the status of a hang, also when it cannot write a message."""
    (log_folder / "output0").symlink_to("/dev/full")
    folder = tmp_path / "run"
    flags = f"--data-cache-path {cache} --save {folder} --step-timeout-s 2"
    with started(flags, "sleep:seconds=600,step=1,at=step.begin", log_folder) as run:
        run.processes[0].join()
        (log_folder / "output0").unlink()
        assert run.wait(600).statuses == (71,)
    state = current_state(folder)
    assert state is not None and (state.state, state.exit_status) == ("failed", 71)


# Shows nothing: a terminal with a reader.
TERMINAL = """
import os, pty
ours, theirs = pty.openpty()
print(os.ttyname(theirs), flush=True)
while os.read(ours, 4096): pass
"""


def test_a_closed_terminal_saves_and_stops(tmp_path: Path, cache: Path, log_folder: Path) -> None:
    """SIGHUP arrives, and from then on every write to the terminal fails."""
    with subprocess.Popen([sys.executable, "-c", TERMINAL], stdout=subprocess.PIPE, text=True) as terminal:
        assert terminal.stdout is not None
        (log_folder / "output0").symlink_to(terminal.stdout.readline().strip())
        folder = tmp_path / "run"
        flags = f"--data-cache-path {cache} --save {folder} --log-interval 1"
        with started(flags, "stop:step=3,at=step.begin", log_folder) as run:
            with stopped(run):
                terminal.kill()
                terminal.wait()
                os.kill(run.processes[0].pid or 0, signal.SIGHUP)
            assert run.wait(600).statuses == (75,)
    state = current_state(folder)
    assert state is not None and (state.state, state.reason) == ("preempted", "SIGHUP to rank 0")
    assert state.step == state.saved_step == complete_steps(folder)[-1] == 3


def test_under_nohup_a_closed_terminal_does_not_stop_the_run(tmp_path: Path, cache: Path, log_folder: Path) -> None:
    folder = tmp_path / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        flags = f"--data-cache-path {cache} --save {folder} --exit-interval 2"
        with started(flags, "hup:step=1,at=step.begin", log_folder) as run:
            ended = run.wait(600)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended.statuses == (0,), ended.report()
    state = current_state(folder)
    assert state is not None and (state.state, state.step) == ("stopped", 2)
