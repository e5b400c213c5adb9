"""Token shards in object storage: the index and the manifest are copied to the local cache, tokens are read by blocks.

Blocks of the `.bin` are files of the cache, named after the object's tag, so that a replaced shard never meets old
blocks. A block is complete or absent, and processes of a machine share it. Above the size limit, the blocks that were
not read for the longest time are deleted.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from megafp8.errors import DataError
from megafp8.utils.object_fetcher import fetch_range
from megafp8.utils.object_store import ObjectFolder, ObjectInfo, cache_root, fetch, listed_folder, local_path

# The latency of a request is about the time of so many bytes; a larger block reads more that is not needed.
BLOCK_BYTES = 1 << 22
DEFAULT_CACHE_BYTES = 64 << 30
SUFFIXES = (".bin", ".idx", ".manifest.json")
COPIED = SUFFIXES[1:]
# Another process may delete a block between its download and its use.
MAX_TRIES = 5


def shard_objects(prefix: str) -> tuple[ObjectFolder, str, dict[str, ObjectInfo]]:
    """The folder of a shard, its name there, and its objects by suffix.

    Raises:
        ObjectError: the folder cannot be listed.
    """
    parent, _, name = prefix.rpartition("/")
    folder, found = listed_folder(parent)
    return folder, name, {suffix: found[name + suffix] for suffix in SUFFIXES if name + suffix in found}


def copy_index(prefix: str) -> None:
    """Copy the index and the manifest of a shard to the cache, unless they are there.

    The place of the tokens gets an empty file, which megatron-core asks for and no reader accepts.

    Raises:
        DataError: an object is missing or cannot be read.
    """
    try:
        folder, name, objects = shard_objects(prefix)
        if missing := [f"{prefix}{suffix}" for suffix in SUFFIXES[:2] if suffix not in objects]:
            raise DataError(f"Shard {prefix}: {' and '.join(missing)} missing.")
        place = local_path(f"{prefix}.bin")
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place.with_name(f".{place.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a machine start together
            place.touch()
            for suffix in COPIED:
                if suffix in objects:
                    fetch(folder, name + suffix, local_path(prefix + suffix), objects[suffix])
                else:
                    local_path(prefix + suffix).unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"Shard {prefix} cannot be read: {error}.") from error


class ObjectTokens:
    """The `.bin` of a shard in object storage.

    Args:
        prefix: URL without suffix.

    Attributes:
        num_bytes: its size.
        cache_bytes: limit of all blocks in the cache.

    Raises:
        DataError: it does not exist or cannot be read.
    """

    def __init__(self, prefix: str):
        copy_index(prefix)
        self.url = f"{prefix}.bin"
        self._folder, name, objects = shard_objects(prefix)
        self._name, info = f"{name}.bin", objects[".bin"]
        self.num_bytes, self._etag = info.num_bytes, info.etag
        self.cache_bytes = DEFAULT_CACHE_BYTES
        key = hashlib.sha256(f"{self.url} {info.num_bytes} {info.etag} {BLOCK_BYTES}".encode()).hexdigest()[:32]
        self._root = cache_root() / "blocks"
        self._blocks = self._root / key
        self._num_fetched: float = float("inf")  # since the last look at the size of the cache

    def read_into(self, buffer: memoryview, first: int) -> None:
        """Fill a buffer with the bytes from `first` on.

        Raises:
            DataError: the object ends before, has changed or cannot be read.
        """
        if first + len(buffer) > self.num_bytes:
            raise DataError(f"{self.url} has {self.num_bytes} bytes, but its index needs {first + len(buffer)}.")
        try:
            while len(buffer):
                block, start = divmod(first, BLOCK_BYTES)
                count = min(len(buffer), BLOCK_BYTES - start)
                self._read_block(block, buffer[:count], start)
                buffer, first = buffer[count:], first + count
        except OSError as error:
            name = error if getattr(error, "filename", None) else f"{self.url}: {error}"
            raise DataError(f"Tokens cannot be read: {name}.") from error

    def read_ranges(self, starts: Iterable[int], num_bytes: int) -> list[bytes]:
        """Read ranges of the same size that are needed once, without the cache; errors as `read_into`."""
        try:
            return self._folder.read_ranges(self._name, starts, num_bytes, self._etag)
        except OSError as error:
            raise DataError(f"Tokens cannot be read: {error}.") from error

    def _read_block(self, block: int, buffer: memoryview, start: int) -> None:
        size = min(BLOCK_BYTES, self.num_bytes - block * BLOCK_BYTES)
        path = self._blocks / str(block)
        for _ in range(MAX_TRIES):
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                self._fetch(block, size, path)
                continue
            try:
                if os.fstat(descriptor).st_size == size and os.preadv(descriptor, [buffer], start) == len(buffer):
                    os.utime(descriptor)  # the time of its last use
                    return
            finally:
                os.close(descriptor)
            path.unlink(missing_ok=True)  # damaged
        raise DataError(f"{self.url}: its blocks are deleted before they are read; raise --data-cache-gib.")

    def _fetch(self, block: int, size: int, path: Path) -> None:
        fetch_range(self._folder, self._name, block * BLOCK_BYTES, size, self._etag, path)
        self._num_fetched += size
        if self._num_fetched > self.cache_bytes / 32:
            self._num_fetched = 0
            self._make_room()

    def _make_room(self) -> None:
        """Delete the blocks that were not read for the longest time, down to nine tenths of the limit."""
        files = []
        for path in self._root.glob("*/*"):
            try:
                status = path.stat()
            except FileNotFoundError:  # deleted by another process
                continue
            files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self.cache_bytes:
            return
        for _, size, path in sorted(files):
            if total <= 0.9 * self.cache_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


class ObjectReader:
    """Reads tokens, with the interface of megatron-core's readers."""

    def __init__(self, tokens: ObjectTokens):
        self.tokens = tokens

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray:
        """Return `count` ids from the byte `offset` on, of shape [count].

        Raises:
            DataError: they cannot be read, or the shard was replaced.
        """
        ids = np.empty(count, dtype=dtype)
        if count:
            self.tokens.read_into(ids.data.cast("B"), int(offset))
        return ids
