"""torch's writer of sharded checkpoints, which also hashes what it writes.

The hash is taken from memory, not from the file read back: what the disk makes of it is found out at loading. Files are
written by threads of this process, so that there is no child whose death could be waited for without end.
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
from megafp8.resilience import fault_injection
from megafp8.utils.process import in_thread

FILES_PER_RANK = 2
# Less than this is copied for the thread that hashes.
MIN_SHARED_BYTES = 1 << 18
# Written and not hashed yet, of a file: copies from a GPU are kept for so long.
MAX_LAG_BYTES = 1 << 30


class HashingWriter(FileSystemWriter):
    """Writes this rank's part of a checkpoint to `FILES_PER_RANK` files, each synced to the disk.

    Attributes:
        written: what this rank has written so far, by file name.
    """

    def __init__(self, path: Path):
        super().__init__(str(path), thread_count=FILES_PER_RANK)
        self.written: dict[str, FileEntry] = {}

    @property
    def checkpoint_id(self) -> str:
        """The folder as text: it goes into the metadata, which holds plain values only."""
        return str(self.path)

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Keep what is to be written; megatron-core's planning ends with this."""
        self.plan, self.planner = plan, planner

    def write(self, data_of: Callable[[WriteItem], object], step: int) -> list[WriteResult]:
        """Write this rank's items.

        Args:
            data_of: the data of an item: a tensor or bytes.
            step: of the checkpoint, for messages.

        Raises:
            OSError: the disk is full, or the folder cannot be written to.
        """
        buckets = [bucket for bucket in _split_by_size_and_type(self.thread_count, self.plan.items) if bucket]
        names = [f"{self.plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}" for number in range(len(buckets))]
        jobs = [
            in_thread(self._write_file, name, bucket, data_of, step)
            for name, bucket in zip(names, buckets, strict=True)
        ]
        wait(jobs)
        return [result for job in jobs for result in job.result()]

    def _write_file(
        self, name: str, items: list[WriteItem], data_of: Callable[[WriteItem], object], step: int
    ) -> list[WriteResult]:
        # Objects first: tensors then follow each other without small pieces between them.
        items = sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO)
        results = []
        # The archive's own checksum costs a third of SHA-256, and torch does not look at it when it loads.
        with no_checksum(), open(self.path / name, "xb", buffering=0) as file:
            with HashingStream(file) as stream:
                try:
                    for item in items:
                        fault_injection.point("save.mid_shard", step=step)
                        stream.owner = data = on_cpu(data_of(item))
                        written = _write_item(self.transforms, stream, data, item, name, self.serialization_format)
                        results.append(written)
                except RuntimeError as error:
                    # torch closes its archive when a write fails, and then complains of the archive.
                    raise (error.__context__ or error) from None
            os.fsync(file.fileno())
        self.written[name] = FileEntry(stream.tell(), stream.sha256())
        return results


def no_checksum() -> AbstractContextManager[Any]:
    """Within, and in this thread, torch writes archives without their CRC-32."""
    return config.patch("save.compute_crc32", False)


class HashingStream:
    """A file that is written from front to back; another thread hashes what this one writes, and may lag behind.

    So a hash is still taken while the disk syncs. Memory of `MIN_SHARED_BYTES` or more that is written has to stay as
    it is until the hash is there; of less, a copy is hashed. Written to inside a `with` block; the hash comes after it.

    Args:
        file: unbuffered.

    Attributes:
        owner: of the memory that is written next; kept until it is hashed.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self.owner: object = None
        self._num_bytes = self._lag = 0
        self._hashed = threading.Condition()
        self._pieces: SimpleQueue[Any] = SimpleQueue()
        self._hashing = in_thread(self._hash)

    def __enter__(self) -> HashingStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._pieces.put(None)

    def _hash(self) -> str:
        digest = hashlib.sha256()
        while (piece := self._pieces.get()) is not None:
            digest.update(piece[0])
            with self._hashed:
                self._lag -= len(piece[0])
                self._hashed.notify()
        return digest.hexdigest()

    def sha256(self) -> str:
        """SHA-256 of everything written, in hexadecimal."""
        return self._hashing.result()

    def write(self, content: memoryview | bytes) -> int:
        """Write all of `content`."""
        whole = memoryview(content).cast("B")
        with self._hashed:
            self._hashed.wait_for(lambda: self._lag + len(whole) <= MAX_LAG_BYTES or not self._lag)
            self._lag += len(whole)
        self._pieces.put((whole, self.owner) if len(whole) >= MIN_SHARED_BYTES else (bytes(whole), None))
        rest = whole
        while len(rest):
            rest = rest[self._file.write(rest) :]  # at most 2 GiB at a time
        self._num_bytes += len(whole)
        return len(whole)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._num_bytes

    def flush(self) -> None:
        """Nothing is held back."""


def on_cpu(data: object) -> object:
    """A tensor's own elements in CPU memory; a view would be written with all that it is a view of."""
    if not isinstance(data, torch.Tensor):
        return data
    data = data.detach()
    if data.device.type != "cpu":
        return data.to("cpu")
    return data.clone() if data.untyped_storage().size() != data.numel() * data.itemsize else data
