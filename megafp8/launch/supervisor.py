"""Supervisor of a run: restarts its command until the run is done, or until a restart cannot help.

The result of a start is read from the run state (`run_state.py`), not from the command's exit status: torchrun's is 1
whatever its ranks return. All processes that a start leaves behind are killed before the next start, and at the end.
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
from megafp8.resilience.run_lock import remove_stale_job_lock
from megafp8.resilience.run_state import RunState, current_state, finished_state, last_recorded_step, read_run_state
from megafp8.utils.best_effort import LogFile
from megafp8.utils.process import handled_stop_signals, job_id, set_parent_death_signal

RESTARTS_FILE = "restarts.jsonl"
# Exit statuses after which the same command would fail in the same way.
PERMANENT_ERRORS = tuple(
    error.exit_status for error in (ConfigError, NumericsError, DataError, RunFolderInUse, CheckpointError)
)
# Starts in a row that may end before the run writes its first state. Under torchrun, wrong flags have this effect.
MAX_STILLBORN = 2
# Exit status of a shell for a command that cannot be executed.
COMMAND_NOT_STARTED = 126
MAX_BACKOFF_S = 60.0
# In addition to the grace period of a run after a signal.
KILL_MARGIN_S = 10.0
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When to restart a run, and when to give up.

    Attributes:
        max_restarts: restarts in a row without progress.
        min_progress_steps: saved steps that count as progress; 0: every restart counts against `max_restarts`.
        retry_bad_numbers: restart after non-finite numbers. Those of a hardware fault do not recur.
        backoff_s: pause before the first restart without progress; doubles with each further one.
        grace_s: time that a run has to save after a signal.
        ends_when_preempted: do not restart after a signal that did not come through this process. Under Slurm it means
            that the job is about to end.
        least_time_s: do not start with less time left, because the signal that warns of the end would not come.
    """

    max_restarts: int = 10
    min_progress_steps: int = 1
    retry_bad_numbers: bool = False
    backoff_s: float = 1.0
    grace_s: float = 30.0
    ends_when_preempted: bool = False
    least_time_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StartRecord:
    """The result of one start: a line of `restarts.jsonl`.

    Attributes:
        state: run state afterwards; `stillborn` if the start ended before the run wrote one.
        step: last step done.
        lost_steps: steps done since the last checkpoint.
        recovery_s: time from the end of the previous start to the first step of this one; None for the first start,
            and for one without a step.
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
        folder: the run's folder, which has its run state.
        report: prints a line.
        time_left_s: returns the remaining time of the job; called before each start.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, policy: RestartPolicy, report: Callable[[str], None],
        time_left_s: Callable[[], float] = lambda: math.inf,
    ):  # fmt: skip
        self.command, self.folder, self.policy, self.report = list(command), folder, policy, report
        self.time_left_s = time_left_s
        self.log = LogFile(folder / RESTARTS_FILE, "restarts", report=report)
        self.child: Optional[subprocess.Popen] = None
        self.stop_signal: Optional[int] = None
        self.wake = threading.Event()

    def run(self) -> int:
        """Start and restart the command; returns the exit status of the supervisor."""
        with contextlib.closing(self.log):
            return self.run_until_done()

    def run_until_done(self) -> int:
        """`run` with the log open."""
        # Orphans of a killed launcher become children of this process.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        for number in handled_stop_signals():
            signal.signal(number, self.forward)
        # The ranks' request for a memory snapshot: `scancel -s` and pkill also reach this process and torchrun, which
        # inherits that it is ignored.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, lambda *_: kill_all(psutil.Process().children(recursive=True)))
        num_fruitless, num_stillborn, last = 0, 0, None
        best_step = saved_step(current_state(self.folder))
        while True:
            if (left_s := self.time_left_s()) < self.policy.least_time_s:
                self.report(
                    f"{left_s:.0f} s are left: too little time to start the run and to save before the time limit"
                )
                return PREEMPTED
            last = self.start_once(last)
            saved, min_progress = last.saved_step or 0, self.policy.min_progress_steps
            if min_progress and saved - best_step >= min_progress:
                best_step, num_fruitless = saved, 0
            num_stillborn = num_stillborn + 1 if last.state == "stillborn" else 0
            status, reason = self.final_status(last, num_fruitless, num_stillborn)
            if status is not None:
                self.report(f"start {last.number} {describe_start(last)}; {reason}")
                return status
            pause_s = min(MAX_BACKOFF_S, self.policy.backoff_s * 2**num_fruitless)
            num_fruitless += 1
            self.report(f"start {last.number} {describe_start(last)}; restarting from step {saved} in {pause_s:g} s")
            self.wake.wait(pause_s)
            if self.stop_signal is not None:
                return PREEMPTED

    def final_status(self, last: StartRecord, num_fruitless: int, num_stillborn: int) -> tuple[Optional[int], str]:
        """The exit status to end with, and the reason; None to restart."""
        if last.state in ("done", "stopped"):
            return 0, "finished" if last.state == "done" else "stopped as requested"
        is_retried = self.policy.retry_bad_numbers and last.exit_status == NumericsError.exit_status
        if last.exit_status in PERMANENT_ERRORS and not is_retried:
            return last.exit_status, "a restart would not help"
        if self.stop_signal is not None:
            return PREEMPTED, f"received {signal.Signals(self.stop_signal).name}; run the same command again to resume"
        if last.state == "preempted" and self.policy.ends_when_preempted:
            return PREEMPTED, "run the same command again to resume"
        if num_stillborn > min(MAX_STILLBORN - 1, self.policy.max_restarts):
            # A command that has trained before is valid and may work later or on another node. But a run that is done
            # may refuse another start, which leaves no run state.
            has_trained = last.saved_step and finished_state(self.folder) is None
            status = INTERNAL if has_trained else last.exit_status or INTERNAL
            return (
                status,
                f"{num_stillborn} consecutive starts failed before training; see the output above for the reason",
            )
        if num_fruitless >= self.policy.max_restarts:
            return last.exit_status or INTERNAL, (
                f"giving up after {num_fruitless} restarts without {self.policy.min_progress_steps} more saved steps "
                "(--max-restarts, --min-progress-steps)"
            )
        return None, ""

    def start_once(self, last: Optional[StartRecord]) -> StartRecord:
        """Run the command once, and append the result to the log."""
        before, started_at = read_run_state(self.folder), time.time()
        if (job := job_id()) is not None:
            remove_stale_job_lock(job, self.folder)
        environment = dict(os.environ)
        # torchrun's grace period, and the signals that it forwards (PET_ variables are its flags).
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(round(self.policy.grace_s))
        signals = (*handled_stop_signals(), signal.SIGQUIT)
        environment.setdefault("PET_SIGNALS_TO_HANDLE", ",".join(number.name for number in signals))
        returned, end = self.launch_and_wait(environment)
        end_descendants(self.policy.grace_s)
        signal.alarm(0)
        found, ended_at = current_state(self.folder), time.time()
        if found is not None and found.is_of(before):
            found = None
        if found is not None and found.state == "running":  # on another machine, whose processes cannot be checked
            found = dataclasses.replace(found, state="died", reason=f"{found.process} ended without an error message")
        state = found or before
        step = 0 if state is None else state.step
        if found is not None and found.first_step_at is not None:
            step = max(step, last_recorded_step(self.folder))
        start = StartRecord(
            number=1 if last is None else last.number + 1,
            started_at=started_at,
            ended_at=ended_at,
            state="stillborn" if found is None else found.state,
            reason=f"the command {end} before its run began" if found is None else found.reason,
            exit_status=returned if found is None else found.exit_status,
            step=step,
            saved_step=None if state is None else state.saved_step,
            lost_steps=0 if found is None else max(0, step - saved_step(found)),
            recovery_s=found.first_step_at - last.ended_at if found and found.first_step_at and last else None,
        )
        self.log.append(json.dumps(dataclasses.asdict(start)).encode() + b"\n")
        return start

    def launch_and_wait(self, environment: dict[str, str]) -> tuple[int, str]:
        """Run the command to its end. Returns its exit status, and how it ended in words."""
        try:
            self.child = self.launch(environment)
        except OSError as error:  # too many processes, or an unavailable file system: another start may succeed
            return COMMAND_NOT_STARTED, f"could not be started ({error.strerror})"
        if self.stop_signal is not None:  # it came before there was a process to forward it to
            self.forward(self.stop_signal, None)
        returned = self.child.wait()
        self.child = None
        return returned, f"exited with status {returned}"

    def launch(self, environment: dict[str, str]) -> subprocess.Popen:
        """Start the command's process."""
        # Without this, the command would survive a SIGKILL of the supervisor.
        end = functools.partial(set_parent_death_signal, signal.SIGTERM, os.getpid())
        return subprocess.Popen(self.command, env=environment, start_new_session=True, preexec_fn=end)

    def forward(self, number: int, frame: Optional[FrameType]) -> None:
        """Forward a signal to the command, and kill what has not ended after the grace period."""
        self.stop_signal = number
        self.wake.set()
        if self.child is not None:
            self.child.send_signal(number)
            signal.setitimer(signal.ITIMER_REAL, self.policy.grace_s + KILL_MARGIN_S)


def saved_step(state: Optional[RunState]) -> int:
    """Step of the newest checkpoint; 0 without one."""
    return 0 if state is None else state.saved_step or 0


def describe_start(start: StartRecord) -> str:
    """The result of a start in words."""
    lost = f", {start.lost_steps} steps lost" if start.lost_steps else ""
    reason = f" ({start.reason.splitlines()[0]})" if start.reason else ""
    return f"{start.state} at step {start.step}{lost}{reason}"


def end_descendants(grace_s: float) -> None:
    """End all processes that a start left. Ranks have their own sessions, so no process group contains them all.

    The ranks of a torchrun that was killed save during the grace period.
    """
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    psutil.wait_procs(children, timeout=grace_s)
    for _ in range(3):  # a process that is killed may just have started another one
        children = psutil.Process().children(recursive=True)
        kill_all(children)
        psutil.wait_procs(children, timeout=KILL_MARGIN_S)


def kill_all(processes: list[psutil.Process]) -> None:
    """Send SIGKILL to all processes that still exist."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
