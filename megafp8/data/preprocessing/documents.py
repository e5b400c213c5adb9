"""Records to texts: what is a document, and what is wrong with what is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from megafp8.data.preprocessing import table_readers
from megafp8.data.preprocessing.readers import JSONL, DamagedFileError, InputSource, read_range
from megafp8.errors import DataError

MAX_SHOWN = 60

try:  # several times as fast as json; what it refuses is asked of json, so that both give the same documents
    from orjson import loads as _fast_loads
except ImportError:
    _fast_loads = None


@dataclass
class Documents:
    """Consecutive documents of one file.

    Attributes:
        columns: their texts, a list for each key.
        numbers: the number of each document's record in its piece, from 0.
        bad: record number and reason of each record that is no document.
        num_records: records that were read, blank lines included.
    """

    columns: list[list[str]]
    numbers: Sequence[int]
    bad: list[tuple[int, str]] = field(default_factory=list)
    num_records: int = 0


def read_texts(sources: Sequence[InputSource], key: str) -> Iterator[str]:
    """Yield the texts under one key of all documents, in order.

    Raises:
        DataError: a record that is no document, with file and number.
    """
    for source in sources:
        stop = table_readers.end_of(source) if source.is_table else source.num_bytes
        try:
            for documents in read_documents(source, (key,), 0, stop):
                for number, reason in documents.bad:
                    raise DataError(f"{source.path} {source.record_name} {number + 1}: {reason}.")
                yield from documents.columns[0]
        except DamagedFileError as error:
            raise DataError(f"{source.path} is damaged: {error}. Fetch or compress the file again.") from error


def read_documents(
    source: InputSource, keys: Sequence[str], start: int, stop: int, first: int = 0
) -> Iterator[Documents]:
    """Yield documents of a file, block by block.

    Args:
        source: the file.
        keys: of the texts.
        start, stop: what of it to read: bytes, see `readers.read_range`; of a table, see `table_readers.read_rows`.
        first: number of the first record.

    Raises:
        DamagedFileError: after the documents before the damage.
    """
    if source.is_table:
        for columns in table_readers.read_rows(source, keys, start, stop):
            yield parse_rows(columns, first, keys)
            first += len(columns[0])
    else:
        for records in read_range(source, start, stop):
            yield parse_records(source, records, first, keys)
            first += len(records)


def parse_records(source: InputSource, records: Sequence[bytes], first: int, keys: Sequence[str]) -> Documents:
    """Parse records of a file that is no table."""
    if source.kind == JSONL:
        return parse_json_lines(records, first, keys)
    return parse_plain_texts(records, first, len(keys))


def parse_json_lines(lines: Sequence[bytes], first: int, keys: Sequence[str]) -> Documents:
    """Take the texts under `keys` out of lines of JSON. Blank lines are no documents, and not bad.

    Args:
        lines: without line ends.
        first: number of the first line.
        keys: of the texts.
    """
    fast = _parse_sound_lines(lines, keys)
    if fast is not None:
        return Documents(fast, range(first, first + len(lines)), num_records=len(lines))
    return _collect(lines, first, len(keys), lambda line: _texts_of_line(line, keys))


def parse_plain_texts(texts: Sequence[bytes], first: int, num_keys: int) -> Documents:
    """Decode plain texts; each is the document of every key. Blank ones are no documents, and not bad."""
    return _collect(texts, first, num_keys, lambda text: None if not text.strip() else (_decode(text),) * num_keys)


def parse_rows(columns: Sequence[Sequence[Any]], first: int, keys: Sequence[str]) -> Documents:
    """Take the texts of rows of a table, see `table_readers.read_rows`."""
    num_rows = len(columns[0])
    if all(set(map(type, column)) <= {str} for column in columns):
        return Documents([list(column) for column in columns], range(first, first + num_rows), num_records=num_rows)
    rows = list(zip(*columns, strict=True))
    return _collect(rows, first, len(keys), lambda row: tuple(map(_text_of_cell, row, keys)))


def _collect(
    records: Sequence[Any], first: int, num_keys: int, parse: Callable[[Any], Optional[Sequence[str]]]
) -> Documents:
    """Parse record by record; None is no document, a DataError a bad one."""
    found, numbers, bad = [], [], []
    for number, record in enumerate(records, start=first):
        try:
            texts = parse(record)
        except DataError as error:
            bad.append((number, str(error)))
        else:
            if texts is not None:
                found.append(texts)
                numbers.append(number)
    columns = [[texts[key] for texts in found] for key in range(num_keys)]
    return Documents(columns, numbers, bad, len(records))


def _parse_sound_lines(lines: Sequence[bytes], keys: Sequence[str]) -> Optional[list[list[str]]]:
    """The texts of lines that are all in order, or None when one of them wants a closer look."""
    if _fast_loads is None:
        return None
    try:
        objects = list(map(_fast_loads, lines))
        columns = [[item[key] for item in objects] for key in keys]
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return columns if all(set(map(type, column)) <= {str} for column in columns) else None


def _texts_of_line(line: bytes, keys: Sequence[str]) -> Optional[tuple[str, ...]]:
    if not line.strip():
        return None
    try:
        document = json.loads(_decode(line))
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"it is not JSON: {reason}") from error
    if not isinstance(document, dict):
        raise DataError(f"it is a JSON {type(document).__name__}, not an object with the keys {', '.join(keys)}")
    return tuple(_text_of_key(document, key) for key in keys)


def _text_of_key(document: dict[str, Any], key: str) -> str:
    text = document.get(key)
    if not isinstance(text, str):
        state = f"a {type(text).__name__}" if key in document else "missing"
        names = ", ".join(map(repr, document))
        shown = names if len(names) <= 5 * MAX_SHOWN else f"{names[: 5 * MAX_SHOWN]}..."
        raise DataError(f"the value of {key!r} is {state}, not text; the keys are {shown} (see --json-keys)")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the value of {key!r} is not Unicode: half of a surrogate pair, \\u{ord(text[error.start]):04x}, at "
            f"character {error.start}"
        ) from error
    return text


def _text_of_cell(cell: Any, key: str) -> str:
    if isinstance(cell, bytes):
        _decode(cell)
    if not isinstance(cell, str):
        state = "missing" if cell is None else f"a {type(cell).__name__}"
        raise DataError(f"the value of {key!r} is {state}, not text")
    return cell


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        place = content[max(error.start - MAX_SHOWN // 2, 0) : error.start + MAX_SHOWN // 2]
        raise DataError(f"it is not UTF-8: {error.reason} at byte {error.start}, in {place!r}") from error
