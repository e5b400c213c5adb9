"""The run state file `run_state.json`, by which launchers decide what to do with a run.

torchrun's exit status is 1 for any failure of its ranks, so a run writes its state atomically into its folder:

| state | meaning |
|---|---|
| `running` | it runs, as far as it was last able to write |
| `done` | the last step is done and saved |
| `stopped` | flags ended it earlier (`--exit-interval`, `--exit-duration-in-mins`) |
| `preempted` | a signal ended it; start it again |
| `failed` | it ended with an error: see `reason` and `exit_status` |
| `died` | never in the file: readers report it for a `running` state whose process is gone |

Rank 0 writes the state while the run is active. The first rank that ends records the reason.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.errors import HUNG, INTERNAL, NumericsError
from megafp8.utils.best_effort import Outage
from megafp8.utils.files import UnreadableFile, atomic_write_json, open_regular
from megafp8.utils.process import Process, current_process
from megafp8.utils.strict_json import parse_json, read_json

RUN_STATE_FILE = "run_state.json"
RECORDS_FILE = "records.jsonl"
# Tolerance for slow machines and clock differences.
SILENT_S = 300.0
TAIL_BYTES = 1 << 16
# A rank that is being aborted does not wait longer for a thread whose write hangs.
LOCK_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of one start of a run.

    Attributes:
        step: last step done; initially that of the loaded checkpoint. A few seconds old while the run is active.
        saved_step: of the newest checkpoint; None without one.
        last_step: at which the run is done.
        reason: why it ended, as text.
        exit_status: of its ranks; None while it runs.
        process: rank 0, or the rank that recorded the end.
        starts: number of starts of this run in its folder, including this one.
        started_at, first_step_at, updated_at: seconds since 1970 by rank 0's clock; `first_step_at` when the first step
            of this start was done.
        evaluation_due: step after which an evaluation was interrupted; a run that resumes from it repeats it.
        loading: step of a checkpoint that is being loaded; it remains if the load crashes the run.
        loads: consecutive starts that began to load this checkpoint.
        crashes: consecutive previous starts that crashed without saving.
    """

    state: str
    step: int = 0
    saved_step: Optional[int] = None
    last_step: Optional[int] = None
    reason: str = ""
    exit_status: Optional[int] = None
    world_size: int
    process: Process
    starts: int = 1
    started_at: float
    first_step_at: Optional[float] = None
    updated_at: float
    evaluation_due: Optional[int] = None
    loading: Optional[int] = None
    loads: int = 0
    crashes: int = 0

    def to_plain(self) -> dict[str, Any]:
        """Return the content of the file."""
        return dataclasses.asdict(self)

    @property
    def has_crashed(self) -> bool:
        """Whether no flag, file or signal explains its end."""
        return self.state == "died" or (self.state == "failed" and self.exit_status in (INTERNAL, HUNG))

    def is_of(self, other: "Optional[RunState]") -> bool:
        """Return whether both states are of the same start."""
        return other is not None and (self.starts, self.started_at) == (other.starts, other.started_at)


def read_run_state(folder: Path) -> Optional[RunState]:
    """Read a run's state; None if there is no readable file."""
    try:
        plain = read_json(folder / RUN_STATE_FILE)
        names = {field.name for field in dataclasses.fields(RunState)}
        known = {name: value for name, value in plain.items() if name in names}  # a newer version may write more
        return RunState(**known | {"process": Process(**plain["process"])})
    except (UnreadableFile, TypeError, KeyError, AttributeError):
        return None


def current_state(folder: Path) -> Optional[RunState]:
    """Return a run's state, or `died` if its process is gone; None if there is no state.

    A run on another machine counts as dead when its state is older than `SILENT_S`.
    """
    found = read_run_state(folder)
    if found is None or found.state != "running":
        return found
    is_alive = found.process.is_alive()
    silent_s = time.time() - found.updated_at
    if is_alive is None:
        is_alive = silent_s < SILENT_S
    if is_alive:
        return found
    return dataclasses.replace(
        found, state="died", reason=f"{found.process} ended without an error message, last update {silent_s:.0f} s ago"
    )


def finished_state(folder: Path) -> Optional[RunState]:
    """Return the state of a run that is done; None for other runs."""
    known = read_run_state(folder)
    return known if known is not None and known.state == "done" else None


def has_diverged(folder: Path) -> bool:
    """Whether a run ended with non-finite numbers, which is a result for those that compare runs."""
    known = current_state(folder)
    return known is not None and known.exit_status == NumericsError.exit_status


