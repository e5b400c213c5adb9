"""Part files: the tokens of finished parts, kept next to the output until the shards are complete.

`PREFIX.parts/` holds `job.json`, which identifies the job, and for each part

    NAME.KEY.bin      token ids in the shard's dtype; KEY is the number of the key
    NAME.KEY.lengths  int32, number of tokens of each document
    NAME.skipped      one line of JSON for each skipped record; only where there are any
    NAME.json         the part's record, written last: where it exists, the part is complete

and for each stream whose end was read `NAME.end`, with the number of its parts.

All files are synced before the record is written. A job that is killed at any point, also with its machine, resumes
from the parts whose files have the hashes of their records.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Optional, Union

import numpy as np

from megafp8.errors import DataError
from megafp8.utils.files import (
    LIST_BYTES,
    HashedStream,
    UnreadableFile,
    atomic_write_json,
    atomic_write_text,
    file_sha256,
    sync,
)
from megafp8.utils.plain_data import from_plain
from megafp8.utils.strict_json import read_json

LOCK_PATIENCE_S = 30.0
LOCK, SETUP_LOCK = "lock", "setup"


@dataclass(frozen=True)
class PartRecord:
    """Contents of a part.

    Attributes:
        num_documents: documents in each of its shards.
        num_tokens: tokens of each key.
        input_bytes: size of its input on disk.
        num_skipped: records that were skipped.
        num_records: (number of the source, number of records) for each source.
        sha256: name and SHA-256 of each of its files.
    """

    num_documents: int
    num_tokens: tuple[int, ...]
    input_bytes: int
    num_skipped: int
    num_records: tuple[tuple[int, int], ...]
    sha256: dict[str, str]


class PartFolder:
    """The folder of a job's parts.

    Args:
        output_prefix: output prefix of the job.
        num_keys: number of shards that are made at once.
        dtype: dtype of the token ids.
    """

    def __init__(self, output_prefix: str, num_keys: int, dtype: Union[np.dtype, str]):
        self.path = Path(f"{output_prefix}.parts")
        self.num_keys = num_keys
        self.dtype = np.dtype(dtype)

    def lock(self, name: str = LOCK, shared: bool = False, what: str = "Another job is writing to") -> BinaryIO:
        """Lock the folder until the returned file is closed here and in all processes forked from here.

        Args:
            name: of the lock. `LOCK` is held by all who write parts: shared by the shares of a job, else alone.
            shared: let others hold it that share it.
            what: message about the other holder, before the folder.

        Raises:
            DataError: another process holds the lock.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        stream = open(self._lock_path(name), "ab+", opener=_open_nonblocking)  # noqa: SIM115  it is the lock
        deadline = time.monotonic() + LOCK_PATIENCE_S  # a killed job's workers finish their parts first
        while True:
            try:
                fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                return stream
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    stream.close()
                    raise DataError(f"{what} {self.path}. Wait for it, or choose another --output-prefix.") from error
                time.sleep(0.1)
            except OSError:  # a file system without locks
                return stream

    def is_locked(self, name: str) -> bool:
        """Whether a process holds this lock."""
        try:
            with open(self._lock_path(name), "rb", opener=_open_nonblocking) as stream:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # it was never taken
            pass
        return False

    def _lock_path(self, name: str) -> Path:
        return self.path / (name if name == LOCK else f"{name}.lock")

    def load_job(self) -> Optional[dict[str, Any]]:
        """Return what `save_job` saved; None if it is missing or cannot be read."""
        try:
            return read_json(self.path / "job.json", LIST_BYTES)
        except UnreadableFile:
            return None

    def save_job(self, job: dict[str, Any]) -> None:
        """Save the description of the job that the parts belong to."""
        atomic_write_json(self.path / "job.json", job)

    def load_record(self, name: str) -> Optional[PartRecord]:
        """Return the record of a complete part, else None."""
        try:
            record = from_plain(PartRecord, read_json(self.path / f"{name}.json", LIST_BYTES))
            sizes = [
                (self.token_path(name, key).stat().st_size, self.length_path(name, key).stat().st_size)
                for key in range(self.num_keys)
            ]
        except (OSError, UnreadableFile):
            return None
        expected = [(tokens * self.dtype.itemsize, record.num_documents * 4) for tokens in record.num_tokens]
        return record if sizes == expected else None

    def num_parts(self, stream: str) -> Optional[int]:
        """Return how many parts a stream has; None before its end was read."""
        try:
            return int((self.path / f"{stream}.end").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def save_num_parts(self, stream: str, count: int) -> None:
        """Save how many parts a stream has."""
        atomic_write_text(self.path / f"{stream}.end", str(count))

    def part_names(self) -> list[str]:
        """Return the names of the complete parts, in the order of the input."""
        return sorted(path.stem for path in self.path.glob("*.json") if path.name != "job.json")

    def is_whole(self, name: str) -> bool:
        """Whether the files of a part have the hashes of its record."""
        record = self.load_record(name)
        try:
            return record is not None and all(
                file_sha256(self.path / file) == sha256 for file, sha256 in record.sha256.items()
            )
        except OSError:
            return False

    def drop(self, name: str) -> None:
        """Delete the record of a part."""
        (self.path / f"{name}.json").unlink()

    def token_path(self, name: str, key: int) -> Path:
        """Path of the tokens of a part."""
        return self.path / f"{name}.{key}.bin"

    def length_path(self, name: str, key: int) -> Path:
        """Path of the document lengths of a part."""
        return self.path / f"{name}.{key}.lengths"

    def skipped_path(self, name: str) -> Path:
        """Path of the records that a part skipped."""
        return self.path / f"{name}.skipped"

    def holds_parts(self) -> bool:
        """Whether a part is complete."""
        return bool(self.part_names())

    def clear(self) -> None:
        """Delete all parts, the job's description first, so that no partial folder seems valid."""
        (self.path / "job.json").unlink(missing_ok=True)
        for path in self.path.iterdir():
            if path.name != LOCK and path.suffix != ".lock":
                path.unlink()

    def remove(self) -> None:
        """Delete the folder."""
        (self.path / "job.json").unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)


