"""Assembly of finished parts into shards, in the order of the input, as soon as each part and all before it exist."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np

from megafp8.data.preprocessing.part_files import PartFolder, PartRecord
from megafp8.data.preprocessing.plan import Unit
from megafp8.data.preprocessing.sources import InputSource
from megafp8.data.shards import ShardIndex, ShardTotals, build_document_index, publish_shard, write_index_file
from megafp8.utils.files import publish, sync
from megafp8.utils.strict_json import parse_json

WRITE_BYTES = 8 << 20


def skipped_path(output_prefix: str) -> Path:
    """Return the path of the list of records that a job skipped."""
    return Path(f"{output_prefix}.skipped.jsonl")


class ShardAssembly:
    """Takes parts in any order and appends them to the shards in the order of the input. A context manager.

    Args:
        units: the division of the input.
        sources: the input.
        folder: the folder of the parts.
    """

    def __init__(self, units: Sequence[Unit], sources: Sequence[InputSource], folder: PartFolder):
        self._units, self._sources, self._folder = units, sources, folder
        self._shards = [_ShardAppender(folder, key) for key in range(folder.num_keys)]
        self._skipped = open(folder.path / "joined.skipped", "wb")  # noqa: SIM115  __exit__ closes it
        self._records: dict[str, Optional[PartRecord]] = {}
        self._steps = self._append_parts()
        self._records_before = [0] * len(sources)
        self.num_skipped = 0
        self.num_tokens = 0

    def __enter__(self) -> "ShardAssembly":
        return self

    def add(self, name: str, record: Optional[PartRecord]) -> None:
        """Take a part, and append all parts that are ready. None is the end of a stream: it has no such part."""
        self._records[name] = record
        next(self._steps, None)

    def publish(self, output_prefix: str, prefixes: Sequence[str]) -> list[ShardTotals]:
        """Write the shards, one per key, and the list of skipped records if there are any."""
        assert not any(True for _ in self._steps) and not self._records
        sync(self._skipped)
        self._skipped.close()
        if self.num_skipped:
            publish(Path(self._skipped.name), skipped_path(output_prefix))
        else:
            skipped_path(output_prefix).unlink(missing_ok=True)
        return [shard.publish(prefix) for shard, prefix in zip(self._shards, prefixes, strict=True)]

    def __exit__(self, *_: object) -> None:
        self._skipped.close()
        for shard in self._shards:
            shard.close()

    def _append_parts(self) -> Iterator[None]:
        """Append the parts in order; yields where the next one is missing."""
        for unit in self._units:
            for name in unit.part_names():
                while name not in self._records:
                    yield
                record = self._records.pop(name)
                if record is None:
                    break
                self._append(name, record)

    def _append(self, name: str, record: PartRecord) -> None:
        for shard in self._shards:
            shard.append(name)
        if record.num_skipped:
            self._list_skipped(name)
        for source, count in record.num_records:
            self._records_before[source] += count
        self.num_skipped += record.num_skipped
        self.num_tokens += sum(record.num_tokens)

    def _list_skipped(self, name: str) -> None:
        lines = self._folder.skipped_path(name).read_text(encoding="utf-8").splitlines()
        for source_number, number, reason in sorted(map(parse_json, lines)):
            source = self._sources[source_number]
            found = {"path": source.path, source.record_name: self._records_before[source_number] + number + 1}
            line = json.dumps(found | {"reason": reason}, ensure_ascii=False)
            self._skipped.write(line.encode("utf-8", errors="replace") + b"\n")


class _ShardAppender:
    """Appends parts to the shard of one key.

    The kernel copies the bytes, or shares them where the file system can. They are hashed in the page cache.
    """

    def __init__(self, folder: PartFolder, key: int):
        self._folder, self._key = folder, key
        self._names: list[str] = []
        self._bin_path = folder.path / f"joined.{key}.bin"
        self._stream = open(self._bin_path, "wb", buffering=0)  # noqa: SIM115  publish() and close() close it
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def append(self, name: str) -> None:
        """Append a part."""
        self._names.append(name)
        path = self._folder.token_path(name, self._key)
        if path.stat().st_size == 0:  # an empty file cannot be mapped
            return
        with open(path, "rb") as part, mmap.mmap(part.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _copy(part.fileno(), content, self._stream.fileno())
            self._digest.update(content)
            self._num_bytes += len(content)

    def publish(self, prefix: str) -> ShardTotals:
        """Write the index and rename both files.

        Memory: the lengths of one part, and `write_index`.
        """
        sync(self._stream)
        self._stream.close()
        idx_path = self._folder.path / f"joined.{self._key}.idx"
        parts = _PartIndices(self._folder, self._key, self._names)
        totals = write_index_file(idx_path, parts, bin_bytes=self._num_bytes, bin_sha256=self._digest.hexdigest())
        publish_shard(prefix, self._bin_path, idx_path)
        return totals

    def close(self) -> None:
        """Close the file without making a shard."""
        self._stream.close()


class _PartIndices(Sequence[ShardIndex]):
    """The indices of the parts. Each is computed from the part's lengths when it is accessed."""

    def __init__(self, folder: PartFolder, key: int, names: Sequence[str]):
        self._folder, self._key, self._names = folder, key, names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, number: Any) -> Any:
        lengths = np.fromfile(self._folder.length_path(self._names[number], self._key), np.int32)
        return build_document_index(lengths, self._folder.dtype)


def _copy(source: int, content: mmap.mmap, target: int) -> None:
    """Append the file of descriptor `source`, which is mapped as `content`, to the file of descriptor `target`."""
    num_copied = 0
    while num_copied < len(content):
        try:
            num_bytes = os.copy_file_range(source, target, len(content) - num_copied, num_copied)
        except OSError:
            num_bytes = 0
        if not num_bytes:  # unsupported: some file systems raise an error, others copy nothing
            num_bytes = os.write(target, content[num_copied : num_copied + WRITE_BYTES])
        num_copied += num_bytes
