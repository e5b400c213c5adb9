"""Hangs end in time: a rank that sleeps, one that is stopped, one that is gone, C code that blocks all threads."""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from faulty_run import FaultyRun

from megafp8.resilience import watchdog as watchdog_module
from megafp8.resilience.run_state import current_state
from megafp8.resilience.watchdog import STACKS_FOLDER, STEP, PhaseClock, Watchdog
from megafp8.utils.process import current_process, read_proc_stat

LAYOUT, LIMIT_S, SPARE_S = "dp2", 4.0, 8.0
LIMITS = f"--step-timeout-s {LIMIT_S:g} --checkpoint-timeout-s {LIMIT_S:g}"


def stacks(run: FaultyRun, rank: int) -> str:
    return (run.folder / STACKS_FOLDER / f"rank{rank}.txt").read_text()


def test_a_sleeping_rank_is_a_hang(tmp_path: Path, cache: Path) -> None:
    """Every rank exits with the status of a hang and writes its stacks, which show the sleeping rank."""
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    flags = f"--save {run.folder} --load {run.folder} {LIMITS}"
    ended = run.start("sleep:rank=1,seconds=600,step=2,at=save.mid_shard", flags)
    assert set(ended.statuses) == {71}, ended.report()
    assert ended.num_orphans == 0
    assert ended.seconds_after_first < SPARE_S, ended.report()
    state = current_state(run.folder)
    assert state is not None and (state.state, state.exit_status) == ("failed", 71)
    assert "hangs in save at step 2, for " in state.reason and f"(limit {LIMIT_S:g} s)" in state.reason
    assert "fault_injection.py" in stacks(run, 1) and "fault_injection.py" not in stacks(run, 0)
    assert "hangs in" in stacks(run, 0) and "most recent call first" in stacks(run, 0)


def test_a_stopped_rank_is_named_and_ended(tmp_path: Path, cache: Path) -> None:
    """It cannot exit by itself, so the others name it and continue it to exit."""
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    ended = run.start("stop:rank=1,step=3,at=step.begin", f"--save {run.folder} --load {run.folder} {LIMITS}")
    assert ended.statuses[0] == 71 and ended.statuses[1] in (70, 71), ended.report()
    assert ended.num_orphans == 0
    state = current_state(run.folder)
    assert state is not None and "rank 1 (process " in state.reason and "is stopped" in state.reason


def test_four_ranks_end_when_one_is_killed(tmp_path: Path, cache: Path) -> None:
    """Also those that wait for ranks other than the dead one."""
    run = FaultyRun("tp2-pp2", tmp_path / "run", cache)
    ended = run.start("kill:rank=3,step=2,at=step.begin")
    assert ended.statuses[3] == -signal.SIGKILL and set(ended.statuses[:3]) == {70}, ended.report()
    assert ended.seconds_after_first < SPARE_S
    state = current_state(run.folder)
    assert state is not None and "rank 3 (process " in state.reason and "has ended" in state.reason


def test_an_error_of_one_rank_ends_the_others(tmp_path: Path, cache: Path) -> None:
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    ended = run.start("raise:rank=1,step=3,at=step.before_update")
    assert ended.statuses == (70, 70), ended.report()
    state = current_state(run.folder)
    assert state is not None and state.exit_status == 70
    assert state.reason.startswith("rank 1: OSError: ") and "injected" in state.reason
    assert "rank 1 (process " in ended.output[0]


def forked(function: Callable[[], None]) -> BaseProcess:
    """A separate process, which inherits the imports."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    return process


class WatchdogChecks:
    """Counts the checks of a watchdog."""

    def __init__(self, watchdog: Watchdog):
        self.count, check_peers = 0, watchdog.check_peers

        def check_and_count(now: float) -> None:
            check_peers(now)
            self.count += 1

        watchdog.check_peers = check_and_count

    def wait(self) -> None:
        """Wait for a check that starts after this call. One may be running."""
        seen, deadline = self.count, time.monotonic() + 30
        while self.count < seen + 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards check ten times a second, and allow the others less time."""
    for name, seconds in (("TICK_S", 0.1), ("LOST_PEER_S", 1.0), ("PEER_STACKS_S", 0.5)):
        monkeypatch.setattr(watchdog_module, name, seconds)


def test_a_rank_blocked_in_c_code_detects_a_dead_peer(tmp_path: Path, often: None) -> None:
    """In a collective that the death does not end, as with NCCL. Here it is a sleep without the GIL."""
    peer = forked(lambda: time.sleep(60))

    def wait_for_peer() -> None:
        os.dup2(os.open(tmp_path / "output", os.O_WRONLY | os.O_CREAT), sys.__stderr__.fileno())
        watchdog = Watchdog(rank=0)
        watchdog.start()
        checks = WatchdogChecks(watchdog)
        watchdog.attach(
            None, None, {1: dataclasses.replace(current_process(), pid=peer.pid, started=read_proc_stat(peer.pid)[1])}
        )
        checks.wait()
        (tmp_path / "waits").touch()
        ctypes.CDLL(None).sleep(60)

    process = forked(wait_for_peer)
    wait_until((tmp_path / "waits").exists, process)
    peer.kill()
    process.join(30)
    assert process.exitcode == 70
    assert f"rank 0: rank 1 (process {peer.pid} on " in (tmp_path / "output").read_text()


def in_second_step(watchdog: Watchdog) -> WatchdogChecks:
    """Start a watchdog, set the limit of a step, and check once."""
    checks = WatchdogChecks(watchdog)
    watchdog.start()
    watchdog.enter(STEP, 1)
    watchdog.enter(STEP, 2)
    checks.wait()
    return checks


def wait_until(is_so: Callable[[], bool], process: BaseProcess) -> None:
    """Poll as long as the process lives."""
    while not is_so():
        assert process.is_alive()
        time.sleep(0.02)


def test_c_code_that_holds_the_gil_is_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: None) -> None:
    """A PyDLL holds the GIL while it sleeps. The timer in C ends the process, with its stacks."""
    monkeypatch.setattr(watchdog_module, "TIMER_MARGIN_S", 0.5)

    def hold_the_lock() -> None:
        os.dup2(os.open(tmp_path / "stacks", os.O_WRONLY | os.O_CREAT), sys.__stderr__.fileno())
        watchdog = Watchdog(PhaseClock(2.0, 0.0))
        in_second_step(watchdog)
        ctypes.PyDLL(None).sleep(60)

    process = forked(hold_the_lock)
    process.join(30)
    assert process.exitcode == 1
    text = (tmp_path / "stacks").read_text()
    assert "Timeout" in text and "in hold_the_lock" in text


def test_a_paused_process_is_not_a_hang(monkeypatch: pytest.MonkeyPatch, often: None) -> None:
    """It is stopped for longer than its limit, and continues."""
    limit_s = 2.0
    monkeypatch.setattr(watchdog_module, "PAUSED_S", 1.0)

    def pause() -> None:
        watchdog = Watchdog(PhaseClock(limit_s, 0.0))
        checks = in_second_step(watchdog)
        os.kill(os.getpid(), signal.SIGSTOP)
        checks.wait()
        watchdog.close()

    process = forked(pause)
    wait_until(lambda: read_proc_stat(process.pid)[0] == "T", process)
    time.sleep(limit_s + 0.2)
    os.kill(process.pid, signal.SIGCONT)
    process.join(30)
    assert process.exitcode == 0
