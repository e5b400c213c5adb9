"""Watchdog thread of each rank: signals, time limits of steps, and lost peers.

Signals. Python runs a signal handler only when the main thread next executes bytecode, which may be never while it is
in C code. The interpreter therefore also writes the signal number to a pipe (`signal.set_wakeup_fd`) that this thread
reads. The first signal requests a stop: the ranks sum up who received one with the totals of a step
(`metrics/step_totals.py`), so that all of them save and stop after the same step. A later second signal, or the
end of the grace period, ends the process at once. A checkpoint being written then has no final name, and the previous
one counts.

Time limits. Each phase of the training thread has a limit (`PhaseClock`). When it is exceeded, the stacks of all
threads are written to a file and the process ends. If C code holds the GIL and this thread cannot run, a faulthandler
timer ends the process from C with status 1 and the stacks on standard error.

Lost peers. Ranks of this machine are polled once per second. When one has ended, the others get some time to notice and
report it themselves before they end, too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, Optional

from megafp8.errors import HUNG, INTERNAL, PREEMPTED
from megafp8.resilience.run_lock import RunLock
from megafp8.resilience.run_state import RunStateWriter
from megafp8.utils.formatting import utc_now
from megafp8.utils.process import STDERR, STOPPED_STATE, Process, exit_later, handled_stop_signals, stop_with_torchrun

IMMEDIATE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# torchrun forwards signals that the ranks may have received already as members of a process group or of a job.
DUPLICATE_SIGNAL_S = 5.0
# Part of the grace period that is left for the exit itself.
MARGIN_S, MARGIN_FRACTION = 2.0, 0.1
TICK_S = 1.0
HEARTBEAT_S = 10.0
# A tick this late means that the process was stopped (SIGSTOP).
PAUSED_S = 5.0
# Time for the training thread to notice a lost peer itself.
LOST_PEER_S = 5.0
# Time for the other ranks to write their stacks after this one's.
PEER_STACKS_S = 2.0
# Time limit of a forced exit: a disk may hang.
FORCED_EXIT_S = 10.0
# The faulthandler timer fires this long after a limit, so that the watchdog thread acts first.
TIMER_MARGIN_S = 15.0
STACKS_FOLDER = "logs/watchdog"
# The start has no limit: building an index may take hours, and the rendezvous has its own timeout.
START = "start"
STEP, EVALUATION, AFTER_STEP = "step", "evaluation batch", "what follows step"
SAMPLE = "sample of text"
# The first step or batch compiles kernels and connects ranks.
FIRST_LIMIT_S, FIRST_FACTOR = 1800.0, 5.0
# Automatic limit: a multiple of the slowest recent duration, with a minimum.
AUTO_FACTOR, AUTO_MIN_S, NUM_RECENT = 5.0, 120.0, 50


class Watchdog:
    """Watches one rank. Without `start` it only records events.

    Args:
        grace_s: time from a signal to the expected SIGKILL.
        handles_signals: signals stop the run in order; otherwise Python's default applies.

    Attributes:
        received_signal: first signal of this rank; 0 if none.
        stop_agreed: all ranks know of a signal and stop after the same step.
        outcome, reason: run state to record at an orderly end.
    """

    def __init__(
        self, phases: Optional[PhaseClock] = None, *, rank: int = 0, grace_s: float = 30.0, handles_signals: bool = True
    ):
        self.phases = phases or PhaseClock(0, 0)
        self.rank, self.grace_s, self.handles_signals = rank, grace_s, handles_signals
        self.received_signal, self.signal_time, self.stop_agreed = 0, 0.0, False
        self.outcome, self.reason = "done", ""
        self.run_state: Optional[RunStateWriter] = None
        self.lock: Optional[RunLock] = None
        self.peers: dict[int, Process] = {}
        self.lost: Optional[tuple[str, float]] = None
        self.thread: Optional[threading.Thread] = None
        self.is_closing = False
        self.handlers: dict[int, Any] = {}
        self.last_heartbeat = 0.0

    # Methods of the training thread.

    def start(self) -> None:
        """Start the thread and install signal handlers. Call it from the main thread."""
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        thread = threading.Thread(target=self.run, name="guard", daemon=True)
        thread.start()  # before the handlers: without memory it may never return, and only the thread acts on a signal
        self.thread = thread
        if self.handles_signals:
            signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
            self.handlers = {number: signal.signal(number, self.record_signal) for number in handled_stop_signals()}

    def attach(self, run_state: Optional[RunStateWriter], lock: Optional[RunLock], peers: dict[int, Process]) -> None:
        """Set what to watch, once the ranks have met.

        Args:
            lock: on rank 0; None on others.
            peers: the other ranks of this machine.
        """
        self.run_state, self.lock, self.peers = run_state, lock, peers
        stop_with_torchrun()

    def record_signal(self, number: int, frame: Optional[FrameType]) -> None:
        """Record the first signal. This is the signal handler."""
        if not self.received_signal:
            self.received_signal, self.signal_time = number, time.monotonic()

    def enter(self, name: str, step: Optional[int] = None) -> None:
        """Enter a phase of the training thread."""
        self.phases.enter(name, step)

    def agree_to_stop(self, num_signalled_ranks: float) -> None:
        """Set `stop_agreed` from the number of ranks that received a signal."""
        if num_signalled_ranks and not self.stop_agreed:
            self.signal_time = self.signal_time or time.monotonic()
            self.stop_agreed = True

    def step_done(self, step: int) -> None:
        """Record a completed step. The first one of this start is written at once."""
        if self.run_state is None:
            return
        self.run_state.update(step=step)
        if self.run_state.state.first_step_at is None:
            self._record(first_step_at=time.time())

    def failed_loads(self, step: int) -> int:
        """Return how many times in a row a start crashed while loading this checkpoint of the run's own."""
        state = None if self.run_state is None else self.run_state.state
        return state.loads if state is not None and state.loading == step else 0

    def load_started(self, step: int) -> None:
        """Record that a checkpoint of the run's own is being loaded. It is written first, as the load may crash."""
        self._record(loading=step, loads=self.failed_loads(step) + 1)

    def load_succeeded(self) -> None:
        """Record that the load did not crash."""
        self._record(loading=None, loads=0)

    def resumed(self, step: int, is_own: bool) -> None:
        """Record the checkpoint that the run resumes from, its own or another run's; step 0 without one."""
        if self.run_state is not None:
            self.run_state.finished = None  # from here on, failures are failures of the run
        self._record(step=step, saved_step=step if is_own and step else None)

    def evaluation_interrupted(self, step: Optional[int]) -> None:
        """Record the step of an interrupted evaluation; None if it was completed."""
        if self.run_state is not None:
            self.run_state.update(evaluation_due=step)

    def is_evaluation_due(self, step: int) -> bool:
        """Return whether the previous start interrupted an evaluation at this step."""
        return self.run_state is not None and self.run_state.state.evaluation_due == step

    def saved(self, step: int) -> None:
        """Record a saved checkpoint."""
        self._record(saved_step=step, crashes=0)

    def _record(self, **changes: Any) -> None:
        if self.run_state is not None:
            self.run_state.update(**changes)
            self.run_state.write()

    @property
    def exit_status(self) -> int:
        """Exit status of an orderly end."""
        return PREEMPTED if self.outcome == "preempted" else 0

    def finish(self) -> None:
        """Record an orderly end of the run."""
        if self.run_state is not None and self.run_state.is_writer:
            self.run_state.end(self.outcome, self.reason, self.exit_status)

    def find_lost_peer(self, wait_s: float = 0.0) -> Optional[str]:
        """Return which rank of this machine has ended, as text; None if none has or it cannot be seen."""
        deadline = time.monotonic() + wait_s
        while True:
            for rank, process in self.peers.items():
                if process.is_alive() is False:
                    return f"rank {rank} ({process}) has ended"
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    def close(self) -> None:
        """Stop the thread and release signals and pipes."""
        if self.thread is None:
            return
        self.is_closing = True
        os.write(self.wake_write, b"\0")
        self.thread.join()
        if self.handles_signals:
            signal.set_wakeup_fd(-1)
            for number in self.handlers:
                signal.signal(number, signal.SIG_IGN)  # the launcher may still forward a signal that was handled
        os.close(self.wake_read)
        os.close(self.wake_write)

    # Methods of the watchdog thread.

    def run(self) -> None:
        """Watch, and end the process if that fails: signals and hangs would go unnoticed."""
        try:
            self.watch()
        except Exception as error:
            self.abort("failed", f"the watchdog failed: {type(error).__name__}: {error}", INTERNAL)

    def watch(self) -> None:
        """Poll once per second until closed."""
        last_tick = time.monotonic()
        while True:
            ready, _, _ = select.select([self.wake_read], [], [], TICK_S)
            if self.is_closing:
                faulthandler.cancel_dump_traceback_later()
                return
            now = time.monotonic()
            if now - last_tick > PAUSED_S:
                self.phases.exclude(now - last_tick)
            last_tick = now
            if ready:
                for number in os.read(self.wake_read, 64):
                    self.handle_signal(number, now)
            self.set_timer()
            self.check_time(now)
            self.check_peers(now)
            if now - self.last_heartbeat > HEARTBEAT_S:
                self.last_heartbeat = now
                self.heartbeat()

    def handle_signal(self, number: int, now: float) -> None:
        """Start the grace period on the first signal; end the process on a second one that is not a duplicate."""
        if number not in self.handlers:
            return
        self.record_signal(number, None)
        if number in IMMEDIATE_SIGNALS and now - self.signal_time > DUPLICATE_SIGNAL_S:
            self.abort(
                "preempted", f"received a second {signal.Signals(number).name}; exiting without saving", PREEMPTED
            )

    def set_timer(self) -> None:
        """Arm the faulthandler timer, in case this thread cannot run when the limit is reached."""
        left_s = self.phases.left_s()
        if left_s is None:
            faulthandler.cancel_dump_traceback_later()
            return
        exit_later(max(left_s, 0.0) + TIMER_MARGIN_S)

    def check_time(self, now: float) -> None:
        """End the process when a phase exceeds its limit or the grace period is over."""
        margin_s = min(MARGIN_S, MARGIN_FRACTION * self.grace_s)
        if self.signal_time and now > self.signal_time + self.grace_s - margin_s:
            self.abort(
                "preempted", f"{self.grace_s:g} s after a signal still in {self.phases}: nothing was saved since "
                "(--exit-signal-grace-s; torchrun's --shutdown-timeout)", PREEMPTED,
            )  # fmt: skip
        left_s = self.phases.left_s()
        if left_s is not None and left_s < 0:
            stopped = [f"; rank {rank} ({process}) is stopped" for rank, process in self.stopped_peers()]
            limit_s = self.phases.limit_s(self.phases.current.name)
            self.abort("failed", f"hangs in {self.phases} (limit {limit_s:g} s){''.join(stopped)}", HUNG)

    def stopped_peers(self) -> list[tuple[int, Process]]:
        """Return the ranks of this machine that are stopped (SIGSTOP)."""
        return [(rank, process) for rank, process in self.peers.items() if process.state() == STOPPED_STATE]

    def check_peers(self, now: float) -> None:
        """End the process some time after another rank of this machine has ended."""
        lost = self.find_lost_peer()
        if lost is None:
            return
        if self.lost is None:
            self.lost = lost, now
        elif now - self.lost[1] > LOST_PEER_S:
            self.abort("failed", self.lost[0], INTERNAL)

    def heartbeat(self) -> None:
        """Touch the run lock and write the run state."""
        if self.lock is not None:
            self.lock.touch()
        if self.run_state is not None:
            self.run_state.write()

    def abort(self, state: str, reason: str, exit_status: int) -> None:
        """End this process and its children after reporting the reason and the stacks. Does not return."""
        exit_later(FORCED_EXIT_S)
        try:
            text = f"rank {self.rank}: {reason}"
            with contextlib.suppress(OSError):  # e.g. a closed terminal
                print(f"megafp8: {text}{self.dump_stacks(text)}", file=sys.__stderr__, flush=True)
            if self.run_state is not None:
                self.run_state.end(state, text, exit_status)
            time.sleep(PEER_STACKS_S)
            for child in multiprocessing.active_children():
                child.kill()
            if self.lock is not None:
                self.lock.release()
            for _, process in self.stopped_peers():
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGCONT)  # it then detects the lost peers and ends
        finally:
            os._exit(exit_status)

    def dump_stacks(self, text: str) -> str:
        """Write the stacks of all threads to the run's folder, else to standard error; return where they are."""
        if self.run_state is not None:
            with contextlib.suppress(OSError):
                path = self.run_state.folder / STACKS_FOLDER / f"rank{self.rank}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "a", encoding="utf-8") as stream:
                    print(f"{utc_now()} {text}", file=stream, flush=True)
                    faulthandler.dump_traceback(file=stream, all_threads=True)
                return f"; stacks: {path}"
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        return ""


