"""On-disk cache of dataset indices: arrays that are costly to build and the same for every rank and every job.

The name of an entry is the SHA-256 of everything that decides its content, so that a changed input has another entry.
An entry has one `.npy` file per array, and a `.json` that describes it with dtype, shape and SHA-256 of each array.
Every file is written under a temporary name and renamed, the `.json` last. Jobs that write the same entry at once write
the same bytes, so that readers always see valid files.

An entry is checked against its `.json` when it is opened, the hashes by one process of a machine. One that is
truncated, changed or incomplete is built again, once. Pickles are never loaded: numpy maps files as plain arrays and
refuses arrays of objects.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np

from megafp8.errors import DataError
from megafp8.utils.files import UnreadableFile, atomic_write, atomic_write_json, open_regular
from megafp8.utils.strict_json import read_json

FORMAT = "megafp8-index-1"
Arrays = dict[str, np.ndarray]


class CorruptEntryError(Exception):
    """Files of the cache that do not match their description. The text says how."""


@dataclass(frozen=True)
class IndexCache:
    """A cache in one folder.

    Attributes:
        folder: None disables the cache: arrays are built in this process's memory.
        is_checked: read the arrays and compare their hashes; False where another process of this machine did.
        on_build: called before an entry is built, with its label, and the reason if it existed before.
    """

    folder: Optional[Path]
    on_build: Callable[[str], None] = lambda label: None
    is_checked: bool = True

    def load_or_build(self, label: str, content: dict[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """Return an entry's arrays, mapped from disk. Build and write them if they are missing or corrupt.

        Args:
            label: name of the entry for messages.
            content: everything that decides the arrays, as JSON values.
            build: builds the arrays; none may be empty.

        Raises:
            DataError: the folder cannot be written or read, or does not return the bytes that were written.
        """
        if self.folder is None:
            return build()
        name = entry_name(content)
        try:
            arrays = load_entry(self.folder, name, self.is_checked)
        except CorruptEntryError as error:
            arrays, label = None, f"{label} again: {error}"
        if arrays is not None:
            return arrays
        with _convert_write_errors(self.folder):  # before the arrays are built, not after
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.folder))
        self.on_build(label)
        built = build()
        with _convert_write_errors(self.folder):
            save_entry(self.folder, name, content, built)
        try:
            arrays = load_entry(self.folder, name)
        except CorruptEntryError as error:
            raise DataError(f"{self.folder} loses written data: {error}. Check the disk.") from error
        assert arrays is not None
        return arrays


def entry_name(content: dict[str, Any]) -> str:
    """Name of the entry with this content: 24 hexadecimal digits of its SHA-256."""
    text = json.dumps({"format": FORMAT, **content}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def array_path(folder: Path, name: str, array: str) -> Path:
    """Path of one array of an entry."""
    return folder / f"{name}-{array}.npy"


def load_entry(folder: Path, name: str, is_checked: bool = True) -> Optional[Arrays]:
    """Map an entry's arrays, read-only; None if there is no such entry.

    Args:
        is_checked: also compare their hashes.

    Raises:
        CorruptEntryError: a file is missing or does not match the entry's `.json`.
    """
    path = folder / f"{name}.json"
    try:
        described = read_json(path)["arrays"]
        paths = {array: array_path(folder, name, array) for array in described}
        return {array: _load_array(paths[array], is_checked, **about) for array, about in described.items()}
    except UnreadableFile as error:
        if not error.is_missing:
            raise CorruptEntryError(f"{error.path} cannot be read: {error.reason}") from error
        if error.path == path:
            return None
        raise CorruptEntryError(f"{error.path} is missing") from error
    except (ValueError, TypeError, KeyError, AttributeError, EOFError, OSError) as error:
        raise CorruptEntryError(f"{path} and its arrays cannot be read ({type(error).__name__}: {error})") from error


def _load_array(path: Path, is_checked: bool, dtype: str, shape: list[int], sha256: str) -> np.ndarray:
    open_regular(path).close()  # numpy would wait for the writer of a named pipe
    # In contrast to np.load, this reads neither pickles nor zip files.
    array = np.lib.format.open_memmap(path, mode="r")
    if array.dtype.str != dtype or list(array.shape) != shape or not array.flags.c_contiguous:
        raise CorruptEntryError(f"{path} has {array.dtype} {array.shape}, expected {np.dtype(dtype)} {tuple(shape)}")
    if is_checked and hashlib.sha256(array.data).hexdigest() != sha256:
        raise CorruptEntryError(f"{path} has different content than was written")
    return np.asarray(array)  # a view without np.memmap's slow access to single elements


def save_entry(folder: Path, name: str, content: dict[str, Any], arrays: Arrays) -> None:
    """Write an entry, each file atomically, the `.json` that makes it valid last.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    described = {}
    for array, values in arrays.items():
        values = np.ascontiguousarray(values)
        with atomic_write(array_path(folder, name, array)) as stream:
            np.lib.format.write_array(stream, values, allow_pickle=False)
        sha256 = hashlib.sha256(values.data).hexdigest()
        described[array] = {"dtype": values.dtype.str, "shape": list(values.shape), "sha256": sha256}
    atomic_write_json(folder / f"{name}.json", {"format": FORMAT, "content": content, "arrays": described})


@contextmanager
def _convert_write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror} ({error.filename})" if error.filename else str(error)
        raise DataError(
            f"The folder {folder} for dataset indices cannot be written: {reason}. Choose another with "
            "--data-cache-path, or create the indices with megafp8 build-index."
        ) from error
