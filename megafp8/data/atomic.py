"""Files that are either whole or absent: written under a temporary name, synced, then renamed; and their hashes."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Union


def temporary_name(path: Union[str, Path]) -> Path:
    """Return the name in the same folder under which this process writes `path` until it is whole.

    No other process has it, also not one of another machine that shares the folder.
    """
    path = Path(path)
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")


def discard_abandoned(path: Union[str, Path]) -> None:
    """Delete what killed processes of this machine left of `path` under their temporary names."""
    path = Path(path)
    start, end = f".{path.name}.{socket.gethostname()}.", ".tmp"
    for found in path.parent.glob(f"{glob.escape(start)}*{end}"):
        process = found.name[len(start) : -len(end)]
        if process.isdigit() and not _is_running(int(process)):
            found.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def publish(temporary: Path, path: Path) -> None:
    """Give a closed and synced temporary file its name, and make the rename itself durable."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(stream: BinaryIO) -> None:
    """Force the bytes of an open file to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_file(path: Path) -> None:
    """Wait until a file that is written and closed is on the disk."""
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())


@contextmanager
def atomic_write(path: Union[str, Path]) -> Iterator[BinaryIO]:
    """Open `path` for writing bytes; it appears when the block ends well, and stays as it was when the block raises.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as stream:
            yield stream
            sync(stream)
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_json(path: Union[str, Path], content: dict[str, Any]) -> None:
    """Write `content` as indented JSON with a final newline, whole or not at all."""
    with atomic_write(path) as stream:
        stream.write((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))


class HashedStream:
    """Counts and hashes what is written to a binary file.

    Attributes:
        num_bytes: written so far.
    """

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    @property
    def sha256(self) -> str:
        """SHA-256 of everything written so far, in hexadecimal."""
        return self._digest.hexdigest()

    def write(self, content: Union[bytes, memoryview]) -> None:
        """Write all of `content`."""
        self._stream.write(content)
        self._digest.update(content)
        self.num_bytes += len(content)


def file_sha256(path: Union[str, Path, int]) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal; of a descriptor, from its place on, and it is closed."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
