"""Division of the input of preprocessing into parts. One worker tokenizes a part in one go.

The division depends only on the input and on the size of a part. Small files are put together, large ones are divided.
A large compressed file is a `Stream`: how many parts it has is known only after it has been read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Optional, Union

from megafp8.config.schema import DataConfig
from megafp8.data.preprocessing import table_readers
from megafp8.data.preprocessing.sources import MAX_DOCUMENT_BYTES, InputSource
from megafp8.data.tokenizers.build import AUTO

MIN_PARTS, MAX_PARTS = 8, 4096
SMALLEST_PART_BYTES = 1 << 20
# A compressed file below this fraction of a part, in bytes on disk, is not divided.
SMALL_STREAM_FRACTION = 0.25
# A part of a stream is held in memory before it is parsed.
MAX_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class InputRange:
    """Consecutive records of one file.

    Attributes:
        source: index of the file among the sources.
        start, stop: bytes; for a table row groups or rows. See `readers` and `table_readers`.
        input_bytes: size on disk.
    """

    source: int
    start: int
    stop: int
    input_bytes: int


@dataclass(frozen=True)
class InputPart:
    """Pieces, at most one of a file, that are tokenized in one go. Names sort in the order of the input."""

    name: str
    pieces: tuple[InputRange, ...]

    def part_names(self) -> Iterable[str]:
        """Return its own name."""
        return (self.name,)


@dataclass(frozen=True)
class Stream:
    """A large compressed file. Part k, from 0, has the records that end in block k of its content."""

    name: str
    source: int
    block_bytes: int

    def part_names(self) -> Iterable[str]:
        """Return the names of its parts, in order, without an end."""
        return map(self.part_name, itertools.count())

    def part_name(self, block: int) -> str:
        """Return the name of the part with the records that end in this block."""
        return f"{self.name}-{block:06d}"


@dataclass(frozen=True)
class Stripe:
    """Every `count`-th part of a stream, from `number` on: one worker's share of it."""

    stream: Stream
    number: int
    count: int


Unit = Union[InputPart, Stream]
InputTask = Union[InputPart, Stripe]


def choose_part_bytes(total_bytes: int, wanted_bytes: int, machines: int = 1) -> int:
    """Return the size of a part: what the encoder wants, within limits on the number of parts.

    A small input has at least 8 parts for each machine, so that all workers have work. A large one has at most 4096, or
    8 for each machine, so that the folder does not get a million files.
    """
    least = MIN_PARTS * machines
    return max(min(wanted_bytes, total_bytes // least), total_bytes // max(MAX_PARTS, least), SMALLEST_PART_BYTES)


def divide(sources: Sequence[InputSource], keys: Sequence[str], part_bytes: int) -> list[Unit]:
    """Divide the input, in order.

    Args:
        sources: the input.
        keys: columns of tables.
        part_bytes: bytes of text in a part.

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
        if source.delimiter is not None and not source.is_divisible and _is_large(source, part_bytes):
            close_part()
            units.append(Stream(f"{len(units):06d}", number, min(part_bytes, MAX_BLOCK_BYTES)))
            continue
        for piece in _divide_source(number, source, keys, part_bytes):
            if pieces and pieces[-1].source == number:
                last = pieces.pop()
                piece = InputRange(number, last.start, piece.stop, last.input_bytes + piece.input_bytes)
            pieces.append(piece)
            if sum(piece.input_bytes for piece in pieces) >= part_bytes:
                close_part()
    close_part()
    return units


def build_tasks(units: Sequence[Union[Unit, InputTask]], takers: int) -> list[InputTask]:
    """Return the tasks of some takers, workers or machines. Streams come first, because each takes long, and are
    striped over the takers that would have none."""
    streams = [Stripe(unit, 0, 1) if isinstance(unit, Stream) else unit for unit in units]
    stripes = [stripe for stripe in streams if isinstance(stripe, Stripe)]
    ways = -(-takers // len(stripes)) if stripes else 1
    return [
        *(
            Stripe(stripe.stream, stripe.number + stripe.count * way, stripe.count * ways)
            for stripe in stripes
            for way in range(ways)
        ),
        *(unit for unit in units if isinstance(unit, InputPart)),
    ]


def _is_large(source: InputSource, part_bytes: int) -> bool:
    """Whether a file that can only be read from its start is worth more than one part."""
    return source.num_bytes > part_bytes * (SMALL_STREAM_FRACTION if source.compression else 1)


def _divide_source(number: int, source: InputSource, keys: Sequence[str], part_bytes: int) -> Iterator[InputRange]:
    if source.is_table:
        for start, stop, input_bytes in table_readers.divide(source, keys, part_bytes):
            yield InputRange(number, start, stop, input_bytes)
    elif source.is_divisible:
        for start in range(0, source.num_bytes, part_bytes):
            stop = min(start + part_bytes, source.num_bytes)
            yield InputRange(number, start, stop, stop - start)
    else:
        yield InputRange(number, 0, source.num_bytes, source.num_bytes)


@dataclass(frozen=True, kw_only=True)
class PreprocessJob:
    """What to make.

    Attributes:
        inputs: files, folders or glob patterns, see `sources.find_sources`.
        output_prefix: the shard of each key is `PREFIX_KEY_document.bin/.idx`.
        tokenizer: the data section that names the tokenizer.
        dataset: name, configuration and split of a Hugging Face dataset, in place of `inputs`.
        vocab_size: --vocab-size, see `build_tokenizer`.
        json_keys: keys of JSON lines, or columns of a table, that hold the texts; one shard each.
        text_separator: separates the documents of a text file; None: each file is one document.
        max_document_bytes: a longer line or text stops the job.
        append_eod: end each document with the end-of-document token.
        skip_bad: skip and count records that are no documents; False stops at the first one.
        encoder: one of `tokenizers.build.ENCODERS`.
        workers: number of processes that tokenize; 1 tokenizes in this process.
        overwrite: make shards again that exist.
    """

    inputs: tuple[str, ...] = ()
    output_prefix: str
    tokenizer: DataConfig
    dataset: Optional[tuple[str, Optional[str], str]] = None
    vocab_size: Optional[int] = None
    json_keys: tuple[str, ...] = ("text",)
    text_separator: Optional[str] = None
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    append_eod: bool = False
    skip_bad: bool = False
    encoder: str = AUTO
    workers: int = 1
    overwrite: bool = False

    def shard_prefix(self, key: str) -> str:
        """Return the prefix of the shard of one key, as Megatron names it."""
        return f"{self.output_prefix}_{key}_document"
