"""One run a folder: the lock that it holds while it runs.

The lock is a file that names its holder. It comes into being by a hard link, which on every file system, also on NFS,
one process makes and all others fail to. The holder touches it as a sign of life. A lock is stale when its process is
gone from this machine, or when a process of another machine has given no sign for `STALE_S`; it is then replaced. A
sign that lies in the future says nothing, since clocks are set back: silence is counted from when it was found.
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
from megafp8.utils.process import Process, this_process
from megafp8.utils.strict_json import read_json

LOCK_FILE = "run.lock"
STALE_S = 300.0
TAKEOVER_S = 60.0


@dataclass(frozen=True)
class RunLock:
    """A lock that this process holds.

    Attributes:
        taken_over: words on the stale lock that was in the way.
    """

    path: Path
    holder: Process
    taken_over: Optional[str] = None

    def touch(self) -> None:
        """Give a sign of life."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def release(self) -> None:
        """Let the folder go, if it is still ours."""
        if holder_of(self.path) == self.holder:
            with contextlib.suppress(OSError):  # a disk that is gone took the lock along
                self.path.unlink(missing_ok=True)


def take_lock(folder: Path) -> RunLock:
    """Hold a run's folder, which is made if it is not there.

    Raises:
        RunFolderInUse: another run holds it.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, me = folder / LOCK_FILE, this_process()
    draft = path.with_name(f".{LOCK_FILE}.{me.host}.{me.pid}")
    draft.unlink(missing_ok=True)  # of a killed process of our number; it may be the lock itself
    draft.write_text(json.dumps(dataclasses.asdict(me)) + "\n", encoding="utf-8")
    try:
        taken_over = None
        while not (taken_over or linked(draft, path)):
            os.utime(draft)
            words = check_stale(path, now=draft.stat().st_mtime)  # both times by the file server's clock
            if words is not None:
                taken_over = replace_stale(draft, path, words)
        return RunLock(path, me, taken_over)
    finally:
        draft.unlink(missing_ok=True)


def forget_lock_of(job: str, folder: Path) -> bool:
    """Remove the lock that an earlier start of the same Slurm job left on whichever node; for who starts them, one
    after the other, and knows that it has ended. Without this a node that died would keep the folder for `STALE_S`."""
    holder = holder_of(folder / LOCK_FILE)
    if holder is None or holder.job != job or holder.is_alive():
        return False
    (folder / LOCK_FILE).unlink(missing_ok=True)
    return True


def linked(draft: Path, path: Path) -> bool:
    """Give a file a second name unless another file has it."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    return True


def check_stale(path: Path, now: float) -> Optional[str]:
    """Words on a lock that nobody holds any more; None when there is no lock now.

    Raises:
        RunFolderInUse: somebody holds it.
    """
    try:
        touched = path.stat().st_mtime
    except FileNotFoundError:
        return None
    holder, silent_s = holder_of(path), now - touched
    is_alive = None if holder is None else holder.is_alive()
    if is_alive or (is_alive is None and silent_s < STALE_S):
        if silent_s < 0:
            count_silence_from_now(path)
        raise RunFolderInUse(refusal(path.parent, holder, touched, silent_s))
    how = "is gone" if is_alive is False else f"has given no sign of life for {silent_s / 60:.0f} minutes"
    return f"the lock of {holder or 'a run'}, which {how}, is taken over"


def count_silence_from_now(path: Path) -> None:
    """Give a lock the file server's time. A holder that lives will change it again."""
    with contextlib.suppress(OSError):
        os.utime(path)


def replace_stale(draft: Path, path: Path, words: str) -> Optional[str]:
    """Put our lock in a stale one's place; None when another process is about to, or was faster.

    One process at a time does this, under a second lock: else one of two would replace the other's new lock.
    """
    turn = path.with_name(path.name + ".takeover")
    if not linked(draft, turn):
        with contextlib.suppress(FileNotFoundError):
            # It was killed in these few instructions. In the future: the clock was set back since.
            if abs(draft.stat().st_mtime - turn.stat().st_mtime) > TAKEOVER_S:
                turn.unlink()
        time.sleep(0.05)
        return None
    try:
        if check_stale(path, draft.stat().st_mtime) != words:
            return None
        os.replace(draft, path)
        return words
    finally:
        turn.unlink(missing_ok=True)


def refusal(folder: Path, holder: Optional[Process], touched: float, silent_s: float) -> str:
    """What the second run is told."""
    if silent_s > -1:
        at = datetime.datetime.fromtimestamp(touched, datetime.timezone.utc).isoformat(timespec="seconds")
        sign = f"last sign of life {max(0.0, silent_s):.0f} s ago at {at}"
    else:
        sign = f"last sign of life {-silent_s:.0f} s in the future: a clock was wrong, and silence is counted from now"
    return (
        f"--save {folder} is in use: {holder or 'another run'} holds {LOCK_FILE}, {sign}. Wait for that run or stop "
        f"it, or save to another folder. A run that is gone is taken over at once on its own machine, from another one "
        f"after {STALE_S / 60:.0f} minutes of silence"
    )


def holder_of(path: Path) -> Optional[Process]:
    """Who holds a lock; None if there is none or it cannot be read."""
    try:
        return Process(**read_json(path))
    except (UnreadableFile, TypeError):
        return None
