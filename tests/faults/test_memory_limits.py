"""Runs whose limits leave too little memory end with status 70 and a line that names the limit, or they train."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from forked_runs import HUNG, be_command, prepare

from megafp8.checkpoint import writer
from megafp8.errors import PREEMPTED, OutOfMemory
from megafp8.resilience.watchdog import Watchdog
from megafp8.utils import memory

FLAGS = """--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1
    --global-batch-size 2 --lr 1e-3 --bf16 --eval-iters 0 --train-iters 2 --num-workers 1 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 60 --position-embedding-type rope"""
# Names in /proc/self/status, by the flag of ulimit.
USED = {"-v": "VmSize:", "-d": "VmData:"}
fork = multiprocessing.get_context("fork").Process


def limit_memory(flag: str, megabytes: int) -> None:
    """Limit this process to so much more than it has."""
    fields = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    used = next(int(field[1]) << 10 for field in fields if field[0] == USED[flag])
    limit = used + (megabytes << 20)
    resource.setrlimit(memory.LIMITS[flag], (limit, limit))


def run_limited(flag: str, megabytes: int, folder: Path) -> tuple[int, str]:
    """The exit status of a run with so much memory beside the libraries, and its output."""
    prepare()

    def command() -> None:
        limit_memory(flag, megabytes)
        train(folder)

    return end_of(fork(target=command)), (folder / "output0").read_text()


def train(folder: Path, *words: str) -> None:
    """Be the command, also in how it ends."""
    sys.argv[1:] = [*FLAGS.split(), "--save", str(folder / "run"), *words]
    be_command(0, 1, folder, None, {"MASTER_ADDR": "localhost"})


def end_of(process: Any) -> int:
    """Start a process, and return its exit status; `HUNG` if it was killed after 20 s."""
    process.start()
    process.join(20)
    is_late = process.is_alive()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return HUNG if is_late else process.exitcode


@pytest.mark.parametrize("flag", USED)
@pytest.mark.parametrize("megabytes", [30, 300, 700])
def test_a_run_without_memory_for_its_threads_is_refused(flag: str, megabytes: int, tmp_path: Path) -> None:
    status, output = run_limited(flag, megabytes, tmp_path)
    assert status == 70, output
    assert output.splitlines()[-1].startswith(f"OutOfMemory: ulimit {flag} ")
    assert "Traceback" not in output


@pytest.mark.parametrize("megabytes", [800, 900, 1200])
def test_a_run_with_little_memory_trains_or_names_the_limit(megabytes: int, tmp_path: Path) -> None:
    status, output = run_limited("-v", megabytes, tmp_path)
    assert status in (0, 70), (status, output)
    if status == 70:  # with larger libraries
        assert "\nOutOfMemory: " in output and "  - a higher limit of the process than ulimit -v" in output


@pytest.mark.parametrize("mode", ["", "--async-save"])
def test_a_save_without_memory_for_its_threads_is_no_damaged_checkpoint(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare()

    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(writer, "in_thread", fail)
    status = end_of(fork(target=train, args=(tmp_path, *mode.split())))
    output = (tmp_path / "output0").read_text()
    assert status == 70, output
    assert "\nOutOfMemory: step 2 cannot be saved" in output and "\nThese need less memory:" in output


def fail_to_start(*_: Any, **__: Any) -> None:
    raise RuntimeError("unable to start watchdog thread")


def test_a_signal_ends_a_run_that_hangs_without_memory_for_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulthandler, "dump_traceback_later", fail_to_start)

    def hang() -> None:
        os.setpgid(0, 0)
        watchdog = Watchdog(grace_s=0.5)
        watchdog.enter("load")
        watchdog.start()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)

    assert end_of(fork(target=hang)) == PREEMPTED


def test_an_error_of_the_watchdog_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    def hang() -> None:
        os.setpgid(0, 0)
        monkeypatch.setattr(Watchdog, "check_peers", fail)
        monkeypatch.setattr(Watchdog, "dump_stacks", fail)
        Watchdog().start()
        time.sleep(1000)

    assert end_of(fork(target=hang)) == 70


def test_a_run_out_of_memory_does_not_wait_for_its_threads(capfd: pytest.CaptureFixture[str]) -> None:
    def end() -> None:
        os.setpgid(0, 0)
        threading.Thread(target=time.sleep, args=[1000]).start()
        memory.end_process(OutOfMemory("no more"))

    assert end_of(fork(target=end)) == 70
    assert capfd.readouterr().err == "OutOfMemory: no more\n"