class PartWriter:
    """Writes one part, which is complete after `finish`. A context manager.

    Args:
        folder: the folder of the parts.
        name: name of the part.
    """

    def __init__(self, folder: PartFolder, name: str):
        self._folder, self._name = folder, name
        self._files: dict[Path, tuple[BinaryIO, HashedStream]] = {}
        self._num_documents = self._num_skipped = 0
        self._num_tokens = [0] * folder.num_keys
        self._num_records: dict[int, int] = {}

    def __enter__(self) -> "PartWriter":
        for key in range(self._folder.num_keys):
            self._open(self._folder.token_path(self._name, key))
            self._open(self._folder.length_path(self._name, key))
        return self

    def add(self, shards: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Append documents: for each key their token ids, and their lengths in int32."""
        for key, (tokens, lengths) in enumerate(shards):
            self._open(self._folder.token_path(self._name, key)).write(tokens.data.cast("B"))
            self._open(self._folder.length_path(self._name, key)).write(lengths.data.cast("B"))
            self._num_tokens[key] += len(tokens)
        self._num_documents += len(shards[0][1])

    def skip(self, source: int, number: int, reason: str) -> None:
        """Note a skipped record: its source, its number in the part and what is wrong with it."""
        line = json.dumps([source, number, reason]) + "\n"
        self._open(self._folder.skipped_path(self._name)).write(line.encode("utf-8"))
        self._num_skipped += 1

    def count_records(self, source: int, count: int) -> None:
        """Count records of a source, whether they are documents or not."""
        self._num_records[source] = self.num_records(source) + count

    def num_records(self, source: int) -> int:
        """Return how many records of a source were counted."""
        return self._num_records.get(source, 0)

    def finish(self, input_bytes: int) -> PartRecord:
        """Complete the part: sync its files, then write the record.

        Raises:
            OSError: a file cannot be written.
        """
        for stream, _ in self._files.values():
            sync(stream)
        record = PartRecord(
            num_documents=self._num_documents,
            num_tokens=tuple(self._num_tokens),
            input_bytes=input_bytes,
            num_skipped=self._num_skipped,
            num_records=tuple(self._num_records.items()),
            sha256={path.name: hashed.sha256 for path, (_, hashed) in self._files.items()},
        )
        atomic_write_json(self._folder.path / f"{self._name}.json", asdict(record))
        return record

    def __exit__(self, *_: object) -> None:
        for stream, _hashed in self._files.values():
            stream.close()

    def _open(self, path: Path) -> HashedStream:
        """Return a file of the part; opened at the first call."""
        if path not in self._files:
            stream = open(path, "wb")  # noqa: SIM115  __exit__ closes it
            self._files[path] = stream, HashedStream(stream)
        return self._files[path][1]


def _open_nonblocking(path: str, flags: int) -> int:
    """An opener that does not wait for the reader of a named pipe."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)
