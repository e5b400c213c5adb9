"""Writer of sharded checkpoints that hashes what it writes.

The hash is computed from memory and not from the file, so disk errors are detected on load. Files are written by
threads: there is no child process whose death could leave the save waiting forever.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import _split_by_size_and_type
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _write_item
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils.serialization import config

from megafp8.checkpoint.manifest import FileEntry
from megafp8.config.checkpoint_size import FILES_PER_RANK, MAX_LAG_BYTES
from megafp8.resilience import fault_injection
from megafp8.utils.process import in_thread

# Smaller buffers are copied for the hashing thread.
MIN_SHARED_BYTES = 1 << 18


class HashingWriter(FileSystemWriter):
    """Writes this rank's part of a checkpoint to a few files at once, and syncs each to the disk.

    Args:
        num_files: each is written by a thread that has one tensor in memory, and those that are not hashed yet.

    Attributes:
        written: manifest entries of the files written so far, by name.
    """

    def __init__(self, path: Path, num_files: int = FILES_PER_RANK):
        super().__init__(str(path), thread_count=num_files)
        self.written: dict[str, FileEntry] = {}

    @property
    def checkpoint_id(self) -> str:
        """The folder as text: the metadata stores it, and holds plain values only."""
        return str(self.path)

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Store the plan. megatron-core's planning ends with this call."""
        self.plan, self.planner = plan, planner

    def write(self, resolve_data: Callable[[WriteItem], object], step: int) -> list[WriteResult]:
        """Write this rank's items.

        Args:
            resolve_data: returns the data of an item: a tensor or bytes.
            step: of the checkpoint, for fault injection.

        Raises:
            OSError: the disk is full, or the folder cannot be written to.
        """
        buckets = [bucket for bucket in _split_by_size_and_type(self.thread_count, self.plan.items) if bucket]
        names = [f"{self.plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}" for number in range(len(buckets))]
        jobs = [
            in_thread(self._write_file, name, bucket, resolve_data, step)
            for name, bucket in zip(names, buckets, strict=True)
        ]
        wait(jobs)
        return [result for job in jobs for result in job.result()]

    def _write_file(
        self, name: str, items: list[WriteItem], resolve_data: Callable[[WriteItem], object], step: int
    ) -> list[WriteResult]:
        # Objects first, so that tensors are contiguous in the file.
        items = sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO)
        results = []
        # CRC-32 costs a third of SHA-256, and torch does not verify it on load.
        with no_checksum(), open(self.path / name, "xb", buffering=0) as file:
            with HashingStream(file) as stream:
                try:
                    for item in items:
                        fault_injection.point("save.mid_shard", step=step)
                        stream.owner = data = to_cpu(resolve_data(item))
                        written = _write_item(self.transforms, stream, data, item, name, self.serialization_format)
                        results.append(written)
                except RuntimeError as error:
                    # When a write fails, torch closes its archive, and raises for that instead of the write.
                    raise (error.__context__ or error) from None
            os.fsync(file.fileno())
        self.written[name] = FileEntry(stream.tell(), stream.sha256())
        return results


def no_checksum() -> AbstractContextManager[Any]:
    """Disable the CRC-32 of torch archives in this thread."""
    return config.patch("save.compute_crc32", False)


class HashingStream:
    """A sequential output file whose content a second thread hashes.

    Hashing may lag behind and continue while the disk syncs. Buffers of at least `MIN_SHARED_BYTES` are not copied and
    must not change until they are hashed. Write within the `with` block; the hash is available after it.

    Args:
        file: unbuffered.

    Attributes:
        owner: of the memory that is written next; kept alive until it is hashed.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self.owner: object = None
        self._num_bytes = self._lag = 0
        self._hashed = threading.Condition()
        self._chunks: SimpleQueue[Any] = SimpleQueue()
        self._hashing = in_thread(self._hash)

    def __enter__(self) -> HashingStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._chunks.put(None)

    def _hash(self) -> str:
        digest = hashlib.sha256()
        while (chunk := self._chunks.get()) is not None:
            digest.update(chunk[0])
            with self._hashed:
                self._lag -= len(chunk[0])
                self._hashed.notify()
        return digest.hexdigest()

    def sha256(self) -> str:
        """Return the SHA-256 of everything written, in hexadecimal."""
        return self._hashing.result()

    def write(self, content: memoryview | bytes) -> int:
        """Write all of `content`."""
        view = memoryview(content).cast("B")
        with self._hashed:
            # Bounds the memory that is not hashed yet. A larger buffer is let through when nothing waits.
            self._hashed.wait_for(lambda: self._lag + len(view) <= MAX_LAG_BYTES or not self._lag)
            self._lag += len(view)
        self._chunks.put((view, self.owner) if len(view) >= MIN_SHARED_BYTES else (bytes(view), None))
        remaining = view
        while len(remaining):
            remaining = remaining[self._file.write(remaining) :]  # writes at most 2 GiB at a time
        self._num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._num_bytes

    def flush(self) -> None:
        """Do nothing: the file is unbuffered."""


def to_cpu(data: Any) -> Any:
    """Copy a tensor's elements to the CPU. A view is cloned: torch would write its complete storage."""
    if not isinstance(data, torch.Tensor):
        return data
    data = data.detach()
    if data.device.type != "cpu":
        return data.to("cpu")
    return data.clone() if data.untyped_storage().size() != data.numel() * data.itemsize else data
