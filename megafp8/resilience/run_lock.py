"""The run lock: at most one run writes to a folder.

The lock is a file that names its holder. It is created by a hard link, which is atomic on every file system, including
NFS. The holder touches it as a heartbeat. A lock is stale, and is replaced, when its process is gone from this machine
or when a process on another machine has sent no heartbeat for `STALE_S`. Clocks may be set back, so a heartbeat in the
future is not evidence: the silence is then counted from when it was found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megafp8.errors import RunFolderInUse
from megafp8.utils.files import UnreadableFile
from megafp8.utils.process import Process, current_process
from megafp8.utils.strict_json import read_json

LOCK_FILE = "run.lock"
STALE_S = 300.0
TAKEOVER_S = 60.0


@dataclass(frozen=True)
class RunLock:
    """A lock that this process holds.

    Attributes:
        taken_over: note on the stale lock that was replaced.
    """

    path: Path
    holder: Process
    taken_over: Optional[str] = None

    def touch(self) -> None:
        """Send a heartbeat."""
        touch(self.path)

    def release(self) -> None:
        """Remove the lock if this process still holds it."""
        if read_holder(self.path) == self.holder:
            with contextlib.suppress(OSError):  # e.g. a disk that is gone
                self.path.unlink(missing_ok=True)


def acquire_run_lock(folder: Path) -> RunLock:
    """Lock a run's folder, which is made if absent.

    Raises:
        RunFolderInUse: another run holds the lock.
        OSError: the folder is not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, me = folder / LOCK_FILE, current_process()
    draft = path.with_name(f".{LOCK_FILE}.{me.host}.{me.pid}")
    draft.unlink(missing_ok=True)  # left by a killed process with this PID; it may be a link to the lock
    draft.write_text(json.dumps(dataclasses.asdict(me)) + "\n", encoding="utf-8")
    try:
        taken_over = None
        while not (taken_over or try_link(draft, path)):
            os.utime(draft)
            description = describe_stale_lock(path, now=draft.stat().st_mtime)  # both times are the file server's
            if description is not None:
                taken_over = replace_stale(draft, path, description)
        return RunLock(path, me, taken_over)
    finally:
        draft.unlink(missing_ok=True)


def remove_stale_job_lock(job: str, folder: Path) -> bool:
    """Remove the lock of an earlier start of the same Slurm job or JobSet, which may have run on another node.

    For a launcher that starts them one after the other and knows that it has ended. Otherwise a node that died would
    keep the folder locked for `STALE_S`.
    """
    holder = read_holder(folder / LOCK_FILE)
    if holder is None or holder.job != job or holder.is_alive():
        return False
    (folder / LOCK_FILE).unlink(missing_ok=True)
    return True


def try_link(draft: Path, path: Path) -> bool:
    """Make a hard link; return whether the name was free."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    return True


def describe_stale_lock(path: Path, now: float) -> Optional[str]:
    """Return a note on a stale lock; None if there is no lock.

    Raises:
        RunFolderInUse: the lock is held.
    """
    try:
        touched = path.stat().st_mtime
    except FileNotFoundError:
        return None
    holder, silent_s = read_holder(path), now - touched
    is_alive = None if holder is None else holder.is_alive()
    if is_alive or (is_alive is None and silent_s < STALE_S):
        if silent_s < 0:
            touch(path)  # a live holder touches it again
        raise RunFolderInUse(in_use_message(path.parent, holder, touched, silent_s))
    how = "is gone" if is_alive is False else f"has not updated its lock for {silent_s / 60:.0f} minutes"
    return f"the lock of {holder or 'a run'}, which {how}, is taken over"


def touch(path: Path) -> None:
    """Set a lock's time to the file server's current time."""
    with contextlib.suppress(OSError):
        os.utime(path)


def replace_stale(draft: Path, path: Path, description: str) -> Optional[str]:
    """Replace a stale lock; None if another process was faster or is about to.

    A second lock serializes takeovers: otherwise one of two processes would replace the other's new lock.
    """
    takeover_lock = path.with_name(path.name + ".takeover")
    if not try_link(draft, takeover_lock):
        with contextlib.suppress(FileNotFoundError):
            # Its holder was killed during a takeover. A time in the future means that the clock was set back.
            if abs(draft.stat().st_mtime - takeover_lock.stat().st_mtime) > TAKEOVER_S:
                takeover_lock.unlink()
        time.sleep(0.05)
        return None
    try:
        if describe_stale_lock(path, draft.stat().st_mtime) != description:
            return None
        os.replace(draft, path)
        return description
    finally:
        takeover_lock.unlink(missing_ok=True)


def in_use_message(folder: Path, holder: Optional[Process], touched: float, silent_s: float) -> str:
    """Return the error message for the second run."""
    if silent_s > -1:
        at = datetime.datetime.fromtimestamp(touched, datetime.UTC).isoformat(timespec="seconds")
        sign = f"last sign of life {max(0.0, silent_s):.0f} s ago at {at}"
    else:
        sign = f"last sign of life {-silent_s:.0f} s in the future: a clock was wrong, and silence is counted from now"
    return (
        f"--save {folder} is in use: {holder or 'another run'} holds {LOCK_FILE}, {sign}. Wait for that run or stop "
        f"it, or save to another folder. A run that is gone is taken over at once on its own machine, from another one "
        f"after {STALE_S / 60:.0f} minutes of silence"
    )


def read_holder(path: Path) -> Optional[Process]:
    """Return the holder of a lock; None if there is none or it cannot be read."""
    try:
        return Process(**read_json(path))
    except (UnreadableFile, TypeError):
        return None
