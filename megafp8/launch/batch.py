"""Many runs, some at a time: each on its own devices, its output in its folder, its end read from its state.

One run that fails takes no other with it. A signal to the process that runs the batch is passed on, so that every run
can save; no new one starts after it.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Optional

from megafp8.launch.process import end_with_parent
from megafp8.launch.run_state import judge, last_recorded_step

OUTPUT_FILE = "output.log"
POLL_S = 0.3
TAIL_LINES = 15
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: the whole command, and the folder that is its --save."""

    name: str
    command: tuple[str, ...]
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended. `reason` is empty when it is done; `tail` is the end of its output when it is not."""

    job: Job
    is_done: bool
    reason: str
    tail: str
    seconds: float


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
            preexec_fn=functools.partial(end_with_parent, signal.SIGTERM),  # a killed starter tells nobody
        )


def is_done(folder: Path) -> bool:
    """Whether the run of a folder has made its last step and saved."""
    state = judge(folder)
    return state is not None and state.state == "done"


class Batch:
    """Runs jobs in their order, each as soon as a slot is free.

    Args:
        slots: for each run that may go on at a time, what its environment has beside this process's own.
        tell_start, tell_end: called when a run begins and ends.
        tell_steps: called several times a second with the last step of every run that goes on, by name.
    """

    def __init__(
        self,
        slots: Sequence[Mapping[str, str]],
        *,
        tell_start: Callable[[Job], None],
        tell_end: Callable[[Outcome], None],
        tell_steps: Callable[[Mapping[str, int]], None],
    ):
        self.slots, self.tell_start, self.tell_end, self.tell_steps = list(slots), tell_start, tell_end, tell_steps
        self.asked: Optional[int] = None
        self._running: dict[int, _Running] = {}

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Run all jobs and return how each of those that started ended, in the order of their ends."""
        before = {number: signal.signal(number, self._forward) for number in FORWARDED}
        try:
            return self._run(jobs)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self, jobs: Sequence[Job]) -> list[Outcome]:
        waiting, outcomes = list(jobs), []
        while self._running or (waiting and self.asked is None):
            for slot in range(len(self.slots)):
                if slot not in self._running and waiting and self.asked is None:
                    job = waiting.pop(0)
                    self.tell_start(job)
                    self._running[slot] = _Running(job, self.slots[slot])
            self.tell_steps({run.job.name: last_recorded_step(run.job.folder) for run in self._running.values()})
            time.sleep(POLL_S)
            for slot, run in list(self._running.items()):
                if run.process.poll() is not None:
                    del self._running[slot]
                    outcomes.append(run.outcome())
                    self.tell_end(outcomes[-1])
        return outcomes

    def _forward(self, number: int, frame: Optional[FrameType]) -> None:
        """Have all runs save and end; those that came since the last signal, too."""
        self.asked = number
        for run in list(self._running.values()):
            run.process.send_signal(signal.SIGTERM)


class _Running:
    """A run that goes on."""

    def __init__(self, job: Job, environment: Mapping[str, str]):
        self.job, self.began = job, time.monotonic()
        self.before, output = judge(job.folder), job.folder / OUTPUT_FILE
        self.offset = output.stat().st_size if output.exists() else 0
        self.process = start_run(job.command, job.folder, {**os.environ, **environment})

    def outcome(self) -> Outcome:
        """How it ended; its process has."""
        state, status = judge(self.job.folder), self.process.returncode
        done, reason, tail = False, "", ""
        # The state is the judge: torchrun's status is 1 whatever its ranks say.
        if state is None or state.is_of(self.before):
            reason = f"its command ended with status {status} before the run began"
        elif state.state == "done":
            done = True
        else:
            reason = f"{state.state} at step {state.step}, status {status}" + (state.reason and f": {state.reason}")
        if not done:
            with open(self.job.folder / OUTPUT_FILE, "rb") as output:
                output.seek(self.offset)
                tail = "\n".join(output.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
        return Outcome(
            job=self.job, is_done=done, reason=reason, tail=tail, seconds=time.monotonic() - self.began
        )
