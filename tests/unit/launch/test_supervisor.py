"""The supervisor on runs that do not train: when it restarts, when it stops, and that it leaves no process."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megafp8.launch.supervisor import RESTARTS_FILE

ROOT = Path(__file__).resolve().parents[3]
RUN = Path(__file__).with_name("fake_run.py")


def command(folder: Path, ends: str, *options: str) -> list[str]:
    supervise = [sys.executable, str(ROOT / "launcher/supervise.py"), "--run-folder", str(folder), "--backoff-s", "0"]
    return [*supervise, *options, "--", sys.executable, str(RUN), str(folder), ends]


def supervise(folder: Path, ends: str, *options: str) -> tuple[int, list[str], list[dict]]:
    """Exit status, messages, and the log of a supervised run."""
    result = subprocess.run(command(folder, ends, *options), capture_output=True, text=True, timeout=60)
    assert "Traceback" not in result.stderr, result.stderr
    lines = (folder / RESTARTS_FILE).read_text().splitlines()
    return result.returncode, result.stderr.splitlines(), [json.loads(line) for line in lines]


def test_a_dying_run_is_restarted_until_it_is_done(tmp_path: Path) -> None:
    status, told, log = supervise(tmp_path, "died:40:47 preempted:50:50 71:50:55 done:60:60")
    assert status == 0
    assert [start["state"] for start in log] == ["died", "preempted", "failed", "done"]
    assert [start["lost_steps"] for start in log] == [7, 0, 5, 0]
    assert [start["recovery_s"] is None for start in log] == [True, False, False, False]
    assert 0 < log[1]["recovery_s"] < 30
    assert "start 1 died at step 47, 7 steps lost" in told[0] and "restarting from step 40" in told[0]
    assert "ended without an error message" in told[0]
    assert told[-1].endswith("start 4 done at step 60; finished")


@pytest.mark.parametrize("hopeless", ["64", "65", "66", "73", "74"])
def test_permanent_failures_are_not_restarted(tmp_path: Path, hopeless: str) -> None:
    status, told, log = supervise(tmp_path, f"{hopeless}:0:0 done:60:60")
    assert (status, len(log)) == (int(hopeless), 1)
    assert "would not help" in told[-1]


def test_nonfinite_values_are_restarted_a_limited_number_of_times(tmp_path: Path) -> None:
    """A hardware fault does not occur again. After repeated failures it gives up."""
    status, _, log = supervise(tmp_path / "once", "65:40:47 done:60:60", "--retry-bad-numbers")
    assert (status, len(log)) == (0, 2)
    status, told, log = supervise(
        tmp_path / "always", "65:40:47 65:40:47 65:40:47 done:60:60", "--retry-bad-numbers", "--max-restarts", "1"
    )
    assert (status, len(log)) == (65, 2)
    assert "giving up after 1 restarts" in told[-1]


def test_restarts_without_progress_are_limited(tmp_path: Path) -> None:
    """Two for step 10, two for step 20; one more saved step is no progress here."""
    status, told, log = supervise(
        tmp_path, "70:10:12 70:10:12 70:20:22 70:20:22 70:21:22 done:60:60", "--max-restarts", "2",
        "--min-progress-steps", "5",
    )  # fmt: skip
    assert (status, len(log)) == (70, 5)
    assert "giving up after 2 restarts" in told[-1]


def test_with_no_progress_asked_for_every_restart_counts(tmp_path: Path) -> None:
    status, _, log = supervise(
        tmp_path, "70:10:12 70:20:22 70:30:32 done:60:60", "--max-restarts", "1", "--min-progress-steps", "0"
    )
    assert (status, len(log)) == (70, 2)


def test_a_command_that_never_starts_its_run(tmp_path: Path) -> None:
    """Also over the state of an earlier run, which must not be mistaken for its own."""
    supervise(tmp_path, "74:0:0")
    status, told, log = supervise(tmp_path, "74:0:0 nothing")
    assert (status, [start["state"] for start in log]) == (3, ["failed", "stillborn", "stillborn"])
    assert "the command exited with status 3 before its run began" in told[0]


def test_a_run_with_progress_may_be_requeued(tmp_path: Path) -> None:
    status, _, log = supervise(tmp_path, "70:40:47 nothing")
    assert (status, log[-1]["state"]) == (70, "stillborn")


def test_without_restarts_a_run_that_never_began_has_the_status_of_its_command(tmp_path: Path) -> None:
    """But if it has trained before, another start may help."""
    status, told, log = supervise(tmp_path / "new", "nothing", "--max-restarts", "0")
    assert (status, len(log)) == (3, 1) and "failed before training" in told[-1]
    supervise(tmp_path / "old", "70:40:47", "--max-restarts", "0")
    status, _, log = supervise(tmp_path / "old", "70:40:47 nothing", "--max-restarts", "0")
    assert (status, log[-1]["state"]) == (70, "stillborn")


def signalled(folder: Path, *signals: signal.Signals, **options: Any) -> tuple[int, str]:
    """Exit status and messages of a supervisor that receives signals while its run waits."""
    process = subprocess.Popen(command(folder, "wait:8:8 done:60:60"), stderr=subprocess.PIPE, text=True, **options)
    deadline = time.monotonic() + 30
    while not (folder / "waits").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for number in signals:
        process.send_signal(number)
    told = process.communicate(timeout=30)[1]
    return process.returncode, told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_no_restart_follows(tmp_path: Path, number: signal.Signals) -> None:
    status, told = signalled(tmp_path, number)
    assert status == 75
    assert f"preempted at step 8; received {number.name}" in told
    assert (tmp_path / "got").read_text() == f"{number.name} SIGTERM,SIGINT,SIGHUP,SIGUSR1,SIGQUIT"


def test_under_nohup_a_closed_terminal_does_not_stop_the_run(tmp_path: Path) -> None:
    """torchrun by itself does not respect nohup. It also ignores SIGHUP here."""
    ignore = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    status, told = signalled(tmp_path, signal.SIGHUP, signal.SIGTERM, preexec_fn=ignore)
    assert (status, "SIGHUP" in told) == (75, False)
    assert (tmp_path / "got").read_text() == "SIGTERM SIGTERM,SIGINT,SIGUSR1,SIGQUIT"


def test_a_request_for_memory_snapshots_ends_neither_the_supervisor_nor_torchrun(tmp_path: Path) -> None:
    """The ranks handle the signal, which `scancel -s USR2` sends to all processes of a job."""
    status, told = signalled(tmp_path, signal.SIGUSR2, signal.SIGTERM)
    assert (status, "SIGUSR2" in told) == (75, False)
    program = "import signal; print(signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN)"
    supervise = [sys.executable, str(ROOT / "launcher/supervise.py"), "--run-folder", str(tmp_path), "--max-restarts"]
    result = subprocess.run([*supervise, "0", "--", sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "True\n", result.stderr


def test_a_log_that_cannot_be_written_stops_no_restart(tmp_path: Path) -> None:
    (tmp_path / RESTARTS_FILE).symlink_to("/dev/full")
    result = subprocess.run(
        command(tmp_path, "died:40:47 70:50:50 done:60:60"), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    told = [line for line in result.stderr.splitlines() if RESTARTS_FILE in line]
    assert told == [
        f"supervise: {tmp_path / RESTARTS_FILE} cannot be written: the disk is full; training continues, restarts wait "
        "in memory",
        f"supervise: {tmp_path / RESTARTS_FILE}: 3 restarts were lost in all",
    ]


def test_a_command_that_cannot_start_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    supervise = [sys.executable, str(ROOT / "launcher/supervise.py"), "--run-folder", str(tmp_path / "file"), "--"]
    result = subprocess.run([*supervise, "torchrum", "train.py"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 64
    assert "Traceback" not in result.stderr
    assert "torchrum: no such command" in result.stderr
    assert f"the run's folder {tmp_path / 'file'}: {tmp_path / 'file'} is not a folder" in result.stderr


def test_a_command_that_the_system_does_not_start_counts_as_a_start(tmp_path: Path) -> None:
    """The system may be out of processes for a moment. This file is no program."""
    (tmp_path / "program").write_bytes(b"\0")
    (tmp_path / "program").chmod(0o755)
    supervise = [sys.executable, str(ROOT / "launcher/supervise.py"), "--run-folder", str(tmp_path), "--backoff-s", "0"]
    result = subprocess.run([*supervise, "--", tmp_path / "program"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 126
    assert result.stderr.count("could not be started (Exec format error)") == 2
    assert "Traceback" not in result.stderr


def test_a_signal_while_a_run_is_started_is_passed_on(tmp_path: Path) -> None:
    """Before the process exists. In a separate process, because a supervisor installs signal handlers."""
    program = (
        "import os, pathlib, signal, sys\n"
        "from megafp8.launch.supervisor import RestartPolicy, Supervisor\n"
        "class Hit(Supervisor):\n"
        "    def launch(self, environment):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        return super().launch(environment)\n"
        f"sys.exit(Hit(['sleep', '50'], pathlib.Path({str(tmp_path)!r}), RestartPolicy(), print).run())\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=20)
    assert result.returncode == 75


def test_leftover_processes_of_a_start_are_killed(tmp_path: Path) -> None:
    """The orphan has its own session, as torchrun's ranks have."""
    assert supervise(tmp_path, "orphan:0:0 done:60:60", "--grace-s", "1")[0] == 0
    assert not psutil.pid_exists(int((tmp_path / "orphan").read_text()))


def test_the_folder_is_found_in_the_command(tmp_path: Path) -> None:
    supervise = [sys.executable, str(ROOT / "launcher/supervise.py"), "--", "torchrun", "pretrain_gpt.py"]
    for flags, problem in (["--save", "x"], "--save x and no --load"), (["--sav", "x"], "--save"):
        result = subprocess.run([*supervise, *flags], capture_output=True, text=True, timeout=60)
        assert result.returncode == 64
        assert problem in result.stderr
