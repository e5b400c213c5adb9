"""A pool of training runs as local processes: each with its own GPUs and output file, a limited number at a time.

A run that fails does not affect the others. A stop signal is forwarded to all running processes, so that every run can
save, and no new run starts after it.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Optional

from megafp8.errors import INTERNAL
from megafp8.resilience.run_state import RunState, current_state, last_recorded_step
from megafp8.utils.process import STOP_SIGNALS, handled_stop_signals, set_parent_death_signal

OUTPUT_FILE = "output.log"
POLL_S = 0.3
TAIL_LINES = 15


def training_command(script: Path, ranks: int, flags: Sequence[str]) -> tuple[str, ...]:
    """The command that trains on so many ranks of this machine."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks > 1 else ()
    return (sys.executable, *launcher, str(script), *flags)


@dataclass(frozen=True, kw_only=True)
class PooledRun:
    """A run to start.

    Attributes:
        folder: its --save.
        gpus: number of GPUs that it needs.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    gpus: int = 1


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        state: the run state that this start left; None if the process ended before the run began, as with wrong flags.
        returned: exit status of the process; negative for a signal. torchrun's is 1 whatever its ranks return.
        seconds: duration of the process.
        tail: the last lines of its output; empty if the run is done.
    """

    run: PooledRun
    state: Optional[RunState]
    returned: int
    seconds: float
    tail: str

    @property
    def is_done(self) -> bool:
        """Whether the run has done its last step and saved."""
        return self.state is not None and self.state.state == "done"

    @property
    def is_stopped(self) -> bool:
        """Whether only a signal ended the run, so that the same command resumes it."""
        if self.state is None:
            return -self.returned in STOP_SIGNALS
        return self.state.state == "preempted"

    @property
    def exit_status(self) -> int:
        """Exit status of the ranks if they recorded one, else of the process."""
        status = (self.state is not None and self.state.exit_status) or self.returned
        return status if status >= 0 else INTERNAL

    @property
    def reason(self) -> str:
        """Why the run ended; empty if it is done."""
        if self.state is None:
            end = f"status {self.returned}" if self.returned >= 0 else f"signal {-self.returned}"
            return f"its command ended with {end} before the run started"
        if self.is_done:
            return ""
        detail = self.state.reason and f": {self.state.reason}"
        return f"{self.state.state} at step {self.state.step}, status {self.exit_status}{detail}"


@dataclass(frozen=True, kw_only=True)
class _RunningProcess:
    """A run in progress.

    Attributes:
        before: the run state of the previous start.
        output_bytes: size of the output file before this start.
    """

    run: PooledRun
    gpus: tuple[str, ...]
    before: Optional[RunState]
    output_bytes: int
    started_at: float
    process: subprocess.Popen


class ProcessPool:
    """Starts runs in order, each as soon as enough GPUs are free.

    Args:
        parallel: maximum number of runs at a time.
        gpus: entries for CUDA_VISIBLE_DEVICES, at least as many as the largest run needs. Empty: runs inherit it.
        on_start: called with a run and its GPUs before the run starts.
        on_end: called when a run has ended.
        on_steps: called several times a second with the last step of every running run, by name.
        is_due: called before a start; a run that is no longer due is skipped.
    """

    def __init__(
        self,
        parallel: int,
        gpus: Sequence[str] = (),
        *,
        on_start: Callable[[PooledRun, Sequence[str]], None],
        on_end: Callable[[RunOutcome], None],
        on_steps: Optional[Callable[[Mapping[str, int]], None]] = None,
        is_due: Callable[[PooledRun], bool] = lambda run: True,
    ):
        self.parallel, self.has_gpus, self.free = parallel, bool(gpus), list(gpus)
        self.on_start, self.on_end, self.on_steps, self.is_due = on_start, on_end, on_steps, is_due
        self.is_stopping = self._must_forward = False
        self._running: list[_RunningProcess] = []

    def run(self, runs: Sequence[PooledRun]) -> list[RunOutcome]:
        """Run all, and return the outcome of every started run, in the order of their ends."""
        handlers = {number: signal.signal(number, self._on_signal) for number in handled_stop_signals()}
        try:
            return self._run(runs)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _run(self, runs: Sequence[PooledRun]) -> list[RunOutcome]:
        waiting, outcomes = deque(runs), []
        while self._running or (waiting and not self.is_stopping):
            while waiting and not self.is_stopping and len(self._running) < self.parallel:
                if self.has_gpus and waiting[0].gpus > len(self.free):
                    break
                run = waiting.popleft()
                if self.is_due(run):
                    self._start(run)
            if self._must_forward:
                self._must_forward = False
                for running in self._running:
                    running.process.terminate()
            if self.on_steps is not None:
                self.on_steps({running.run.name: last_recorded_step(running.run.folder) for running in self._running})
            time.sleep(POLL_S if self._running else 0)
            for ended in [running for running in self._running if running.process.poll() is not None]:
                self._running.remove(ended)
                self.free += ended.gpus
                outcomes.append(build_outcome(ended))
                self.on_end(outcomes[-1])
        return outcomes

    def _start(self, run: PooledRun) -> None:
        """Start a run, appending its output to the file in its folder."""
        environment, gpus = dict(os.environ), tuple[str, ...]()
        if self.has_gpus:
            gpus, self.free = tuple(self.free[: run.gpus]), self.free[run.gpus :]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self.on_start(run, gpus)
        before, output, started_at = current_state(run.folder), run.folder / OUTPUT_FILE, time.monotonic()
        output_bytes = output.stat().st_size if output.exists() else 0
        run.folder.mkdir(parents=True, exist_ok=True)
        # In its own session, so that a Ctrl-C reaches only this process, which forwards it once. With a parent death
        # signal, because otherwise the run would survive a SIGKILL of this process.
        end = functools.partial(set_parent_death_signal, signal.SIGTERM, os.getpid())
        with open(output, "ab") as stream:
            process = subprocess.Popen(
                run.command, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=end,
            )  # fmt: skip
        self._running.append(_RunningProcess(
            run=run, gpus=gpus, before=before, output_bytes=output_bytes, started_at=started_at, process=process
        ))  # fmt: skip

    def _on_signal(self, number: int, frame: Optional[FrameType]) -> None:
        """Only set flags: the signal may arrive while a run is being started and is not in the list yet."""
        self.is_stopping = self._must_forward = True


def build_outcome(ended: _RunningProcess) -> RunOutcome:
    """The outcome of a run whose process has ended."""
    state, tail = current_state(ended.run.folder), ""
    if state is not None and state.is_of(ended.before):
        state = None  # this start has not written one
    if state is None or state.state != "done":
        with open(ended.run.folder / OUTPUT_FILE, "rb") as output:
            output.seek(ended.output_bytes)
            tail = "\n".join(output.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
    return RunOutcome(
        run=ended.run, state=state, returned=ended.process.returncode, seconds=time.monotonic() - ended.started_at,
        tail=tail,
    )  # fmt: skip
