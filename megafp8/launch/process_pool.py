"""Many runs, some at a time: each on GPUs of its own, its output in its folder, its end read from its state.

One run that fails takes no other with it. A signal to the process that runs the batch is passed on, so that every run
can save; no new one starts after it.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Optional

from megafp8.errors import INTERNAL
from megafp8.resilience.run_state import RunState, current_state, last_recorded_step
from megafp8.utils.process import STOP_SIGNALS, end_with_parent, heeded_stop_signals

OUTPUT_FILE = "output.log"
POLL_S = 0.3
TAIL_LINES = 15


@dataclass(frozen=True, kw_only=True)
class BatchRun:
    """One run.

    Attributes:
        name: for people.
        command: the whole of it.
        folder: its --save.
        gpus: that it takes where the batch has GPUs.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    gpus: int = 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        state: what this start of it left; None when its process ended before the run began, with wrong flags say.
        returned: exit status of its process; below 0 the signal that ended it. torchrun's is 1 whatever its ranks say.
        seconds: that its process took.
        tail: the end of its output; empty when it is done.
    """

    run: BatchRun
    state: Optional[RunState]
    returned: int
    seconds: float
    tail: str

    @property
    def is_done(self) -> bool:
        """Whether it has made its last step and saved."""
        return self.state is not None and self.state.state == "done"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal ended it, and nothing else: the same command goes on."""
        if self.state is None:
            return -self.returned in STOP_SIGNALS
        return self.state.state == "preempted"

    @property
    def exit_status(self) -> int:
        """That of its ranks, as far as they left one."""
        status = (self.state is not None and self.state.exit_status) or self.returned
        return status if status >= 0 else INTERNAL

    @property
    def reason(self) -> str:
        """Why it ended; empty when it is done."""
        if self.state is None:
            how = f"status {self.returned}" if self.returned >= 0 else f"signal {-self.returned}"
            return f"its command ended with {how} before the run began"
        if self.is_done:
            return ""
        return f"{self.state.state} at step {self.state.step}, status {self.exit_status}" + (
            self.state.reason and f": {self.state.reason}"
        )


@dataclass(frozen=True, kw_only=True)
class _Active:
    """A run whose process goes on; `before` is the state of the start before this one."""

    run: BatchRun
    gpus: tuple[str, ...]
    before: Optional[RunState]
    output_bytes: int
    began: float
    process: subprocess.Popen


def start_run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.Popen:
    """Start a run in a session of its own, its output behind what the folder has; it ends with this process.

    Args:
        environment: all of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / OUTPUT_FILE, "ab") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C comes once, from here
            preexec_fn=functools.partial(end_with_parent, signal.SIGTERM, os.getpid()),  # a killed starter tells nobody
        )


class Batch:
    """Runs what is due, in its order, each as soon as there is room for it; none overtakes another.

    Args:
        parallel: runs at a time.
        gpus: what CUDA_VISIBLE_DEVICES may name: at least as many as the largest run takes. Empty: runs have what this
            process has.
        tell_start, tell_end: called when a run begins, with its GPUs, and when it ends.
        tell_steps: called several times a second with the last step of every run that goes on, by name; without it no
            records are read.
        is_due: asked before a start; one that is not due any more is passed over.
    """

    def __init__(
        self,
        parallel: int,
        gpus: Sequence[str] = (),
        *,
        tell_start: Callable[[BatchRun, Sequence[str]], None],
        tell_end: Callable[[Outcome], None],
        tell_steps: Optional[Callable[[Mapping[str, int]], None]] = None,
        is_due: Callable[[BatchRun], bool] = lambda run: True,
    ):
        self.parallel, self.has_gpus, self.free = parallel, bool(gpus), list(gpus)
        self.tell_start, self.tell_end, self.tell_steps, self.is_due = tell_start, tell_end, tell_steps, is_due
        self.is_asked_to_stop = self._has_signal = False
        self._active: list[_Active] = []

    def run(self, runs: Sequence[BatchRun]) -> list[Outcome]:
        """Run all, and return how each of those that started ended, in the order of their ends."""
        before = {number: signal.signal(number, self._note) for number in heeded_stop_signals()}
        try:
            return self._run(runs)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self, runs: Sequence[BatchRun]) -> list[Outcome]:
        waiting, outcomes = deque(runs), []
        while self._active or (waiting and not self.is_asked_to_stop):
            while waiting and not self.is_asked_to_stop and self._has_room(waiting[0]):
                run = waiting.popleft()
                if self.is_due(run):
                    self._start(run)
            self._pass_on()
            if self.tell_steps is not None:
                self.tell_steps({one.run.name: last_recorded_step(one.run.folder) for one in self._active})
            time.sleep(POLL_S if self._active else 0)
            for one in [one for one in self._active if one.process.poll() is not None]:
                self._active.remove(one)
                self.free += one.gpus
                outcomes.append(outcome_of(one))
                self.tell_end(outcomes[-1])
        return outcomes

    def _has_room(self, run: BatchRun) -> bool:
        return len(self._active) < self.parallel and (not self.has_gpus or run.gpus <= len(self.free))

    def _start(self, run: BatchRun) -> None:
        environment, gpus = dict(os.environ), tuple[str, ...]()
        if self.has_gpus:
            gpus, self.free = tuple(self.free[: run.gpus]), self.free[run.gpus :]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self.tell_start(run, gpus)
        before, output, began = current_state(run.folder), run.folder / OUTPUT_FILE, time.monotonic()
        output_bytes = output.stat().st_size if output.exists() else 0
        process = start_run(run.command, run.folder, environment)
        self._active.append(_Active(
            run=run, gpus=gpus, before=before, output_bytes=output_bytes, began=began, process=process
        ))  # fmt: skip

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        """Start nothing more; what runs saves and ends. The loop does it: a signal comes amid anything, such as the
        start of a run that is in no list yet."""
        self.is_asked_to_stop = self._has_signal = True

    def _pass_on(self) -> None:
        """Hand a signal that came to all that runs."""
        if self._has_signal:
            self._has_signal = False
            for one in self._active:
                one.process.terminate()


def outcome_of(one: _Active) -> Outcome:
    """How a run ended whose process has."""
    found, tail = current_state(one.run.folder), ""
    state = None if found is None or found.is_of(one.before) else found
    if state is None or state.state != "done":
        with open(one.run.folder / OUTPUT_FILE, "rb") as output:
            output.seek(one.output_bytes)
            tail = "\n".join(output.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
    return Outcome(
        run=one.run, state=state, returned=one.process.returncode, seconds=time.monotonic() - one.began, tail=tail
    )
