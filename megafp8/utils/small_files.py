"""Reads small files that anybody may have written: settings, manifests, locks, states.

Only regular files are read: opening a named pipe would block forever, and a device may have no end. Sizes are limited.
Everything that can be wrong with such a file is one error, `UnreadableFile`, which callers turn into their own.
JSON and YAML are parsed by `strict_json` and `strict_yaml`.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO, Optional, Union

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
