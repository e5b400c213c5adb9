"""What became of a run: the file that launchers go by.

torchrun's exit status is 1 whatever its ranks say, so a run writes its state into its folder, whole or not at all:

| state | what it means |
|---|---|
| `running` | it runs, as far as it could still tell |
| `done` | the last step is done and saved |
| `stopped` | it ended before, as flags asked it to (`--exit-interval`, `--exit-duration-in-mins`) |
| `preempted` | a signal ended it; start it again |
| `failed` | it ended with an error: `reason` and `exit_status` say which |
| `died` | never in the file: a reader says it of a run that is `running` there, and whose process is gone |

The run's side of `run_state.json`: rank 0 writes it while the run goes on, and whoever ends first says why.
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

from megafp8.errors import HUNG, INTERNAL
from megafp8.utils.best_effort import Outage
from megafp8.utils.files import UnreadableFile, atomic_write_json, open_regular
from megafp8.utils.process import Process, this_process
from megafp8.utils.strict_json import parse_json, read_json

RUN_STATE_FILE = "run_state.json"
RECORDS_FILE = "records.jsonl"
# Beyond what a machine may be slow, and its clock be wrong.
SILENT_S = 300.0
TAIL_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class RunState:
    """One start of a run.

    Attributes:
        step: last step done; that of the loaded checkpoint in the beginning. Up to a few seconds old while it runs.
        saved_step: of the newest checkpoint; None without one.
        last_step: where the run will be done.
        reason: why it ended, in words.
        exit_status: what its ranks ended with; None while it runs.
        process: rank 0, or whoever had the last word.
        starts: how often this run was started in its folder, this time included.
        started_at, first_step_at, updated_at: seconds since 1970 by rank 0's clock; the second when the first step of
            this start was done.
        evaluation_due: a step after which a validation was broken off; a run that goes on from there does it again.
        loading: step of a checkpoint that is being loaded; it stays when the load kills the run.
        loads: how often in a row that was begun.
        crashes: starts in a row before this one that crashed and saved nothing.
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
        """What stands in the file."""
        return dataclasses.asdict(self)

    @property
    def has_crashed(self) -> bool:
        """Whether it ended in a way that no flag, no file and no signal explains."""
        return self.state == "died" or (self.state == "failed" and self.exit_status in (INTERNAL, HUNG))

    def is_of(self, other: "Optional[RunState]") -> bool:
        """Whether both are of the same start."""
        return other is not None and (self.starts, self.started_at) == (other.starts, other.started_at)


def read_run_state(folder: Path) -> Optional[RunState]:
    """What the file of a run's folder says; None when it has none that can be read."""
    try:
        plain = read_json(folder / RUN_STATE_FILE)
        names = {field.name for field in dataclasses.fields(RunState)}
        known = {name: value for name, value in plain.items() if name in names}  # a newer one may say more
        return RunState(**known | {"process": Process(**plain["process"])})
    except (UnreadableFile, TypeError, KeyError, AttributeError):
        return None


def current_state(folder: Path) -> Optional[RunState]:
    """The state of a run, with `died` for one that can say nothing more; None when none ever began in the folder.

    On another machine a run counts as dead when it has been silent for `SILENT_S`.
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
        found, state="died", reason=f"{found.process} ended without a word, last heard of {silent_s:.0f} s ago"
    )


def finished_state(folder: Path) -> Optional[RunState]:
    """The state of a run that has made its last step and saved; None of any other."""
    known = read_run_state(folder)
    return known if known is not None and known.state == "done" else None


def last_recorded_step(folder: Path) -> int:
    """The newest step in a run's records, which are newer than its state; 0 without any."""
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
            continue  # half a line
        if isinstance(record, dict) and record.get("kind") == "step":
            return int(record["step"])
    return 0


# A rank that ends by force does not wait longer for one that is writing to a disk that hangs.
JOURNAL_TIMEOUT_S = 2.0


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
        is_ours = self.lock.acquire(timeout=JOURNAL_TIMEOUT_S)
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
    before, now = current_state(folder), time.time()
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
