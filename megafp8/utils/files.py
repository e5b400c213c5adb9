"""Files that are either whole or absent: written under a temporary name, synced, then renamed; and their hashes.

Reads small files that anybody may have written: settings, manifests, locks, states.

Only regular files are read: opening a named pipe would block forever, and a device may have no end. Sizes are limited.
Everything that can be wrong with such a file is one error, `UnreadableFile`, which callers turn into their own.
JSON and YAML are parsed by `strict_json` and `strict_yaml`.

Paths as people give them: what no file system can have is refused before anything is opened or made.
"""

from __future__ import annotations

import argparse
import errno
import glob
import hashlib
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Optional, Union


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


AnyPath = Union[str, "os.PathLike[str]"]
MAX_BYTES = 1 << 24
LIST_BYTES = 1 << 28
"""For files that list other files: about a million of them."""
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


class UnreadableFile(ValueError):
    """A file that cannot be read, or text that cannot be parsed.

    Attributes:
        path: None for text that came from no file.
        reason: what is wrong, in a few words, without the path.
        is_missing: there is no file of that name.
    """

    def __init__(self, reason: str, path: Optional[AnyPath] = None, *, is_missing: bool = False):
        self.reason, self.path, self.is_missing = reason, path, is_missing
        super().__init__(reason if path is None else f"{path}: {reason}")


def open_regular(path: AnyPath) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Never blocks.

    Raises:
        UnreadableFile: it is missing, of another kind, or may not be read.
    """
    try:
        # Without O_NONBLOCK the open of a named pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise UnreadableFile("it is a socket, not a regular file", path) from error
        raise UnreadableFile(error.strerror or str(error), path, is_missing=error.errno in _MISSING) from error
    except ValueError as error:  # a null character, or characters that no file name can have
        raise UnreadableFile(str(error), path, is_missing=True) from error
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise UnreadableFile(f"it is {_KINDS.get(kind, 'of another kind')}, not a regular file", path)
    return open(descriptor, "rb")


def read_bytes(path: AnyPath, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file.

    Raises:
        UnreadableFile: as `open_regular`; or it has more bytes than the limit, or the disk fails.
    """
    with open_regular(path) as stream:
        try:
            content = stream.read(max_bytes + 1)
        except OSError as error:
            raise UnreadableFile(error.strerror or str(error), path) from error
    if len(content) > max_bytes:
        raise UnreadableFile(f"it has more than {max_bytes:,} bytes", path)
    return content


def read_text(path: AnyPath, max_bytes: int = MAX_BYTES) -> str:
    """The UTF-8 text of a regular file, without a byte order mark.

    Raises:
        UnreadableFile: as `read_bytes`; or it is not UTF-8.
    """
    return decode(read_bytes(path, max_bytes), path)


def decode(content: bytes, path: Optional[AnyPath] = None) -> str:
    """UTF-8 as text, without a byte order mark.

    Raises:
        UnreadableFile: it is not UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"not UTF-8: {error}", path) from error


MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4095 - 1 - MAX_NAME_BYTES  # of a folder that a file fits into
SHOWN = 60


def path_fault(path: str) -> Optional[str]:
    """Why no file can have this path; None if one can.

    Linux takes any bytes. Python reads those that are not UTF-8 as lone surrogates, which can be written neither to
    JSON nor to most terminals, so they are refused, too.
    """
    try:
        encoded = path.encode("utf-8")
    except UnicodeEncodeError:
        return "is no path of a file: it is not UTF-8"
    if b"\0" in encoded:
        return "is no path of a file: it holds a null character"
    longest = max(map(len, encoded.split(b"/")))
    if longest > MAX_NAME_BYTES:
        return f"is no path of a file: it has a name of {longest:,} bytes, more than {MAX_NAME_BYTES}"
    if len(encoded) > MAX_PATH_BYTES:
        return f"is no path of a file: it has {len(encoded):,} bytes, more than {MAX_PATH_BYTES:,}"
    return None


def shown(text: str) -> str:
    """The beginning of a text for a message, with escapes for what cannot be printed."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def path_text(text: str) -> str:
    """The `type` of an argparse argument that is a path or the prefix of some.

    Raises:
        argparse.ArgumentTypeError: no file can have this path.
    """
    if fault := path_fault(text):
        raise argparse.ArgumentTypeError(f"{shown(text)} {fault}")
    return text


def path_argument(text: str) -> Path:
    """As `path_text`, for arguments that are a `Path`."""
    return Path(path_text(text))
