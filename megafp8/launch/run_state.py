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
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.errors import HUNG, INTERNAL
from megafp8.launch.process import Process
from megafp8.utils.small_files import UnreadableFile, open_regular
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


def judge(folder: Path) -> Optional[RunState]:
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
