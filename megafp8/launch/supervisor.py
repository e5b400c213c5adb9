"""Start a run again and again until it is done, or until starting it again will not mend it.

What became of a start is read from the run's state (`run_state.py`), never from the command's exit status: torchrun's
is 1 whatever its ranks say. Everything that a start left behind is killed before the next one, or before the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Optional

import psutil

from megafp8.errors import INTERNAL, PREEMPTED, CheckpointError, ConfigError, DataError, NumericsError, RunFolderInUse
from megafp8.resilience.run_lock import forget_lock_of
from megafp8.resilience.run_state import RunState, current_state, finished_state, last_recorded_step, read_run_state
from megafp8.utils.best_effort import LogFile
from megafp8.utils.process import SLURM_JOB, end_with_parent, heeded_stop_signals

RESTARTS_FILE = "restarts.jsonl"
# The same command would end in the same way.
HOPELESS = tuple(
    error.exit_status for error in (ConfigError, NumericsError, DataError, RunFolderInUse, CheckpointError)
)
# Starts in a row that may end before the run has written its first state: wrong flags look like that under torchrun.
STILLBORN = 2
# As a shell has it.
COMMAND_NOT_STARTED = 126
LONGEST_PAUSE_S = 60.0
# Beyond the grace that a run has after a signal.
KILL_AFTER_S = 10.0
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long to go on.

    Attributes:
        max_restarts: in a row, without progress between them.
        min_progress_steps: saved steps that count as progress; 0: nothing does, every restart counts.
        retry_bad_numbers: start again after numbers that are not finite: those of a fault of the hardware do not come
            again.
        backoff_s: pause before the first restart without progress; it doubles with each.
        grace_s: seconds that a run gets to save after a signal.
        ends_when_preempted: do not start again after a signal that the run got from elsewhere, which under Slurm says
            that the job is about to end.
        least_time_s: do not start when less is left: the signal that warns of the end would not come.
    """

    max_restarts: int = 10
    min_progress_steps: int = 1
    retry_bad_numbers: bool = False
    backoff_s: float = 1.0
    grace_s: float = 30.0
    ends_when_preempted: bool = False
    least_time_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Start:
    """How one start ended: a line of `restarts.jsonl`.

    Attributes:
        state: of the run afterwards; `stillborn` when it did not come so far as to write one.
        step: last step done.
        lost_steps: steps done that no checkpoint has.
        recovery_s: from the end of the start before to the first step of this one; None for the first start, and for
            one that did no step.
    """

    number: int
    started_at: float
    ended_at: float
    state: str
    reason: str
    exit_status: Optional[int]
    step: int
    saved_step: Optional[int]
    lost_steps: int
    recovery_s: Optional[float]


