"""What stops stops in time: a rank that sleeps, one that was stopped, one that is gone, C code that lets nobody run."""

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

from megafp8.resilience import watchdog
from megafp8.resilience.run_state import current_state
from megafp8.resilience.watchdog import STACKS_FOLDER, STEP, PhaseClock, Watchdog
from megafp8.utils.process import current_process, read_proc_stat

LAYOUT, LIMIT_S, SPARE_S = "dp2", 4.0, 8.0
LIMITS = f"--step-timeout-s {LIMIT_S:g} --checkpoint-timeout-s {LIMIT_S:g}"


def stacks(run: FaultyRun, rank: int) -> str:
    return (run.folder / STACKS_FOLDER / f"rank{rank}.txt").read_text()


def test_a_rank_that_sleeps(tmp_path: Path, cache: Path) -> None:
    """Every rank ends with the status of a hang, and leaves its stacks: the one that sleeps is seen there."""
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    flags = f"--save {run.folder} --load {run.folder} {LIMITS}"
    ended = run.start("sleep:rank=1,seconds=600,step=2,at=save.mid_shard", flags)
    assert set(ended.statuses) == {71}, ended.told()
    assert ended.num_orphans == 0
    assert ended.seconds_after_first < SPARE_S, ended.told()
    state = current_state(run.folder)
    assert state is not None and (state.state, state.exit_status) == ("failed", 71)
    assert "hangs in save at step 2, for " in state.reason and f"(limit {LIMIT_S:g} s)" in state.reason
    assert "fault_injection.py" in stacks(run, 1) and "fault_injection.py" not in stacks(run, 0)
    assert "hangs in" in stacks(run, 0) and "most recent call first" in stacks(run, 0)


def test_a_rank_that_is_stopped(tmp_path: Path, cache: Path) -> None:
    """It cannot end itself, so the others name it, and wake it up to end."""
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    ended = run.start("stop:rank=1,step=3,at=step.begin", f"--save {run.folder} --load {run.folder} {LIMITS}")
    assert ended.statuses[0] == 71 and ended.statuses[1] in (70, 71), ended.told()
    assert ended.num_orphans == 0
    state = current_state(run.folder)
    assert state is not None and "rank 1 (process " in state.reason and "is stopped" in state.reason


def test_four_ranks_end_when_one_is_killed(tmp_path: Path, cache: Path) -> None:
    """Also those that wait for others than the dead one."""
    run = FaultyRun("tp2-pp2", tmp_path / "run", cache)
    ended = run.start("kill:rank=3,step=2,at=step.begin")
    assert ended.statuses[3] == -signal.SIGKILL and set(ended.statuses[:3]) == {70}, ended.told()
    assert ended.seconds_after_first < SPARE_S
    state = current_state(run.folder)
    assert state is not None and "rank 3 (process " in state.reason and "has ended" in state.reason


def test_an_error_of_one_rank_ends_the_others(tmp_path: Path, cache: Path) -> None:
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    ended = run.start("raise:rank=1,step=3,at=step.before_update")
    assert ended.statuses == (70, 70), ended.told()
    state = current_state(run.folder)
    assert state is not None and state.exit_status == 70
    assert state.reason.startswith("rank 1: OSError: ") and "injected" in state.reason
    assert "rank 1 (process " in ended.output[0]


def forked(function: Callable[[], None]) -> BaseProcess:
    """A process of its own, which inherits the imports."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    return process


class Looks:
    """How often a guard has looked around."""

    def __init__(self, guard: Watchdog):
        self.count, check_peers = 0, guard.check_peers

        def check_and_count(now: float) -> None:
            check_peers(now)
            self.count += 1

        guard.check_peers = check_and_count

    def wait(self) -> None:
        """For one that begins after this: one may be under way."""
        seen, deadline = self.count, time.monotonic() + 30
        while self.count < seen + 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards look around ten times a second, and give others less time."""
    for name, seconds in (("TICK_S", 0.1), ("LOST_PEER_S", 1.0), ("PEER_STACKS_S", 0.5)):
        monkeypatch.setattr(watchdog, name, seconds)


def test_a_rank_that_waits_in_c_code_sees_a_dead_one(tmp_path: Path, often: None) -> None:
    """In a collective that the death does not end, as with NCCL; here in a sleep without the interpreter's lock."""
    peer = forked(lambda: time.sleep(60))

    def wait_for_peer() -> None:
        os.dup2(os.open(tmp_path / "output", os.O_WRONLY | os.O_CREAT), sys.__stderr__.fileno())
        guard = Watchdog(rank=0)
        guard.start()
        looks = Looks(guard)
        guard.attach(
            None, None, {1: dataclasses.replace(current_process(), pid=peer.pid, started=read_proc_stat(peer.pid)[1])}
        )
        looks.wait()
        (tmp_path / "waits").touch()
        ctypes.CDLL(None).sleep(60)

    process = forked(wait_for_peer)
    wait_until((tmp_path / "waits").exists, process)
    peer.kill()
    process.join(30)
    assert process.exitcode == 70
    assert f"rank 0: rank 1 (process {peer.pid} on " in (tmp_path / "output").read_text()


def in_second_step(guard: Watchdog) -> Looks:
    """Start a guard, let it know the limit of a step, and look around once."""
    looks = Looks(guard)
    guard.start()
    guard.enter(STEP, 1)
    guard.enter(STEP, 2)
    looks.wait()
    return looks


def wait_until(is_so: Callable[[], bool], process: BaseProcess) -> None:
    """For as long as the process lives."""
    while not is_so():
        assert process.is_alive()
        time.sleep(0.02)


def test_c_code_that_lets_no_thread_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: None) -> None:
    """A PyDLL keeps the interpreter's lock while it sleeps. The timer in C ends the process, with its stacks."""
    monkeypatch.setattr(watchdog, "TIMER_MARGIN_S", 0.5)

    def hold_the_lock() -> None:
        os.dup2(os.open(tmp_path / "stacks", os.O_WRONLY | os.O_CREAT), sys.__stderr__.fileno())
        guard = Watchdog(PhaseClock(2.0, 0.0))
        in_second_step(guard)
        ctypes.PyDLL(None).sleep(60)

    process = forked(hold_the_lock)
    process.join(30)
    assert process.exitcode == 1
    text = (tmp_path / "stacks").read_text()
    assert "Timeout" in text and "in hold_the_lock" in text


def test_a_pause_of_the_whole_process_is_no_hang(monkeypatch: pytest.MonkeyPatch, often: None) -> None:
    """It is stopped for longer than its limit, and goes on."""
    limit_s = 2.0
    monkeypatch.setattr(watchdog, "PAUSED_S", 1.0)

    def pause() -> None:
        guard = Watchdog(PhaseClock(limit_s, 0.0))
        looks = in_second_step(guard)
        os.kill(os.getpid(), signal.SIGSTOP)
        looks.wait()
        guard.close()

    process = forked(pause)
    wait_until(lambda: read_proc_stat(process.pid)[0] == "T", process)
    time.sleep(limit_s + 0.2)
    os.kill(process.pid, signal.SIGCONT)
    process.join(30)
    assert process.exitcode == 0
