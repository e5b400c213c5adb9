"""A thread of every rank that sees what the training thread cannot: that it hangs, that a peer died, that time is up.

Signals. A handler in Python runs when the training thread next comes out of C code, which may be never. So the
interpreter also writes the signal's number into a pipe (`signal.set_wakeup_fd`), which this thread reads. The first
signal only asks for an end: the ranks add up who was asked with the totals of a step
(`optimizer/gradient_checks.py`), so that all stop after the same one, save and leave. Another signal a
while later, or the end of the grace, ends the process at once; a checkpoint that is being written then has no name
yet, and the one before counts.

Limits. What the rank does has a limit (`phases.py`). Beyond it the stacks of all threads go to a file, and the process
ends. Should the thread itself get no chance to run, as C code holds the interpreter's lock, a timer of `faulthandler`
ends the process from C, with the stacks on standard error and status 1.

Peers. Ranks of this machine are looked at once a second. When one is gone, the others get a little time to find that
out by themselves and to say so, and then end too.

What a rank is doing and since when, and how long that may take.
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
from megafp8.resilience.run_state import Journal
from megafp8.utils.formatting import utc_now
from megafp8.utils.process import STOPPED, Process, heeded_stop_signals, save_at_end_of_torchrun

URGENT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# torchrun passes a signal on that the ranks may have got already, as members of a process group or of a job.
SAME_S = 5.0
# What is left of the grace when a rank gives up: enough to say so.
MARGIN_S, MARGIN_SHARE = 2.0, 0.1
TICK_S = 1.0
BEAT_S = 10.0
# A tick that comes so late says that the whole process was stopped.
PAUSED_S = 5.0
# After a peer is gone, for the training thread to run into it.
LOST_S = 5.0
# After this rank's stacks are written, for the others to write theirs.
LINGER_S = 2.0
# For what ends a process by force; a disk may hang.
LAST_WORDS_S = 10.0
# Beyond a limit, for this thread to act before the timer in C does.
TIMER_SPARE_S = 15.0
STACKS_FOLDER = "logs/watchdog"


class Guard:
    """Watches over one rank. Without `start` it watches nothing and notes what it is told.

    Args:
        grace_s: from a signal to the kill that is expected after it.
        takes_signals: signals end the run in order; else as Python has it.

    Attributes:
        asked: the signal that this rank got, 0 before.
        stop_agreed: all ranks know that one was asked, and stop at the same place.
        outcome: what the state of the run will be when it has ended in order, and `reason` why.
    """

    def __init__(
        self, phases: Optional[Phases] = None, *, rank: int = 0, grace_s: float = 30.0, takes_signals: bool = True
    ):
        self.phases = phases or Phases(0, 0)
        self.rank, self.grace_s, self.takes_signals = rank, grace_s, takes_signals
        self.asked, self.asked_at, self.stop_agreed = 0, 0.0, False
        self.outcome, self.reason = "done", ""
        self.journal: Optional[Journal] = None
        self.lock: Optional[RunLock] = None
        self.peers: dict[int, Process] = {}
        self.lost: Optional[tuple[int, float]] = None
        self.thread: Optional[threading.Thread] = None
        self.is_closing = False
        self.handlers: dict[int, Any] = {}
        self.last_beat = 0.0

    # ---- for the training thread ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take signals, and start the thread. The main thread calls this."""
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.takes_signals:
            signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
            self.handlers = {number: signal.signal(number, self.take) for number in heeded_stop_signals()}
        self.thread = threading.Thread(target=self.watch, name="guard", daemon=True)
        self.thread.start()

    def attach(self, journal: Optional[Journal], lock: Optional[RunLock], peers: dict[int, Process]) -> None:
        """Say what there is to watch, once the ranks have met.

        Args:
            lock: of rank 0, None on others.
            peers: the other ranks of this machine.
        """
        self.journal, self.lock, self.peers = journal, lock, peers
        save_at_end_of_torchrun()

    def take(self, number: int, frame: Optional[FrameType]) -> None:
        """A signal came."""
        if not self.asked:
            self.asked, self.asked_at = number, time.monotonic()

    def enter(self, name: str, step: Optional[int] = None) -> None:
        """What the training thread begins now."""
        self.phases.enter(name, step)

    def agree(self, num_asked_ranks: float) -> None:
        """What the ranks added up."""
        if num_asked_ranks and not self.stop_agreed:
            self.asked_at = self.asked_at or time.monotonic()
            self.stop_agreed = True

    def step_done(self, step: int) -> None:
        """A step is done; the first of this start is put on record at once."""
        if self.journal is None:
            return
        self.journal.note(step=step)
        if self.journal.state.first_step_at is None:
            self.journal.note(first_step_at=time.time())
            self.journal.write()

    def failed_loads(self, step: int) -> int:
        """How often in a row a start crashed while it loaded a checkpoint of the run's own."""
        state = None if self.journal is None else self.journal.state
        return state.loads if state is not None and state.loading == step else 0

    def loads(self, step: int) -> None:
        """A checkpoint of the run's own is loaded now: on the disk, in case that this is the run's end."""
        if self.journal is not None:
            self.journal.note(loading=step, loads=self.failed_loads(step) + 1)
            self.journal.write()

    def loaded(self) -> None:
        """It did not crash the run."""
        if self.journal is not None:
            self.journal.note(loading=None, loads=0)
            self.journal.write()

    def resumed(self, step: int, is_own: bool) -> None:
        """The run goes on from a checkpoint, of its own folder or of another; at step 0 from none."""
        if self.journal is not None:
            self.journal.note(step=step, saved_step=step if is_own and step else None)
            self.journal.finished = None  # what fails from here on is the run
            self.journal.write()

    def evaluation_left(self, step: Optional[int]) -> None:
        """A validation was broken off after a step; None: it was made."""
        if self.journal is not None:
            self.journal.note(evaluation_due=step)

    def is_evaluation_due(self, step: int) -> bool:
        """Whether the start before broke one off at this step."""
        return self.journal is not None and self.journal.state.evaluation_due == step

    def saved(self, step: int) -> None:
        """A checkpoint is there."""
        if self.journal is not None:
            self.journal.note(saved_step=step, crashes=0)
            self.journal.write()

    @property
    def exit_status(self) -> int:
        """Of a run that has ended in order."""
        return PREEMPTED if self.outcome == "preempted" else 0

    def finish(self) -> None:
        """Put on record that the run has ended in order."""
        if self.journal is not None and self.journal.is_writer:
            self.journal.end(self.outcome, self.reason, self.exit_status)

    def lost_peer(self, wait_s: float = 0.0) -> Optional[str]:
        """Words on a rank of this machine that is gone; None if all are there, or nobody can tell."""
        deadline = time.monotonic() + wait_s
        while True:
            for rank, process in self.peers.items():
                if process.is_alive() is False:
                    return f"rank {rank} ({process}) has ended"
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    def close(self) -> None:
        """Stop watching, and let go of signals and files."""
        if self.thread is None:
            return
        self.is_closing = True
        os.write(self.wake_write, b"\0")
        self.thread.join()
        if self.takes_signals:
            signal.set_wakeup_fd(-1)
            for number in self.handlers:
                signal.signal(number, signal.SIG_IGN)  # the launcher may still send what the run has answered
        os.close(self.wake_read)
        os.close(self.wake_write)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Look around once a second until closed."""
        last_tick = time.monotonic()
        while True:
            ready, _, _ = select.select([self.wake_read], [], [], TICK_S)
            if self.is_closing:
                faulthandler.cancel_dump_traceback_later()
                return
            now = time.monotonic()
            if now - last_tick > PAUSED_S:
                self.phases.excuse(now - last_tick)
            last_tick = now
            if ready:
                for number in os.read(self.wake_read, 64):
                    self.signalled(number, now)
            self.set_timer()
            self.check_time(now)
            self.check_peers(now)
            if now - self.last_beat > BEAT_S:
                self.last_beat = now
                self.beat()

    def signalled(self, number: int, now: float) -> None:
        """The first signal begins the grace; an urgent one that is not its echo ends the process."""
        if number not in self.handlers:
            return
        self.take(number, None)
        if number in URGENT and now - self.asked_at > SAME_S:
            self.end_now("preempted", f"a second {signal.Signals(number).name}; nothing more is saved", PREEMPTED)

    def set_timer(self) -> None:
        """Have C code end the process if this thread cannot run until after the limit."""
        left_s = self.phases.left_s()
        if left_s is None:
            faulthandler.cancel_dump_traceback_later()
            return
        faulthandler.dump_traceback_later(max(left_s, 0.0) + TIMER_SPARE_S, exit=True, file=sys.__stderr__)

    def check_time(self, now: float) -> None:
        """End a rank that takes too long, or whose grace is over."""
        margin_s = min(MARGIN_S, MARGIN_SHARE * self.grace_s)
        if self.asked_at and now > self.asked_at + self.grace_s - margin_s:
            self.end_now(
                "preempted", f"{self.grace_s:g} s after a signal still in {self.phases}: nothing was saved since "
                "(--exit-signal-grace-s; torchrun's --shutdown-timeout)", PREEMPTED,
            )  # fmt: skip
        left_s = self.phases.left_s()
        if left_s is not None and left_s < 0:
            stopped = [f"; rank {rank} ({process}) is stopped" for rank, process in self.stopped_peers()]
            limit_s = self.phases.limit_s(self.phases.present.name)
            self.end_now("failed", f"hangs in {self.phases} (limit {limit_s:g} s){''.join(stopped)}", HUNG)

    def stopped_peers(self) -> list[tuple[int, Process]]:
        """Ranks of this machine that got a SIGSTOP."""
        return [(rank, process) for rank, process in self.peers.items() if process.state() == STOPPED]

    def check_peers(self, now: float) -> None:
        """End, a little later, when another rank of this machine has ended."""
        lost = self.lost_peer()
        if lost is None:
            return
        if self.lost is None:
            self.lost = lost, now
        elif now - self.lost[1] > LOST_S:
            self.end_now("failed", self.lost[0], INTERNAL)

    def beat(self) -> None:
        """Signs of life."""
        if self.lock is not None:
            self.lock.touch()
        if self.journal is not None:
            self.journal.write()

    def end_now(self, state: str, reason: str, exit_status: int) -> None:
        """End this process: say why, leave its stacks, take its children along. It does not return."""
        faulthandler.dump_traceback_later(LAST_WORDS_S, exit=True, file=sys.__stderr__)
        text = f"rank {self.rank}: {reason}"
        with contextlib.suppress(OSError):  # the terminal may be closed
            print(f"megafp8: {text}{self.leave_stacks(text)}", file=sys.__stderr__, flush=True)
        if self.journal is not None:
            self.journal.end(state, text, exit_status)
        time.sleep(LINGER_S)
        for child in multiprocessing.active_children():
            child.kill()
        if self.lock is not None:
            self.lock.release()
        for _, process in self.stopped_peers():
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGCONT)  # now, so that it finds the others gone and does not go on
        os._exit(exit_status)

    def leave_stacks(self, text: str) -> str:
        """Write the stacks of all threads to the run's folder, else to standard error; words on where they are."""
        if self.journal is not None:
            with contextlib.suppress(OSError):
                path = self.journal.folder / STACKS_FOLDER / f"rank{self.rank}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "a", encoding="utf-8") as stream:
                    print(f"{utc_now()} {text}", file=stream, flush=True)
                    faulthandler.dump_traceback(file=stream, all_threads=True)
                return f"; stacks: {path}"
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        return ""


