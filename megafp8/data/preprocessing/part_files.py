"""Part files: what a job has tokenized so far, kept beside its output until the shards are whole.

`PREFIX.parts/` holds `job.json`, which says of what job they are, and for each part

    NAME.KEY.bin      token ids, as they will be in the shard of the key (a number)
    NAME.KEY.lengths  int32, tokens of each document
    NAME.skipped      one line of JSON for each record that was skipped; only where there are some
    NAME.json         the part's record. It is written last: where it is, the part is whole.

So a job that is killed at any point goes on with the parts that it has.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Optional

import numpy as np

from megafp8.data.shards import ShardIndex, ShardTotals, index_of_documents, publish_shard, write_index
from megafp8.errors import DataError
from megafp8.utils.files import LIST_BYTES, HashedStream, UnreadableFile, atomic_write_json, sync
from megafp8.utils.strict_json import read_json

LOCK_PATIENCE_S = 30.0
# What copy_file_range() says where a kernel or a file system has it not.
NO_COPY_IN_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class PartRecord:
    """What a part holds.

    Attributes:
        num_documents: in each of its shards.
        num_tokens: for each key.
        input_bytes: of the input, as it is on the disk.
        num_skipped: records that were skipped.
        num_records: for each source that the part has records of, its number and how many.
    """

    num_documents: int
    num_tokens: tuple[int, ...]
    input_bytes: int
    num_skipped: int
    num_records: tuple[tuple[int, int], ...]


class PartFolder:
    """The folder of a job's parts.

    Args:
        output_prefix: of the job.
        num_keys: shards that are made at once.
        dtype: of the token ids.
    """

    def __init__(self, output_prefix: str, num_keys: int, dtype: np.dtype):
        self.path = Path(f"{output_prefix}.parts")
        self.num_keys = num_keys
        self.dtype = np.dtype(dtype)

    def lock(self) -> BinaryIO:
        """Keep other jobs away until the returned file is closed here and in all processes forked from here.

        Raises:
            DataError: another job has the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        stream = open(self.path / "lock", "wb", opener=_open_at_once)  # noqa: SIM115  it is the lock
        patient_until = time.monotonic() + LOCK_PATIENCE_S  # a killed job's workers finish their parts first
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return stream
            except BlockingIOError as error:
                if time.monotonic() > patient_until:
                    stream.close()
                    raise DataError(
                        f"Another job writes to {self.path}. Wait for it, or choose another --output-prefix."
                    ) from error
                time.sleep(0.1)
            except OSError:  # a file system without locks
                return stream

    def load_job(self) -> Optional[dict[str, Any]]:
        """Return what `save_job` saved; None when there is nothing, or nothing that can be read."""
        try:
            return read_json(self.path / "job.json", LIST_BYTES)
        except UnreadableFile:
            return None

    def save_job(self, job: dict[str, Any]) -> None:
        """Say of what job the parts are."""
        atomic_write_json(self.path / "job.json", job)

    def load_record(self, name: str) -> Optional[PartRecord]:
        """Return the record of a part that is whole, else None."""
        try:
            content = read_json(self.path / f"{name}.json", LIST_BYTES)
            content["num_records"] = tuple(map(tuple, content["num_records"]))
            record = PartRecord(**content | {"num_tokens": tuple(content["num_tokens"])})
            sizes = [
                (self.token_path(name, key).stat().st_size, self.length_path(name, key).stat().st_size)
                for key in range(self.num_keys)
            ]
        except (OSError, ValueError, TypeError, KeyError):
            return None
        expected = [(tokens * self.dtype.itemsize, record.num_documents * 4) for tokens in record.num_tokens]
        return record if sizes == expected else None

    def token_path(self, name: str, key: int) -> Path:
        """Where the tokens of a part are."""
        return self.path / f"{name}.{key}.bin"

    def length_path(self, name: str, key: int) -> Path:
        """Where the lengths of a part's documents are."""
        return self.path / f"{name}.{key}.lengths"

    def skipped_path(self, name: str) -> Path:
        """Where the records are that a part skipped."""
        return self.path / f"{name}.skipped"

    def holds_parts(self) -> bool:
        """Whether a part is whole."""
        return any(path.name != "job.json" for path in self.path.glob("*.json"))

    def clear(self) -> None:
        """Delete all parts; the job's description first, so that no half of them is taken for a job's."""
        (self.path / "job.json").unlink(missing_ok=True)
        for path in self.path.iterdir():
            if path.name != "lock":
                path.unlink()

    def remove(self) -> None:
        """Delete the folder."""
        (self.path / "job.json").unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)


