"""megatron-core's dataset of a shard, which stops when the shard changes under it.

megatron-core opens a shard once and trusts it ever after: rewritten in place it gives other tokens; cut short it ends
the process (mapped memory) or gives whatever was in memory before (file reads). Here each read first asks the open
files for size and modification time.

A shard that is renamed or deleted does no harm: the open files stay as they were. A loader process that is started
later and would open other files refuses them.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megafp8.data.atomic import file_sha256
from megafp8.data.manifest import load_manifest
from megafp8.data.shards import bin_path, check_files_exist, idx_path
from megafp8.errors import DataError


class FileStamp(NamedTuple):
    """What tells one content of a file from another without reading it."""

    num_bytes: int
    mtime_ns: int
    inode: int
    device: int


def stamp_of(status: os.stat_result) -> FileStamp:
    """Return the stamp of a file with this status."""
    return FileStamp(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


class GuardedFile:
    """A file held open, whose content must stay what it was.

    Args:
        path: of the file.
        sha256: of its content, where it is known. A file that only its modification time (`touch`) or its place on the
            disk (a copy put back) tells from what it was is then read once, and may go on.
        stamp: what it must be at the start; None takes it as it is.
    """

    def __init__(self, path: Path, sha256: Optional[str], stamp: Optional[FileStamp] = None):
        self.path = path
        self._sha256 = sha256
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from error
        self.stamp = stamp or stamp_of(os.fstat(self.descriptor))

    def check(self) -> None:
        """Check that the content is what it was; a system call, unless something has changed.

        Raises:
            DataError: it is not.
        """
        now = stamp_of(os.fstat(self.descriptor))
        if now == self.stamp:
            return
        if now.num_bytes != self.stamp.num_bytes or self._sha256 is None or self._hash() != self._sha256:
            raise DataError(
                f"{self.path} was changed while this run reads it: {self.stamp.num_bytes} bytes, modified at "
                f"{self.stamp.mtime_ns} ns, became {now.num_bytes} bytes, modified at {now.mtime_ns} ns. Put the old "
                "shard back and resume from the last checkpoint; give a new shard another name."
            )
        self.stamp = now

    def _hash(self) -> str:
        os.lseek(self.descriptor, 0, os.SEEK_SET)  # all other reads bring their own position
        return file_sha256(os.dup(self.descriptor))

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class GuardedReader:
    """Reads tokens as megatron-core's readers do, from a file that is checked first.

    Args:
        tokens: the `.bin`.
        index: the `.idx`, which megatron-core reads; here it is only checked.
        is_mapped: map the tokens into memory, or read them from the file.
    """

    def __init__(self, tokens: GuardedFile, index: GuardedFile, *, is_mapped: bool):
        self._tokens, self._index = tokens, index
        self._map = mmap.mmap(tokens.descriptor, 0, access=mmap.ACCESS_READ) if is_mapped else None

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray:
        """Return `count` ids from the byte `offset` on. Shape: (count,).

        Raises:
            DataError: the shard has changed since it was opened.
        """
        self._index.check()
        self._tokens.check()
        if self._map is not None:
            return np.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
        ids = np.empty(count, dtype=dtype)
        left = memoryview(ids).cast("B")
        while len(left):
            num_bytes = os.preadv(self._tokens.descriptor, [left], int(offset))
            if num_bytes == 0:
                raise DataError(f"{self._tokens.path} ends at byte {offset}, {len(left)} bytes too early.")
            left, offset = left[num_bytes:], offset + num_bytes
        return ids


class GuardedIndexedDataset(IndexedDataset):
    """A shard; `dataset[i]` and `dataset.get(i, ...)` are megatron-core's."""

    stamps: tuple[Optional[FileStamp], Optional[FileStamp]] = (None, None)

    def initialize(self, path_prefix: str, multimodal: bool, mmap: bool, *args: Any) -> None:
        """Open the shard; megatron-core calls it for a new dataset, and for one that comes from another process.

        Raises:
            DataError: the shard is not there, is being replaced, or is another one than in the other process.
        """
        self.bin_reader = self.index = None  # megatron-core deletes both, even where opening fails
        check_files_exist(path_prefix)
        manifest = load_manifest(path_prefix)
        bin_sha256, idx_sha256 = (None, None) if manifest is None else (manifest.bin_sha256, manifest.idx_sha256)
        tokens = GuardedFile(bin_path(path_prefix), bin_sha256, self.stamps[0])
        index = GuardedFile(idx_path(path_prefix), idx_sha256, self.stamps[1])
        tokens.check()
        index.check()
        self.stamps = tokens.stamp, index.stamp
        if tokens.stamp.num_bytes == 0:
            raise DataError(f"{tokens.path} is empty.")
        super().initialize(path_prefix, multimodal, mmap, *args)
        self.bin_reader = GuardedReader(tokens, index, is_mapped=mmap)
        # megatron-core opened the index by its name; that it is the one of above shows now.
        if stamp_of(os.stat(index.path)) != index.stamp:
            raise DataError(f"{index.path} was replaced while this run opens it. Start again.")

    def __getstate__(self) -> Any:
        return super().__getstate__(), self.stamps

    def __setstate__(self, state: Any) -> None:
        of_megatron, self.stamps = state
        super().__setstate__(of_megatron)


class GuardedGPTDataset(GPTDataset):
    """megatron-core's samples, out of guarded shards."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> GuardedIndexedDataset:
        """Open a shard; megatron-core calls it."""
        return GuardedIndexedDataset(dataset_path, mmap=config.mmap_bin_files)
