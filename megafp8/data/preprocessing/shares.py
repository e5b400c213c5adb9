"""Shares of a job: what each of several machines makes of it, and how far they are.

`--part I/N` names a share. All machines write to the job's folder of parts, each the parts of its own share, and
`I-of-N.progress`, which any machine can show."""

from __future__ import annotations

import heapq
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Optional

from megafp8.data.preprocessing.part_files import PartFolder
from megafp8.data.preprocessing.plan import InputPart, InputTask, Stripe, Unit, build_tasks
from megafp8.data.preprocessing.sources import InputSource
from megafp8.errors import DataError
from megafp8.utils.files import LIST_BYTES, UnreadableFile, atomic_write_text
from megafp8.utils.strict_json import read_json


@dataclass(frozen=True)
class Share:
    """One of `count` shares, numbered from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def file_name(self) -> str:
        """Stem of its files in the folder of parts."""
        return f"{self.number}-of-{self.count}"


@dataclass(frozen=True)
class ShareProgress:
    """How far a share is. Bytes are those of the input on disk.

    Attributes:
        seconds: time of the newest start; `first_bytes` were done before it.
        host: the machine.
        written: time of the last report, in seconds of the epoch.
    """

    input_bytes: int
    total_bytes: int
    num_documents: int
    num_tokens: int
    num_skipped: int
    is_complete: bool = False
    seconds: float = 0.0
    first_bytes: int = 0
    host: str = ""
    written: float = 0.0


def divide_tasks(units: Sequence[Unit], sources: Sequence[InputSource], count: int) -> list[list[InputTask]]:
    """Divide the work into `count` shares of about equal size: the largest task goes first, to the smallest share.

    The division depends only on the input and on the arguments. A large compressed file is one task; with fewer of
    these than shares, several shares read one, and each tokenizes every n-th block.
    """
    tasks = build_tasks(units, count)
    sizes = [_input_bytes(task, sources) for task in tasks]
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, share) for share in range(count)]
    for position in sorted(range(len(tasks)), key=lambda position: -sizes[position]):
        load, share = heapq.heappop(loads)
        shares[share].append(position)
        heapq.heappush(loads, (load + sizes[position], share))
    return [[tasks[position] for position in sorted(share)] for share in shares]


def _input_bytes(task: InputTask, sources: Sequence[InputSource]) -> int:
    if isinstance(task, Stripe):
        return sources[task.stream.source].num_bytes // task.count
    return sum(piece.input_bytes for piece in task.pieces)


def total_bytes(tasks: Sequence[InputTask], sources: Sequence[InputSource]) -> int:
    """Return the size of tasks on disk."""
    return sum(_input_bytes(task, sources) for task in tasks)


def owner(tasks: Sequence[InputTask]) -> Callable[[str], bool]:
    """Return a function that says whether one of the tasks makes the part of a name."""
    names = {task.name for task in tasks if isinstance(task, InputPart)}
    stripes = [task for task in tasks if isinstance(task, Stripe)]

    def owns(name: str) -> bool:
        stream, _, block = name.partition("-")
        return name in names or any(
            stripe.stream.name == stream and block.isdigit() and int(block) % stripe.count == stripe.number
            for stripe in stripes
        )

    return owns


class ProgressFile:
    """Writes the progress of a share, at each part."""

    def __init__(self, folder: PartFolder, share: Share):
        self._path = _progress_path(folder.path, share)
        self._start = time.monotonic()
        self._last: Optional[ShareProgress] = None
        self._first_bytes = 0

    def write(self, progress: ShareProgress) -> None:
        """Write a progress. The first one is the start of this run."""
        if self._last is None:
            self._first_bytes = progress.input_bytes
        self._last = replace(
            progress, seconds=time.monotonic() - self._start, first_bytes=self._first_bytes,
            host=socket.gethostname(), written=time.time(),
        )  # fmt: skip
        atomic_write_text(self._path, json.dumps(asdict(self._last)) + "\n")

    def complete(self) -> ShareProgress:
        """Write that the share is complete, and return its progress."""
        assert self._last is not None
        self.write(replace(self._last, is_complete=True, input_bytes=self._last.total_bytes))
        return self._last


def read_progress(output_prefix: str) -> list[tuple[Share, Optional[ShareProgress], bool]]:
    """Return each share of a job with its progress, None before its start, and whether a process makes it now.

    Raises:
        DataError: there is no job that is divided into shares.
    """
    folder = PartFolder(output_prefix, 0, "uint16")
    saved = folder.load_job() or {}
    count = saved.get("num_shares")
    if not isinstance(count, int):
        raise DataError(
            f"{folder.path} has no job that is divided by --part: it has not begun, or its shards are complete. "
            "Check --output-prefix."
        )
    shares = [Share(number, count) for number in range(1, count + 1)]
    return [(share, _load(_progress_path(folder.path, share)), folder.is_locked(share.file_name)) for share in shares]


def describe_progress(shares: Sequence[tuple[Share, Optional[ShareProgress], bool]]) -> Iterator[str]:
    """Yield a line for each share, and one for all."""
    known = [progress for _, progress, _ in shares if progress is not None]
    for share, progress, is_running in shares:
        if progress is None:
            yield f"part {share}: {'starting' if is_running else 'not started'}"
            continue
        state = "complete" if progress.is_complete else "running" if is_running else "stopped"
        done = min(progress.input_bytes / max(progress.total_bytes, 1), 1.0) if progress.total_bytes else 1.0
        line = (
            f"part {share}: {state}, {done:.1%} of {progress.total_bytes / 1e6:,.1f} MB, "
            f"{progress.num_documents:,} documents, {progress.num_tokens:,} tokens"
        )
        if progress.num_skipped:
            line += f", {progress.num_skipped:,} records skipped"
        if not progress.is_complete:
            speed = (progress.input_bytes - progress.first_bytes) / max(progress.seconds, 1e-9)
            line += f", {speed / 1e6:,.1f} MB/s on {progress.host}, {time.time() - progress.written:.0f} s ago"
        yield line
    complete = sum(progress.is_complete for progress in known)
    tokens = sum(progress.num_tokens for progress in known)
    yield f"{complete} of {len(shares)} parts complete, {tokens:,} tokens"


def _progress_path(folder: Path, share: Share) -> Path:
    return folder / f"{share.file_name}.progress"


def _load(path: Path) -> Optional[ShareProgress]:
    try:
        return ShareProgress(**read_json(path, LIST_BYTES))
    except (UnreadableFile, TypeError):
        return None