class Phase(NamedTuple):
    """What the training thread is doing.

    Attributes:
        name: `STEP`, `EVALUATION`, or another name.
        step: training step that it belongs to.
        began: time by the clock.
    """

    name: str
    step: Optional[int]
    began: float


class PhaseClock:
    """Measures the current phase of a rank. The training thread enters phases; the watchdog thread reads.

    Args:
        step_limit_s: of a step or an evaluation batch; None: from recent durations; 0: none.
        other_limit_s: of other phases except the start, such as a save; 0: none.
        clock: monotonic, in seconds.
    """

    def __init__(
        self, step_limit_s: Optional[float], other_limit_s: float, clock: Callable[[], float] = time.monotonic
    ):
        self.step_limit_s, self.other_limit_s, self.clock = step_limit_s, other_limit_s, clock
        self.current = Phase(START, None, clock())
        self.excluded_s = 0.0
        self.recent = {name: deque[float](maxlen=NUM_RECENT) for name in (STEP, EVALUATION)}

    def enter(self, name: str, step: Optional[int] = None) -> None:
        """Enter a phase and end the previous one."""
        before, now = self.current, self.clock()
        if before.name in self.recent:
            self.recent[before.name].append(now - before.began)
        self.current, self.excluded_s = Phase(name, step, now), 0.0

    def expect_longer_steps(self, factor: float) -> None:
        """Scale the recent durations of steps, since the following ones take so many times as long."""
        self.recent[STEP] = deque((factor * seconds for seconds in self.recent[STEP]), maxlen=NUM_RECENT)

    def exclude(self, seconds: float) -> None:
        """Exclude time during which the process was stopped."""
        self.excluded_s += seconds

    def limit_s(self, name: str) -> Optional[float]:
        """Return the limit of a phase; None without a limit."""
        recent = self.recent.get(name)
        if name == START:
            return None
        if recent is None:
            return self.other_limit_s or None
        if self.step_limit_s is not None:
            return self.step_limit_s * (1.0 if recent else FIRST_FACTOR) or None
        return max(AUTO_MIN_S, AUTO_FACTOR * max(recent)) if recent else FIRST_LIMIT_S

    def left_s(self) -> Optional[float]:
        """Return the seconds until the current phase exceeds its limit; None without a limit."""
        current = self.current
        limit_s = self.limit_s(current.name)
        return None if limit_s is None else current.began + self.excluded_s + limit_s - self.clock()

    def __str__(self) -> str:
        name, step, began = self.current
        where = name if step is None else f"{name} {step}" if name in (STEP, AFTER_STEP) else f"{name} at step {step}"
        return f"{where}, for {self.clock() - began:.1f} s"