def last_recorded_step(folder: Path) -> int:
    """Return the last step in a run's records, which are newer than its state; 0 without records."""
    try:
        with open_regular(folder / RECORDS_FILE) as stream:
            stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
            lines = stream.read().split(b"\n")
    except (UnreadableFile, OSError):
        return 0
    for line in reversed(lines):
        try:
            record = parse_json(line)
        except UnreadableFile:
            continue  # a partially written line
        if isinstance(record, dict) and record.get("kind") == "step":
            return int(record["step"])
    return 0


class RunStateWriter:
    """Writes the state of this start, as one rank knows it.

    Args:
        state: initial state, the same on all ranks.
        is_writer: this is rank 0.
        finished: state of a previous start that was done, until this start resumes; otherwise None.
    """

    def __init__(self, folder: Path, state: RunState, is_writer: bool, finished: Optional[RunState] = None):
        self.folder, self.state, self.is_writer, self.finished = folder, state, is_writer, finished
        self.lock = threading.Lock()
        self.outage = Outage(str(folder / RUN_STATE_FILE), "states")

    def begin(self) -> None:
        """On rank 0: replace the previous start's state."""
        if self.is_writer:
            self.store(self.state)

    def update(self, **changes: Any) -> None:
        """Change fields, to be written by the next `write`."""
        self.state = dataclasses.replace(self.state, **changes)

    def write(self) -> None:
        """On rank 0: write the state, unless the run's end is recorded. Disk errors do not stop the run."""
        if not self.is_writer:
            return
        with self.lock:
            if not self.has_ended():
                self.store(dataclasses.replace(self.state, updated_at=time.time()))

    def end(self, state: str, reason: str, exit_status: int) -> None:
        """On any rank: record how the run ended. The first record wins, since later failures follow from it.

        A signal may come before this start has found that no step is left, as in a search for a micro batch size. The
        run then stays done.
        """
        if state == "preempted" and self.has_no_step_left():
            self.restore_finished()
            return
        with self.locked():
            self.update(state=state, reason=reason, exit_status=exit_status)
            if not self.has_ended():
                known = read_run_state(self.folder) or self.state
                newest = self.state if self.is_writer or not known.is_of(self.state) else known
                ended: dict[str, Any] = {"state": state, "reason": reason, "exit_status": exit_status}
                self.store(dataclasses.replace(newest, **ended, process=current_process(), updated_at=time.time()))

    def restore_finished(self) -> None:
        """On any rank: restore the state of the previous start, because this one has done nothing."""
        assert self.finished is not None
        with self.locked():
            if not self.has_ended():
                self.store(self.finished)

    def has_no_step_left(self) -> bool:
        """Return whether this start has not resumed yet and has no step to do."""
        last_step = self.state.last_step
        return self.finished is not None and last_step is not None and self.finished.step >= last_step

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other writers of this process, unless that takes too long."""
        is_acquired = self.lock.acquire(timeout=LOCK_TIMEOUT_S)
        try:
            yield
        finally:
            if is_acquired:
                self.lock.release()

    def has_ended(self) -> bool:
        """Return whether some rank has recorded the end of this start or restored the previous state."""
        known = read_run_state(self.folder)
        if known is None:
            return False
        return known.is_of(self.finished) or (known.is_of(self.state) and known.state != "running")

    def store(self, state: RunState) -> None:
        """Write the file atomically. A state that the disk refuses is dropped: only the newest one matters."""
        try:
            atomic_write_json(self.folder / RUN_STATE_FILE, state.to_plain())
        except OSError as error:
            self.outage.failed(error)
        else:
            self.outage.ended()


def first_state(folder: Path, world_size: int, last_step: Optional[int]) -> RunState:
    """Return the initial state of this start, based on the previous one's. Called on rank 0."""
    before, now = current_state(folder), time.time()
    first = RunState(
        state="running", last_step=last_step, world_size=world_size, process=current_process(), started_at=now,
        updated_at=now,
    )  # fmt: skip
    if before is None:
        return first
    first = dataclasses.replace(
        first,
        step=before.step,
        saved_step=before.saved_step,
        starts=before.starts + 1,
        evaluation_due=before.evaluation_due,
    )
    if not before.has_crashed:
        return first
    return dataclasses.replace(first, loading=before.loading, loads=before.loads, crashes=before.crashes + 1)
