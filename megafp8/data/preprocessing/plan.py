"""How the input of preprocessing is divided into parts, each of which one worker tokenizes in one go.

The division follows from the input and the size of a part alone. Small files are put together, large ones divided. Of a
large compressed file, how many parts it has is known only when it has been read; it is a `Stream`.

Parts into shards, in the order of the input, each as soon as it and all before it are there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Union

from megafp8.data.preprocessing import table_readers
from megafp8.data.preprocessing.part_files import PartFolder, PartRecord, ShardJoiner
from megafp8.data.preprocessing.readers import InputSource
from megafp8.data.shards import ShardTotals
from megafp8.utils.strict_json import parse_json

MIN_PARTS, MAX_PARTS = 8, 4096
SMALLEST_PART_BYTES = 1 << 20
# A compressed file of this share of a part, as it is on the disk, is not worth dividing.
SMALL_STREAM_FRACTION = 0.25
# A part of a stream is held in memory before it is parsed.
MAX_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class InputRange:
    """Consecutive records of one file.

    Attributes:
        source: number of the file.
        start, stop: bytes, of a table row groups or rows; see `readers` and `table_readers`.
        input_bytes: of the file, as it is on the disk.
    """

    source: int
    start: int
    stop: int
    input_bytes: int


@dataclass(frozen=True)
class InputPart:
    """Pieces that are tokenized in one go. Names sort in the order of the input."""

    name: str
    pieces: tuple[InputRange, ...]


@dataclass(frozen=True)
class Stream:
    """A large compressed file: part k, from 0, has the records that end in block k of its content."""

    name: str
    source: int
    block_bytes: int

    def part_name(self, block: int) -> str:
        """Return the name of a part."""
        return f"{self.name}-{block:06d}"


@dataclass(frozen=True)
class Stripe:
    """Every `count`-th part of a stream, from `number` on: what one worker does of it."""

    stream: Stream
    number: int
    count: int


Unit = Union[InputPart, Stream]
InputTask = Union[InputPart, Stripe]


def part_bytes_for(total_bytes: int, wanted_bytes: int) -> int:
    """Return the size of a part: what the encoder wants, but of a small input at least 8, of a large one at most 4096
    parts, so that there is work for all and no folder of a million files."""
    return max(min(wanted_bytes, total_bytes // MIN_PARTS), total_bytes // MAX_PARTS, SMALLEST_PART_BYTES)


def divide(sources: Sequence[InputSource], keys: Sequence[str], part_bytes: int) -> list[Unit]:
    """Divide the input, in order.

    Args:
        sources: the input.
        keys: columns of tables.
        part_bytes: of text.

    Raises:
        CapabilityError, DataError: a table that cannot be read.
    """
    units: list[Unit] = []
    pieces: list[InputRange] = []

    def close_part() -> None:
        if pieces:
            units.append(InputPart(f"{len(units):06d}", tuple(pieces)))
            pieces.clear()

    for number, source in enumerate(sources):
        if source.delimiter is not None and not source.is_divisible and is_large(source, part_bytes):
            close_part()
            units.append(Stream(f"{len(units):06d}", number, min(part_bytes, MAX_BLOCK_BYTES)))
            continue
        for piece in _pieces_of(number, source, keys, part_bytes):
            pieces.append(piece)
            if sum(piece.input_bytes for piece in pieces) >= part_bytes:
                close_part()
    close_part()
    return units


def tasks_of(units: Sequence[Unit], workers: int) -> list[InputTask]:
    """Return the tasks for workers: streams first, since each is long, divided among the workers that have no other."""
    streams = [unit for unit in units if isinstance(unit, Stream)]
    stripes = -(-workers // len(streams)) if streams else 1
    return [
        *(Stripe(stream, number, stripes) for stream in streams for number in range(stripes)),
        *(unit for unit in units if isinstance(unit, InputPart)),
    ]


def is_large(source: InputSource, part_bytes: int) -> bool:
    """Whether a file that can be read from its start only is worth more than one part."""
    return source.num_bytes > part_bytes * (SMALL_STREAM_FRACTION if source.compression else 1)


def _pieces_of(number: int, source: InputSource, keys: Sequence[str], part_bytes: int) -> Iterator[InputRange]:
    if source.is_table:
        for start, stop, input_bytes in table_readers.divide(source, keys, part_bytes):
            yield InputRange(number, start, stop, input_bytes)
    elif source.is_divisible:
        for start in range(0, source.num_bytes, part_bytes):
            stop = min(start + part_bytes, source.num_bytes)
            yield InputRange(number, start, stop, stop - start)
    else:
        yield InputRange(number, 0, source.num_bytes, source.num_bytes)


def skipped_path(output_prefix: str) -> Path:
    """Return the path of the list of records that a job skipped."""
    return Path(f"{output_prefix}.skipped.jsonl")


class ShardAssembly:
    """Takes parts in any order and joins them in that of the input; use as a context manager.

    Args:
        units: the division of the input.
        sources: the input.
        folder: of the parts.
    """

    def __init__(self, units: Sequence[Unit], sources: Sequence[InputSource], folder: PartFolder):
        self._units, self._sources, self._folder = units, sources, folder
        self._joiners = [ShardJoiner(folder, key) for key in range(folder.num_keys)]
        self._skipped = open(folder.path / "joined.skipped", "wb")  # noqa: SIM115  __exit__ closes it
        self._records: dict[str, PartRecord] = {}
        self._num_parts: dict[str, int] = {}
        self._unit = self._block = 0
        self._records_before = [0] * len(sources)
        self.num_skipped = 0
        self.num_tokens = 0

    def __enter__(self) -> "ShardAssembly":
        return self

    def add(self, name: str, record: PartRecord) -> None:
        """Take a part, and join what can be joined."""
        self._records[name] = record
        while (ready := self._next_name()) in self._records:
            self._join(ready, self._records.pop(ready))
            self._block += 1

    def end_stream(self, name: str, num_parts: int) -> None:
        """Take the number of parts of a stream."""
        self._num_parts[name] = num_parts

    def publish(self, output_prefix: str, prefixes: Sequence[str]) -> list[ShardTotals]:
        """Write the shards, one a key, and the list of what was skipped, if anything was."""
        assert self._next_name() is None and not self._records
        self._skipped.close()
        if self.num_skipped:
            os.replace(self._skipped.name, skipped_path(output_prefix))
        else:
            skipped_path(output_prefix).unlink(missing_ok=True)
        return [joiner.publish(prefix) for joiner, prefix in zip(self._joiners, prefixes, strict=True)]

    def __exit__(self, *_: object) -> None:
        self._skipped.close()
        for joiner in self._joiners:
            joiner.close()

    def _next_name(self) -> Optional[str]:
        """The part that comes next; None at the end."""
        while self._unit < len(self._units):
            unit = self._units[self._unit]
            if isinstance(unit, InputPart):
                if self._block == 0:
                    return unit.name
            elif self._block < self._num_parts.get(unit.name, self._block + 1):
                return unit.part_name(self._block)
            self._unit, self._block = self._unit + 1, 0
        return None

    def _join(self, name: str, record: PartRecord) -> None:
        for joiner in self._joiners:
            joiner.add(name)
        if record.num_skipped:
            self._list_skipped(name)
        for source, count in record.num_records:
            self._records_before[source] += count
        self.num_skipped += record.num_skipped
        self.num_tokens += sum(record.num_tokens)

    def _list_skipped(self, name: str) -> None:
        lines = self._folder.skipped_path(name).read_text(encoding="utf-8").splitlines()
        for number, place, reason in sorted(map(parse_json, lines)):
            source = self._sources[number]
            found = {"path": source.path, source.record_name: self._records_before[number] + place + 1}
            line = json.dumps(found | {"reason": reason}, ensure_ascii=False)
            self._skipped.write(line.encode("utf-8", errors="replace") + b"\n")