# Before the first step: an index over a large corpus may take hours, and meeting the other ranks has its own timeout.
START = "start"
STEP, EVALUATION, BETWEEN = "step", "evaluation batch", "what follows step"
# The first of a kind compiles kernels and connects ranks.
FIRST_S, FIRST_FACTOR = 1800.0, 5.0
# Without a limit that was asked for: so many times the slowest of the last, and never less than so long.
AUTO_FACTOR, AUTO_LEAST_S, REMEMBERED = 5.0, 120.0, 50


class Phase(NamedTuple):
    """What is being done.

    Attributes:
        name: `step`, `evaluation batch`, or anything else.
        step: the training step that it belongs to.
        began: by the clock.
    """

    name: str
    step: Optional[int]
    began: float


class Phases:
    """The clock of one rank. The training thread enters phases, another thread reads.

    Args:
        step_limit_s: of a step and of a batch of an evaluation; None: from those before; 0: none.
        other_limit_s: of anything else but the start, such as a save; 0: none.
        clock: seconds, never going back.
    """

    def __init__(
        self, step_limit_s: Optional[float], other_limit_s: float, clock: Callable[[], float] = time.monotonic
    ):
        self.step_limit_s, self.other_limit_s, self.clock = step_limit_s, other_limit_s, clock
        self.present = Phase(START, None, clock())
        self.excused_s = 0.0
        self.recent = {name: deque[float](maxlen=REMEMBERED) for name in (STEP, EVALUATION)}

    def enter(self, name: str, step: Optional[int] = None) -> None:
        """Begin something, which ends what was before."""
        before, now = self.present, self.clock()
        if before.name in self.recent:
            self.recent[before.name].append(now - before.began)
        self.present, self.excused_s = Phase(name, step, now), 0.0

    def excuse(self, seconds: float) -> None:
        """Do not count time in which the whole process was stopped."""
        self.excused_s += seconds

    def limit_s(self, name: str) -> Optional[float]:
        """How long something may take; None without a limit."""
        recent = self.recent.get(name)
        if name == START:
            return None
        if recent is None:
            return self.other_limit_s or None
        if self.step_limit_s is not None:
            return self.step_limit_s * (1.0 if recent else FIRST_FACTOR) or None
        return max(AUTO_LEAST_S, AUTO_FACTOR * max(recent)) if recent else FIRST_S

    def left_s(self) -> Optional[float]:
        """Seconds until the present phase has taken too long; None without a limit."""
        present = self.present
        limit_s = self.limit_s(present.name)
        return None if limit_s is None else present.began + self.excused_s + limit_s - self.clock()

    def __str__(self) -> str:
        name, step, began = self.present
        where = name if step is None else f"{name} {step}" if name in (STEP, BETWEEN) else f"{name} at step {step}"
        return f"{where}, for {self.clock() - began:.1f} s"
