"""Best-effort output: log files, optional files and console streams whose write errors do not stop training.

Only a failed checkpoint may stop a run. For everything else there is one warning when writing fails, a bounded backlog
in memory, a count of the entries that did not fit into it, and one warning when writing works again.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional, TextIO, Union

BACKLOG_BYTES = 16 << 20  # about 40,000 step records
CLOSED = -1  # stands for a closed file descriptor
REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the limit of a file's size is reached (ulimit -f)",
    errno.EROFS: "the disk is read-only",
    errno.EIO: "the disk fails (input/output error)",
    errno.EACCES: "no write permission",
    errno.EPERM: "no write permission",
    errno.ENOENT: "the folder is gone",
    errno.ESTALE: "the folder is gone",
    errno.ENOTCONN: "the folder is gone",
    errno.ENOTDIR: "the folder is gone, a file has its name",
    errno.EEXIST: "the folder is gone, a file has its name",
    errno.EISDIR: "a folder has its name",
}
Report = Callable[[str], None]


def warn(text: str) -> None:
    """Print a warning. A closed terminal is ignored."""
    with contextlib.suppress(OSError):
        print(f"warning: {text}", flush=True)


def reason_of(error: Exception) -> str:
    """A short text for a write error."""
    if isinstance(error, OSError):
        return REASONS.get(error.errno or 0) or error.strerror or str(error)
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


@contextlib.contextmanager
def optional_write(path: Union[str, Path]) -> Iterator[None]:
    """Context for writing a file that the run does not need: an `OSError` becomes a warning."""
    try:
        yield
    except OSError as error:
        warn(f"{path} cannot be written: {reason_of(error)}; training continues")


class Outage:
    """Reports that writing fails and that it works again, once each, and counts lost entries.

    Args:
        name: name of the output in the reports.
        unit: name of the entries in the reports, in the plural.
        meanwhile: what happens while writing fails.
        report: function that prints a report.
    """

    def __init__(self, name: str, unit: str, meanwhile: str = "training continues", report: Report = warn):
        self.name, self.unit, self.meanwhile, self.report = name, unit, meanwhile, report
        self.is_on, self.num_lost, self.total_lost = False, 0, 0

    def failed(self, error: Exception, num_lost: int = 0) -> None:
        """Record a write error and the entries that it lost."""
        if not self.is_on:
            self.report(f"{self.name} cannot be written: {reason_of(error)}; {self.meanwhile}")
        self.is_on = True
        self.lose(num_lost)

    def lose(self, num_lost: int) -> None:
        """Record lost entries."""
        self.num_lost += num_lost
        self.total_lost += num_lost

    def ended(self) -> int:
        """Record a successful write. Returns the number of entries lost in the outage that it ends, 0 without one."""
        num_lost = self.num_lost
        if self.is_on:
            lost = f"{num_lost} {self.unit} were lost" if num_lost else "nothing was lost"
            self.report(f"{self.name} can be written again; {lost}")
        self.is_on, self.num_lost = False, 0
        return num_lost

    def close(self) -> None:
        """Report the number of entries lost in all outages."""
        if self.total_lost:
            self.report(f"{self.name}: {self.total_lost} {self.unit} were lost in all")
        self.total_lost = 0


class LogFile:
    """An append-only file whose disk may fail.

    `append` passes an entry to the operating system before it returns. If that fails, the entry waits in a backlog and
    is written before the next one. When the backlog exceeds `most_bytes`, the oldest entries are dropped. A file that
    was deleted is created again. An entry is written completely or not at all.

    Args:
        path: missing parent folders are created.
        unit: name of the entries in reports, in the plural.
        report: function that prints a report.
        most_bytes: limit of the backlog; None is `BACKLOG_BYTES`.
        is_text: entries are lines. A partial last line, left by a killed process, is terminated first.
    """

    def __init__(
        self, path: Union[str, Path], unit: str, *, report: Report = warn, most_bytes: Optional[int] = None,
        is_text: bool = True,
    ):  # fmt: skip
        self.path, self._is_text = Path(path), is_text
        self._most_bytes = BACKLOG_BYTES if most_bytes is None else most_bytes
        self._outage = Outage(str(path), unit, f"training continues, {unit} wait in memory", report)
        self._report = report
        self._backlog: deque[tuple[bytes, bool]] = deque()
        self._headers: list[bytes] = []
        self._descriptor = CLOSED

    def append(self, entry: bytes, *, is_header: bool = False, sync: bool = False) -> int:
        """Write the backlog and an entry.

        Args:
            entry: the bytes of the entry.
            is_header: readers need it. It is never dropped, and written again when the file is created again.
            sync: fsync the file.

        Returns:
            The number of entries lost in an outage that this call ends, 0 without one.
        """
        self._backlog.append((entry, is_header))
        return self._flush(sync)

    def close(self) -> None:
        """Write the backlog and report lost entries. A closed file can be appended to again."""
        if self._descriptor != CLOSED or self._backlog:
            self._flush(sync=True)
        if self._backlog:
            self._outage.lose(len(self._backlog))
            self._backlog.clear()
        self._outage.close()
        self._close_descriptor()

    def _flush(self, sync: bool) -> int:
        try:
            gone = self._open()
            while self._backlog:
                self._write(self._backlog[0][0])
                entry, is_header = self._backlog.popleft()
                if is_header:
                    self._headers.append(entry)
            if sync:
                os.fsync(self._descriptor)
        except OSError as error:
            self._outage.failed(error, self._drop_oldest())
            return 0
        if gone and not self._outage.is_on:
            self._report(f"{self.path}: {gone}, and what was in it; it is created again")
        return self._outage.ended()

    def _open(self) -> str:
        """Open the file at `path` unless it is open. Returns what happened to a file that was open before, or ""."""
        gone = ""
        if self._descriptor != CLOSED:
            if self._is_current():
                return ""
            gone = "the file was removed or replaced" if self.path.parent.is_dir() else "the folder is gone"
            self._close_descriptor()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._descriptor).st_size
        if size == 0:
            self._backlog.extendleft((entry, True) for entry in reversed(self._headers))
            self._headers.clear()
        elif self._is_text and os.pread(self._descriptor, 1, size - 1) != b"\n":
            try:
                self._write(b"\n")
            except OSError:
                self._close_descriptor()  # the next attempt opens the file and terminates the line
                raise
        return gone

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            return False

    def _write(self, entry: bytes) -> None:
        """Write an entry completely; truncate the file back when a part of it fails."""
        descriptor, rest = self._descriptor, memoryview(entry)
        end = os.fstat(descriptor).st_size
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, end)
            raise

    def _drop_oldest(self) -> int:
        """Drop the oldest entries until the backlog is within its limit. Returns their number."""
        num_before = len(self._backlog)
        excess_bytes = sum(len(entry) for entry, _ in self._backlog) - self._most_bytes
        for entry, is_header in list(self._backlog) if excess_bytes > 0 else ():
            if excess_bytes > 0 and not is_header:
                self._backlog.remove((entry, is_header))
                excess_bytes -= len(entry)
        return num_before - len(self._backlog)

    def _close_descriptor(self) -> None:
        if self._descriptor != CLOSED:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = CLOSED


class BestEffortStream:
    """Standard output or standard error of which write errors are ignored: a closed terminal, a full disk."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def best_effort(stream: Any) -> Any:
    """Wrap a stream so that writing to it never fails; None stays None."""
    return stream if stream is None or isinstance(stream, BestEffortStream) else BestEffortStream(stream)
