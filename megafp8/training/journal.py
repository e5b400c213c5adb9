"""The run's side of `run_state.json`: rank 0 writes it while the run goes on, and whoever ends first says why."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

from megafp8.data.atomic import atomic_write_json
from megafp8.launch.process import this_process
from megafp8.launch.run_state import RUN_STATE_FILE, RunState, judge, read_run_state
from megafp8.utils.best_effort import Outage

# A rank that ends by force does not wait longer for one that is writing to a disk that hangs.
PATIENCE_S = 2.0


class Journal:
    """The state of this start of a run, as one rank knows it.

    Args:
        state: at the start, the same on all ranks.
        is_writer: this is rank 0.
        finished: the state of a run that is done, until this start has something to do with it; None of others.
    """

    def __init__(self, folder: Path, state: RunState, is_writer: bool, finished: Optional[RunState] = None):
        self.folder, self.state, self.is_writer, self.finished = folder, state, is_writer, finished
        self.lock = threading.Lock()
        self.outage = Outage(str(folder / RUN_STATE_FILE), "states")

    def begin(self) -> None:
        """Rank 0: put the first state of this start in the place of the last one's."""
        if self.is_writer:
            self.put(self.state)

    def note(self, **changes: Any) -> None:
        """Change fields, to be written with the next `write`."""
        self.state = dataclasses.replace(self.state, **changes)

    def write(self) -> None:
        """Rank 0: put the state on the disk, unless the run has ended there. A disk that fails stops no run."""
        if not self.is_writer:
            return
        with self.lock:
            if not self.has_ended():
                self.put(dataclasses.replace(self.state, updated_at=time.time()))

    def end(self, state: str, reason: str, exit_status: int) -> None:
        """Any rank: say how it ended. The first one has the last word: what comes after follows from it.

        A signal leaves a run done that has no step left: it may come before this start finds that out, as in a search
        for a micro batch size.
        """
        if state == "preempted" and self.has_no_step_left():
            self.take_back()
            return
        with self.held():
            self.note(state=state, reason=reason, exit_status=exit_status)
            if not self.has_ended():
                known = read_run_state(self.folder) or self.state
                newest = self.state if self.is_writer or not known.is_of(self.state) else known
                ended = {"state": state, "reason": reason, "exit_status": exit_status}
                self.put(dataclasses.replace(newest, **ended, process=this_process(), updated_at=time.time()))

    def take_back(self) -> None:
        """Any rank: this start came to nothing, and the run is as done as it was before."""
        assert self.finished is not None
        with self.held():
            if not self.has_ended():
                self.put(self.finished)

    def has_no_step_left(self) -> bool:
        """Whether this start, which has not resumed anything yet, has nothing to do."""
        last_step = self.state.last_step
        return self.finished is not None and last_step is not None and self.finished.step >= last_step

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, nobody else in this process writes, unless that takes too long."""
        is_ours = self.lock.acquire(timeout=PATIENCE_S)
        try:
            yield
        finally:
            if is_ours:
                self.lock.release()

    def has_ended(self) -> bool:
        """Whether some rank has said how this start ended, or taken it back."""
        known = read_run_state(self.folder)
        if known is None:
            return False
        return known.is_of(self.finished) or (known.is_of(self.state) and known.state != "running")

    def put(self, state: RunState) -> None:
        """Write the file, whole or not at all. The newest state counts: one that the disk refuses is not kept."""
        try:
            atomic_write_json(self.folder / RUN_STATE_FILE, state.to_plain())
        except OSError as error:
            self.outage.failed(error)
        else:
            self.outage.ended()


def first_state(folder: Path, world_size: int, last_step: Optional[int]) -> RunState:
    """The state with which a start begins, the one before in mind. Rank 0 calls this, and tells the others."""
    before, now = judge(folder), time.time()
    first = RunState(
        state="running", last_step=last_step, world_size=world_size, process=this_process(), started_at=now,
        updated_at=now,
    )  # fmt: skip
    if before is None:
        return first
    after_crash = {"loading": before.loading, "loads": before.loads, "crashes": before.crashes + 1}
    return dataclasses.replace(
        first,
        step=before.step,
        saved_step=before.saved_step,
        starts=before.starts + 1,
        evaluation_due=before.evaluation_due,
        **(after_crash if before.has_crashed else {}),
    )
