"""Atomic writes, bounded reads of untrusted files, file hashes, and checks of path arguments.

Writes go to a temporary file that is synced and then renamed, so that a file is either complete or absent.

Reads are for small files that another program or a person may have written: settings, manifests, leases, states. Only
regular files up to a size limit are read, because opening a named pipe blocks and a device may have no end. Every
failure is an `UnreadableFile`, which callers turn into an error of their own. `strict_json` and `strict_yaml` parse
the content.
"""

from __future__ import annotations

import argparse
import errno
import glob
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Optional, Union

AnyPath = Union[str, "os.PathLike[str]"]
MAX_BYTES = 1 << 24
LIST_BYTES = 1 << 28  # for files that list other files, about a million of them
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4095 - 1 - MAX_NAME_BYTES  # of a folder; leaves room for a file name in it
MAX_PRINTED_CHARS = 60
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)

# ---- atomic writes ------------------------------------------------------------------------------------------------


def temporary_name(path: Union[str, Path]) -> Path:
    """The name in the same folder under which this process writes `path`; unique across machines and processes."""
    path = Path(path)
    return path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")


def remove_stale_temporaries(path: Union[str, Path]) -> None:
    """Delete the temporary files of `path` that killed processes of this machine left behind."""
    path = Path(path)
    start, end = f".{path.name}.{os.uname().nodename}.", ".tmp"
    for found in path.parent.glob(f"{glob.escape(start)}*{end}"):
        process = found.name[len(start) : -len(end)]
        if process.isdigit() and not _is_running(int(process)):
            found.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        pass
    return True


def publish(temporary: Path, path: Path) -> None:
    """Rename a closed and synced temporary file to `path`, and sync the rename."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """fsync a folder: the names in it are then on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(stream: BinaryIO) -> None:
    """Flush and fsync an open file."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_file(path: Path) -> None:
    """fsync a file that is closed."""
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())


@contextmanager
def atomic_write(path: Union[str, Path]) -> Iterator[BinaryIO]:
    """Open `path` for writing bytes. It is replaced when the block succeeds, and left as it was when the block raises.

    Raises:
        OSError: the folder cannot be written or the disk is full. It names `path`, also where the system names no file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as stream:
            yield stream
            sync(stream)
        publish(temporary, path)
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_text(path: Union[str, Path], text: str) -> None:
    """Write `text` atomically in UTF-8."""
    with atomic_write(path) as stream:
        stream.write(text.encode("utf-8"))


def atomic_write_json(path: Union[str, Path], content: dict[str, Any]) -> None:
    """Write `content` atomically as indented JSON with a final newline."""
    atomic_write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


# ---- hashes -------------------------------------------------------------------------------------------------------


class HashedStream:
    """Counts and hashes the bytes that are written to a binary file.

    Attributes:
        num_bytes: bytes written so far.
    """

    def __init__(self, stream: BinaryIO):
        import hashlib  # here and below, because --help imports this module

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
    """SHA-256 of a file in hexadecimal. A file descriptor is read from its current offset and closed."""
    import hashlib

    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# ---- reads of untrusted files -------------------------------------------------------------------------------------


class UnreadableFile(ValueError):
    """A file that cannot be read, or text that cannot be parsed.

    Attributes:
        path: None for text that came from no file.
        reason: what is wrong, without path and line.
        line: of the text that cannot be parsed; None if it is not known.
        is_missing: whether the file does not exist.
    """

    def __init__(
        self, reason: str, path: Optional[AnyPath] = None, *, line: Optional[int] = None, is_missing: bool = False
    ):
        self.reason, self.path, self.line, self.is_missing = reason, path, line, is_missing
        super().__init__(reason if path is None else self.located(path))

    def located(self, path: object) -> str:
        """`PATH:LINE: reason` for text that cannot be parsed, else `PATH: reason`."""
        return f"{path}{f':{self.line}' if self.line else ''}: {self.reason}"


def open_regular(path: AnyPath) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Never blocks.

    Raises:
        UnreadableFile: it does not exist, is not a regular file, or permission is denied.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise UnreadableFile("it is a socket, not a regular file", path) from error
        raise UnreadableFile(error.strerror or str(error), path, is_missing=error.errno in _MISSING) from error
    except ValueError as error:  # a null character or a lone surrogate in the name
        raise UnreadableFile(str(error), path, is_missing=True) from error
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise UnreadableFile(f"it is {_KINDS.get(kind, 'of another kind')}, not a regular file", path)
    return open(descriptor, "rb")


def read_bytes(path: AnyPath, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file.

    Raises:
        UnreadableFile: as `open_regular`; or the file is larger than `max_bytes`, or an I/O error.
    """
    with open_regular(path) as stream:
        try:
            # `read` allocates what it is asked for, before it reads.
            num_bytes = os.fstat(stream.fileno()).st_size
            content = stream.read(min(num_bytes, max_bytes) + 1)
            if len(content) > num_bytes:  # it has grown, or the kernel makes the content and says 0
                content += stream.read(max_bytes + 1 - len(content))
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
    """Decode UTF-8, dropping a byte order mark.

    Raises:
        UnreadableFile: it is not UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"not UTF-8: {error}", path) from error


# ---- path arguments -----------------------------------------------------------------------------------------------


def path_problem(path: str) -> Optional[str]:
    """Why a string is not a valid path; None if it is.

    Linux allows any bytes in a name. Python decodes bytes that are not UTF-8 to lone surrogates, which can be written
    neither to JSON nor to most terminals, so such names are refused.
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


def visible(text: object) -> str:
    """A text with its unprintable characters escaped, which would control a terminal: names of files may have any."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(text))


def printable(text: str) -> str:
    """The first characters of a text for an error message, with unprintable characters escaped."""
    text = visible(text)
    return text if len(text) <= MAX_PRINTED_CHARS else f"{text[:MAX_PRINTED_CHARS]}..."


URL_MARK = "://"


def path_text(text: str) -> str:
    """argparse `type` of an argument that is a path or a path prefix.

    Raises:
        argparse.ArgumentTypeError: `path_problem`, or it is a URL.
    """
    if URL_MARK in text:
        raise argparse.ArgumentTypeError(
            f"{printable(text)} is a URL, but this flag takes a path: copy it to a folder first (the flags that take "
            "URLs are in docs/object_storage.md)"
        )
    return path_or_url_text(text)


def path_or_url_text(text: str) -> str:
    """As `path_text`, but it may be the URL of an object."""
    if problem := path_problem(text):
        raise argparse.ArgumentTypeError(f"{printable(text)} {problem}")
    return text


def path_argument(text: str) -> Path:
    """argparse `type` of a path argument that becomes a `Path`; errors as `path_text`."""
    return Path(path_text(text))
