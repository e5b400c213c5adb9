"""The dataset indices on disk: arrays that are costly to make and the same for every rank and every job.

An entry is named after the SHA-256 of what decides its content, so a changed input is another entry and never meets an
old one. It is one `.npy` file an array and a `.json` that tells what the entry is of, with type, shape and SHA-256 of
each array. Each file is written under another name and renamed, the `.json` last; and since an entry's content is
decided by its name, jobs that write the same one at once write the same bytes, and whoever reads in between is well.

An entry is checked against its `.json` whenever it is opened: one that is cut short, changed, half written or not an
array is built again, once. No pickle is ever loaded: files are mapped as plain arrays, and numpy refuses objects then.
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


class BrokenEntry(Exception):
    """Files of the cache that are not what they should be; the text says how."""


@dataclass(frozen=True)
class IndexCache:
    """Entries in one folder.

    Attributes:
        folder: None keeps nothing: every array is built in this process's memory.
        on_build: called with the label of every entry before it is built, and why if it was there before.
    """

    folder: Optional[Path]
    on_build: Callable[[str], None] = lambda label: None

    def load_or_build(self, label: str, content: dict[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """Return an entry's arrays, mapped from the disk; build and write them where they are not there or broken.

        Args:
            label: what the entry is, for people.
            content: everything that decides the arrays, as JSON has it.
            build: makes the arrays; none may be empty.

        Raises:
            DataError: the folder cannot be written or read, or gives back other bytes than were written to it.
        """
        if self.folder is None:
            return build()
        name = entry_name(content)
        try:
            arrays = load_entry(self.folder, name)
        except BrokenEntry as fault:
            arrays, label = None, f"{label} again: {fault}"
        if arrays is not None:
            return arrays
        with _unwritable_explained(self.folder):
            check_writable(self.folder)
        self.on_build(label)
        built = build()
        with _unwritable_explained(self.folder):
            save_entry(self.folder, name, content, built)
        try:
            arrays = load_entry(self.folder, name)
        except BrokenEntry as fault:
            raise DataError(f"{self.folder} does not keep what is written to it: {fault}. Check the disk.") from fault
        assert arrays is not None
        return arrays


def entry_name(content: dict[str, Any]) -> str:
    """The name of the entry that this decides: 24 hexadecimal digits of its SHA-256."""
    text = json.dumps({"format": FORMAT, **content}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def array_path(folder: Path, name: str, array: str) -> Path:
    """Where one array of an entry lies."""
    return folder / f"{name}-{array}.npy"


def load_entry(folder: Path, name: str) -> Optional[Arrays]:
    """Map an entry's arrays, read-only; None where there is no such entry.

    Raises:
        BrokenEntry: a file is missing or is not what the entry's `.json` says.
    """
    path = folder / f"{name}.json"
    try:
        described = read_json(path)["arrays"]
        return {array: _load_array(array_path(folder, name, array), **about) for array, about in described.items()}
    except UnreadableFile as error:
        if not error.is_missing:
            raise BrokenEntry(f"{error.path} cannot be read: {error.reason}") from error
        if error.path == path:
            return None
        raise BrokenEntry(f"{error.path} is missing") from error
    except (ValueError, TypeError, KeyError, AttributeError, EOFError, OSError) as error:
        raise BrokenEntry(f"{path} and its arrays cannot be read ({type(error).__name__}: {error})") from error


def _load_array(path: Path, dtype: str, shape: list[int], sha256: str) -> np.ndarray:
    open_regular(path).close()  # numpy would wait for the writer of a named pipe
    # Of all of numpy's readers this one knows no pickle and no zip, only the header of a plain array.
    array = np.lib.format.open_memmap(path, mode="r")
    if array.dtype.str != dtype or list(array.shape) != shape or not array.flags.c_contiguous:
        raise BrokenEntry(f"{path} is {array.dtype} {array.shape}, and should be {np.dtype(dtype)} {tuple(shape)}")
    if hashlib.sha256(array).hexdigest() != sha256:
        raise BrokenEntry(f"{path} has other bytes than were written")
    return np.asarray(array)  # a plain array over the same mapping: single elements of a memmap are slow to read


def save_entry(folder: Path, name: str, content: dict[str, Any], arrays: Arrays) -> None:
    """Write an entry, each file whole or not at all, the `.json` that makes it valid last.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    described = {}
    for array, values in arrays.items():
        values = np.ascontiguousarray(values)
        with atomic_write(array_path(folder, name, array)) as stream:
            np.lib.format.write_array(stream, values, allow_pickle=False)
        sha256 = hashlib.sha256(values).hexdigest()
        described[array] = {"dtype": values.dtype.str, "shape": list(values.shape), "sha256": sha256}
    atomic_write_json(folder / f"{name}.json", {"format": FORMAT, "content": content, "arrays": described})


def check_writable(folder: Path) -> None:
    """Find out before the work, not after it, that its result cannot be kept.

    Raises:
        OSError: the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


@contextmanager
def _unwritable_explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror} ({error.filename})" if error.filename else str(error)
        raise DataError(
            f"The folder {folder} for the datasets' indices cannot be written: {reason}. Name another with "
            "--data-cache-path, or fill this one with tools/build_index.py."
        ) from error
