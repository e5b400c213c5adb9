"""How the input of preprocessing is divided into parts, each of which one worker tokenizes in one go.

The division follows from the input and the size of a part alone. Small files are put together, large ones divided. Of a
large compressed file, how many parts it has is known only when it has been read; it is a `Stream`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Union

from megafp8.data import table_readers
from megafp8.data.readers import Source

MIN_PARTS, MAX_PARTS = 8, 4096
SMALLEST_PART_BYTES = 1 << 20
# A compressed file of this share of a part, as it is on the disk, is not worth dividing.
SMALL_STREAM_FRACTION = 0.25
# A part of a stream is held in memory before it is parsed.
MAX_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class Piece:
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
class Part:
    """Pieces that are tokenized in one go. Names sort in the order of the input."""

    name: str
    pieces: tuple[Piece, ...]


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


Unit = Union[Part, Stream]
Task = Union[Part, Stripe]


def part_bytes_for(total_bytes: int, wanted_bytes: int) -> int:
    """Return the size of a part: what the encoder wants, but of a small input at least 8, of a large one at most 4096
    parts, so that there is work for all and no folder of a million files."""
    return max(min(wanted_bytes, total_bytes // MIN_PARTS), total_bytes // MAX_PARTS, SMALLEST_PART_BYTES)


def divide(sources: Sequence[Source], keys: Sequence[str], part_bytes: int) -> list[Unit]:
    """Divide the input, in order.

    Args:
        sources: the input.
        keys: columns of tables.
        part_bytes: of text.

    Raises:
        CapabilityError, DataError: a table that cannot be read.
    """
    units: list[Unit] = []
    pieces: list[Piece] = []

    def close_part() -> None:
        if pieces:
            units.append(Part(f"{len(units):06d}", tuple(pieces)))
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


def tasks_of(units: Sequence[Unit], workers: int) -> list[Task]:
    """Return the tasks for workers: streams first, since each is long, divided among the workers that have no other."""
    streams = [unit for unit in units if isinstance(unit, Stream)]
    stripes = -(-workers // len(streams)) if streams else 1
    return [
        *(Stripe(stream, number, stripes) for stream in streams for number in range(stripes)),
        *(unit for unit in units if isinstance(unit, Part)),
    ]


def is_large(source: Source, part_bytes: int) -> bool:
    """Whether a file that can be read from its start only is worth more than one part."""
    return source.num_bytes > part_bytes * (SMALL_STREAM_FRACTION if source.compression else 1)


def _pieces_of(number: int, source: Source, keys: Sequence[str], part_bytes: int) -> Iterator[Piece]:
    if source.is_table:
        for start, stop, input_bytes in table_readers.divide(source, keys, part_bytes):
            yield Piece(number, start, stop, input_bytes)
    elif source.is_divisible:
        for start in range(0, source.num_bytes, part_bytes):
            stop = min(start + part_bytes, source.num_bytes)
            yield Piece(number, start, stop, stop - start)
    else:
        yield Piece(number, 0, source.num_bytes, source.num_bytes)