class Supervisor:
    """Runs a command until its run is done.

    Args:
        folder: the run's, which has its state.
        tell: shows a line.
        time_left_s: seconds that there are for this; asked before each start.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, limits: Limits, tell: Callable[[str], None],
        time_left_s: Callable[[], float] = lambda: math.inf,
    ):  # fmt: skip
        self.command, self.folder, self.limits, self.tell = list(command), folder, limits, tell
        self.time_left_s = time_left_s
        self.log = LogFile(folder / RESTARTS_FILE, "restarts", report=tell)
        self.child: Optional[subprocess.Popen] = None
        self.asked: Optional[int] = None
        self.wake = threading.Event()

    def run(self) -> int:
        """Start, and start again; the exit status that stands for the whole."""
        with contextlib.closing(self.log):
            return self.run_until_done()

    def run_until_done(self) -> int:
        """The same, with the log open."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a killed launcher leaves becomes this process's
        for number in heeded_stop_signals():
            signal.signal(number, self.forward)
        signal.signal(signal.SIGALRM, lambda *_: kill_all(psutil.Process().children(recursive=True)))
        fruitless, stillborn, best, last = 0, 0, saved_step(current_state(self.folder)), None
        while True:
            if (left_s := self.time_left_s()) < self.limits.least_time_s:
                self.tell(f"{left_s:.0f} s are left: too few to start, and to be told before they are over")
                return PREEMPTED
            last = self.start_once(last)
            saved, least = last.saved_step or 0, self.limits.min_progress_steps
            if least and saved - best >= least:
                best, fruitless = saved, 0
            stillborn = stillborn + 1 if last.state == "stillborn" else 0
            status, why = self.verdict(last, fruitless, stillborn)
            if status is not None:
                self.tell(f"start {last.number} {describe_start(last)}; {why}")
                return status
            pause_s = min(LONGEST_PAUSE_S, self.limits.backoff_s * 2**fruitless)
            fruitless += 1
            self.tell(f"start {last.number} {describe_start(last)}; starts again from step {saved} in {pause_s:g} s")
            self.wake.wait(pause_s)
            if self.asked is not None:
                return PREEMPTED

    def verdict(self, last: Start, fruitless: int, stillborn: int) -> tuple[Optional[int], str]:
        """The exit status to end with and why; None to start again."""
        if last.state in ("done", "stopped"):
            return 0, "nothing is left to do" if last.state == "done" else "as it was asked to"
        is_retried = self.limits.retry_bad_numbers and last.exit_status == NumericsError.exit_status
        if last.exit_status in HOPELESS and not is_retried:
            return last.exit_status, "starting it again would not mend that"
        if self.asked is not None:
            return PREEMPTED, f"{signal.Signals(self.asked).name} came; start this again to go on"
        if last.state == "preempted" and self.limits.ends_when_preempted:
            return PREEMPTED, "start this again to go on"
        if stillborn >= STILLBORN:
            # A command that has trained before is sound, and another time or node may be better. But another start of
            # a run that is done may be refused, and leaves no state.
            has_trained = last.saved_step and finished_state(self.folder) is None
            status = INTERNAL if has_trained else last.exit_status or INTERNAL
            return status, f"{stillborn} starts in a row; the output above says why"
        if fruitless >= self.limits.max_restarts:
            return last.exit_status or INTERNAL, (
                f"gives up after {fruitless} restarts without {self.limits.min_progress_steps} more saved steps "
                "(--max-restarts, --min-progress-steps)"
            )
        return None, ""

    def start_once(self, last: Optional[Start]) -> Start:
        """One start from beginning to end, and its line in the log."""
        before, started_at = read_run_state(self.folder), time.time()
        if SLURM_JOB in os.environ:
            forget_lock_of(os.environ[SLURM_JOB], self.folder)
        environment = dict(os.environ)
        # torchrun's patience, and the signals that it passes on (PET_: its flags by environment).
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(round(self.limits.grace_s))
        heeded = (*heeded_stop_signals(), signal.SIGQUIT)
        environment.setdefault("PET_SIGNALS_TO_HANDLE", ",".join(number.name for number in heeded))
        returned, end = self.launch_and_wait(environment)
        end_descendants(self.limits.grace_s)
        signal.alarm(0)
        found, ended_at = current_state(self.folder), time.time()
        if found is not None and found.is_of(before):
            found = None
        if found is not None and found.state == "running":  # on another machine, where nobody can look
            found = dataclasses.replace(found, state="died", reason=f"{found.process} ended without a word")
        start = Start(
            number=1 if last is None else last.number + 1,
            started_at=started_at,
            ended_at=ended_at,
            state="stillborn" if found is None else found.state,
            reason=f"the command {end} before its run began" if found is None else found.reason,
            exit_status=returned if found is None else found.exit_status,
            **progress_of(found or before, found, self.folder),
            recovery_s=found.first_step_at - last.ended_at if found and found.first_step_at and last else None,
        )
        self.log.append(json.dumps(dataclasses.asdict(start)).encode() + b"\n")
        return start

    def launch_and_wait(self, environment: dict[str, str]) -> tuple[int, str]:
        """Run the command to its end. Returns its exit status and that end in words."""
        try:
            self.child = self.launch(environment)
        except OSError as error:  # no process is left for it, or its disk is away: another start may do better
            return COMMAND_NOT_STARTED, f"could not be started ({error.strerror})"
        if self.asked is not None:  # it came before there was anybody to pass it on to
            self.forward(self.asked, None)
        returned = self.child.wait()
        self.child = None
        return returned, f"ended with status {returned}"

    def launch(self, environment: dict[str, str]) -> subprocess.Popen:
        """Start the command's process."""
        # A supervisor that is killed tells nobody.
        end = functools.partial(end_with_parent, signal.SIGTERM, os.getpid())
        return subprocess.Popen(self.command, env=environment, start_new_session=True, preexec_fn=end)

    def forward(self, number: int, frame: Optional[FrameType]) -> None:
        """Pass a signal on to the command; what has not ended after its grace is killed."""
        self.asked = number
        self.wake.set()
        if self.child is not None:
            self.child.send_signal(number)
            signal.setitimer(signal.ITIMER_REAL, self.limits.grace_s + KILL_AFTER_S)


def progress_of(state: Optional[RunState], found: Optional[RunState], folder: Path) -> dict[str, Optional[int]]:
    """How far a start came; `found` is None when it wrote no state."""
    step, saved = (0, None) if state is None else (state.step, state.saved_step)
    if found is not None and found.first_step_at is not None:
        step = max(step, last_recorded_step(folder))
    lost = 0 if found is None else max(0, step - (saved or 0))
    return {"step": step, "saved_step": saved, "lost_steps": lost}


def saved_step(state: Optional[RunState]) -> int:
    """The newest checkpoint's step; 0 without one."""
    return 0 if state is None else state.saved_step or 0


def describe_start(start: Start) -> str:
    """A start's end in words."""
    lost = f", {start.lost_steps} steps lost" if start.lost_steps else ""
    reason = f" ({start.reason.splitlines()[0]})" if start.reason else ""
    return f"{start.state} at step {start.step}{lost}{reason}"


def end_descendants(grace_s: float) -> None:
    """End what a start left: its ranks have sessions of their own, so that no process group has them all. Those of a
    torchrun that was killed save now."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    psutil.wait_procs(children, timeout=grace_s)
    for _ in range(3):  # one that is killed may just have started another
        children = psutil.Process().children(recursive=True)
        kill_all(children)
        psutil.wait_procs(children, timeout=KILL_AFTER_S)


def kill_all(processes: list[psutil.Process]) -> None:
    """SIGKILL to those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
