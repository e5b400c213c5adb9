"""Text files as batches of undecoded documents, with the place of each for messages.

Reading is cheap and stays in one process; decoding, parsing and tokenizing a batch is the workers' part. Memory is
bounded by the size of a batch, whatever the size of the file (a `.txt` file is one document and is held whole).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import BinaryIO

from megafp8.errors import DataError

DEFAULT_BATCH_BYTES = 1 << 20
JSONL_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
TEXT_SUFFIXES = (".txt", ".txt.gz")


@dataclass(frozen=True)
class RawBatch:
    """Consecutive documents of one file, as bytes.

    Attributes:
        path: the file.
        is_jsonl: each document is a line of JSON; else the one document is the whole file.
        first_line: number of the first document's line, from 1.
        documents: the lines, blank ones included so that line numbers stay right.
        input_bytes: bytes of the file (compressed, where it is) that were consumed for this batch.
    """

    path: str
    is_jsonl: bool
    first_line: int
    documents: tuple[bytes, ...]
    input_bytes: int


def expand_inputs(inputs: Sequence[str]) -> list[Path]:
    """Return the files that names and glob patterns stand for: patterns sorted, the rest in the order given.

    Raises:
        DataError: a name or pattern without a file, or a kind of file that is not known; all of them at once.
    """
    files: list[Path] = []
    problems: list[str] = []
    for name in inputs:
        found = sorted(glob(name, recursive=True)) if has_magic(name) else [name]
        matches = [Path(path) for path in found if Path(path).is_file()]
        if not matches:
            problems.append(f"--input {name}: there is no such file.")
        for path in matches:
            if not path.name.endswith(JSONL_SUFFIXES + TEXT_SUFFIXES):
                known = ", ".join(JSONL_SUFFIXES + TEXT_SUFFIXES)
                problems.append(f"--input {path}: its kind is told by its name, and known are {known}.")
        files.extend(matches)
    if problems:
        raise DataError("\n".join(problems))
    return files


def read_batches(path: Path, *, batch_bytes: int = DEFAULT_BATCH_BYTES) -> Iterator[RawBatch]:
    """Yield the documents of one file in order, about `batch_bytes` of text at a time.

    Raises:
        DataError: a damaged gzip file, with the number of the last line that could be read.
    """
    with open(path, "rb") as raw, gzip.open(raw) if path.name.endswith(".gz") else nullcontext(raw) as stream:
        if path.name.endswith(TEXT_SUFFIXES):
            yield _whole_file(path, raw, stream)
        else:
            yield from _line_batches(path, raw, stream, batch_bytes)


def parse_texts(batch: RawBatch, keys: Sequence[str]) -> list[tuple[str, ...]]:
    """Return for each document its texts under `keys`; blank lines are no documents, a `.txt` has one text for all.

    Raises:
        DataError: not UTF-8, not JSON, a missing key or a value that is not text; with file and line number.
    """
    if not batch.is_jsonl:
        return [(_decode(batch.documents[0], batch.path),) * len(keys)]
    texts = []
    for line_number, line in enumerate(batch.documents, start=batch.first_line):
        if line.strip():
            texts.append(_texts_of_line(line, keys, f"{batch.path} line {line_number}"))
    return texts


def _line_batches(path: Path, raw: BinaryIO, stream: BinaryIO, batch_bytes: int) -> Iterator[RawBatch]:
    first_line = 1
    position = 0
    while lines := _read_lines(path, stream, batch_bytes, first_line):
        # readlines() reads ahead through a buffer, so the position is that of the buffer: good enough for progress.
        yield RawBatch(str(path), True, first_line, tuple(lines), raw.tell() - position)
        first_line += len(lines)
        position = raw.tell()


def _read_lines(path: Path, stream: BinaryIO, batch_bytes: int, first_line: int) -> list[bytes]:
    try:
        return stream.readlines(batch_bytes)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path} is damaged after line {first_line - 1} ({error}). Fetch or compress the file again."
        ) from error


def _whole_file(path: Path, raw: BinaryIO, stream: BinaryIO) -> RawBatch:
    try:
        content = stream.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}). Fetch or compress the file again.") from error
    return RawBatch(str(path), False, 1, (content,), raw.tell())


def _texts_of_line(line: bytes, keys: Sequence[str], place: str) -> tuple[str, ...]:
    try:
        document = json.loads(_decode(line, place))
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{place} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"{place} is a JSON {type(document).__name__}, not an object with the keys {', '.join(keys)}.")
    texts = []
    for key in keys:
        text = document.get(key)
        if not isinstance(text, str):
            state = f"a {type(text).__name__}" if key in document else "missing"
            raise DataError(
                f"{place}: the value of {key!r} is {state}, not text; this document has the keys "
                f"{', '.join(map(repr, document))}. Name the right one with --json-keys."
            )
        texts.append(text)
    return tuple(texts)


def _decode(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8: {error.reason} at byte {error.start}.") from error