class PartWriter:
    """Writes one part; use as a context manager. The part is whole after `finish`.

    Args:
        folder: of the parts.
        name: of the part.
    """

    def __init__(self, folder: PartFolder, name: str):
        self._folder, self._name = folder, name
        self._streams: list[BinaryIO] = []
        self._skipped: Optional[BinaryIO] = None
        self._num_documents = self._num_skipped = 0
        self._num_tokens = [0] * folder.num_keys
        self._num_records: dict[int, int] = {}

    def __enter__(self) -> "PartWriter":
        for key in range(self._folder.num_keys):
            self._streams.append(open(self._folder.token_path(self._name, key), "wb"))
            self._streams.append(open(self._folder.length_path(self._name, key), "wb"))
        return self

    def add(self, shards: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Append documents: for each key their tokens, and int32 lengths of them."""
        for key, (tokens, lengths) in enumerate(shards):
            self._streams[2 * key].write(memoryview(tokens).cast("B"))
            self._streams[2 * key + 1].write(memoryview(lengths).cast("B"))
            self._num_tokens[key] += len(tokens)
        self._num_documents += len(shards[0][1])

    def skip(self, source: int, number: int, reason: str) -> None:
        """Note a record that is skipped: its source, its number in the part and what is wrong with it."""
        if self._skipped is None:
            self._skipped = open(self._folder.skipped_path(self._name), "wb")  # noqa: SIM115  __exit__ closes it
        self._skipped.write((json.dumps([source, number, reason]) + "\n").encode("utf-8"))
        self._num_skipped += 1

    def count_records(self, source: int, count: int) -> None:
        """Count records of a source, documents or not."""
        self._num_records[source] = self._num_records.get(source, 0) + count

    def num_records(self, source: int) -> int:
        """Return how many records of a source were counted."""
        return self._num_records.get(source, 0)

    def finish(self, input_bytes: int) -> PartRecord:
        """Make the part whole."""
        self._close()
        record = PartRecord(
            num_documents=self._num_documents,
            num_tokens=tuple(self._num_tokens),
            input_bytes=input_bytes,
            num_skipped=self._num_skipped,
            num_records=tuple(self._num_records.items()),
        )
        path = self._folder.path / f"{self._name}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(record)), encoding="utf-8")
        os.replace(temporary, path)
        return record

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._close()

    def _close(self) -> None:
        for stream in (*self._streams, self._skipped):
            if stream is not None:
                stream.close()


class ShardJoiner:
    """Joins parts into the shard of one key. The kernel copies the bytes (a file system that can, shares them), and
    they are hashed in the page cache.

    Args:
        folder: of the parts.
        key: number of the key.
    """

    def __init__(self, folder: PartFolder, key: int):
        self._folder, self._key = folder, key
        self._names: list[str] = []
        self._bin_path = folder.path / f"joined.{key}.bin"
        self._stream = open(self._bin_path, "wb", buffering=0)  # noqa: SIM115  publish() closes it
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def add(self, name: str) -> None:
        """Append a part."""
        self._names.append(name)
        path = self._folder.token_path(name, self._key)
        if path.stat().st_size == 0:  # which cannot be mapped
            return
        with open(path, "rb") as part, mmap.mmap(part.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _append(part.fileno(), content, self._stream.fileno())
            self._digest.update(content)
            self._num_bytes += len(content)

    def publish(self, prefix: str) -> ShardTotals:
        """Write the index and give both files their names.

        Memory: that of one part's lengths, and `write_index`.
        """
        sync(self._stream)
        self._stream.close()
        parts = _PartIndices(self._folder, self._key, self._names)
        idx_path = self._folder.path / f"joined.{self._key}.idx"
        with open(idx_path, "wb") as stream:
            index = HashedStream(stream)
            write_index(index, parts)
            sync(stream)
        publish_shard(prefix, self._bin_path, idx_path)
        return ShardTotals(
            num_documents=sum(part.num_documents for part in parts),
            num_sequences=sum(len(part.sequence_lengths) for part in parts),
            num_tokens=self._num_bytes // self._folder.dtype.itemsize,
            bin_bytes=self._num_bytes,
            bin_sha256=self._digest.hexdigest(),
            idx_bytes=index.num_bytes,
            idx_sha256=index.sha256,
        )

    def close(self) -> None:
        """Stop without a shard."""
        self._stream.close()


class _PartIndices(Sequence[ShardIndex]):
    """The indices of the parts, each made from the part's lengths when it is asked for."""

    def __init__(self, folder: PartFolder, key: int, names: Sequence[str]):
        self._folder, self._key, self._names = folder, key, names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, place: Any) -> Any:
        lengths = np.fromfile(self._folder.length_path(self._names[place], self._key), np.int32)
        return index_of_documents(lengths, self._folder.dtype)

    def __iter__(self) -> Iterator[ShardIndex]:
        return (self[place] for place in range(len(self)))


def _append(source: int, content: mmap.mmap, target: int) -> None:
    """Append a file, given by its descriptor and its content, to another."""
    done = 0
    while done < len(content):
        try:
            done += os.copy_file_range(source, target, len(content) - done)
        except OSError as error:
            if error.errno not in NO_COPY_IN_KERNEL:
                raise
            with memoryview(content) as view:
                done += os.write(target, view[done:])


def _open_at_once(path: str, flags: int) -> int:
    """An opener that does not wait for the reader of a named pipe."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)
