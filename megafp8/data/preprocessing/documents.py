"""Document parsing: extracts the texts from records, and says what is wrong with a record that is no document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Optional

from megafp8.data.preprocessing import table_readers
from megafp8.data.preprocessing.readers import DamagedFileError, read_range
from megafp8.data.preprocessing.sources import JSONL, InputSource
from megafp8.errors import DataError

MAX_SHOWN = 60

# orjson is several times as fast as json. Lines that it refuses go to json, so that both give the same documents.
_fast_loads: Optional[Callable[[bytes], Any]] = None
with suppress(ImportError):
    from orjson import loads as _orjson_loads

    _fast_loads = _orjson_loads


@dataclass
class Documents:
    """Consecutive documents of one file.

    Attributes:
        columns: the texts, one list per key.
        numbers: record number of each document, from 0.
        bad: record number of each record that is no document, and the reason.
        num_records: records that were read, blank lines included.
    """

    columns: list[list[str]]
    numbers: Sequence[int]
    bad: list[tuple[int, str]] = field(default_factory=list)
    num_records: int = 0


def read_texts(sources: Sequence[InputSource], key: str) -> Iterator[str]:
    """Yield the text under one key of every document, in order.

    Raises:
        DataError: a record that is no document, with file and number.
    """
    for source in sources:
        stop = table_readers.table_end(source) if source.is_table else source.num_bytes
        try:
            for documents in read_documents(source, (key,), 0, stop):
                for number, reason in documents.bad:
                    raise DataError(f"{source.path} {source.record_name} {number + 1}: {reason}.")
                yield from documents.columns[0]
        except DamagedFileError as error:
            raise DataError(f"{source.path} is damaged: {error}. Download or compress the file again.") from error


def read_documents(source: InputSource, keys: Sequence[str], start: int, stop: int) -> Iterator[Documents]:
    """Yield the documents of a range of a file, block by block. Its records are numbered from 0.

    Args:
        source: the file.
        keys: keys of the texts.
        start, stop: range of bytes (see `readers.read_range`), or of a table (see `table_readers.read_rows`).

    Raises:
        DamagedFileError: after the documents before the damage.
    """
    first = 0
    if source.is_table:
        for columns in table_readers.read_rows(source, keys, start, stop):
            yield parse_rows(columns, first, keys)
            first += len(columns[0])
    else:
        for records in read_range(source, start, stop):
            yield parse_records(source, records, first, keys)
            first += len(records)


def parse_records(source: InputSource, records: Sequence[bytes], first: int, keys: Sequence[str]) -> Documents:
    """Parse records of a file that is not a table."""
    if source.kind == JSONL:
        return parse_json_lines(records, first, keys)
    return parse_plain_texts(records, first, len(keys))


def parse_json_lines(lines: Sequence[bytes], first: int, keys: Sequence[str]) -> Documents:
    """Extract the texts under `keys` from lines of JSON. Blank lines are no documents, and not bad.

    Args:
        lines: without line ends.
        first: number of the first line.
        keys: keys of the texts.
    """
    columns = _parse_valid_lines(lines, keys)
    if columns is not None:
        return Documents(columns, range(first, first + len(lines)), num_records=len(lines))
    return _parse_each(lines, first, len(keys), lambda line: _parse_line(line, keys))


def parse_plain_texts(texts: Sequence[bytes], first: int, num_keys: int) -> Documents:
    """Decode plain texts; each is the document of every key. Blank texts are no documents, and not bad."""
    return _parse_each(texts, first, num_keys, lambda text: None if not text.strip() else (_decode(text),) * num_keys)


def parse_rows(columns: Sequence[Sequence[Any]], first: int, keys: Sequence[str]) -> Documents:
    """Take the texts from rows of a table, see `table_readers.read_rows`."""
    num_rows = len(columns[0])
    if _are_strings(columns):
        return Documents([list(column) for column in columns], range(first, first + num_rows), num_records=num_rows)
    rows = list(zip(*columns, strict=True))
    return _parse_each(rows, first, len(keys), lambda row: tuple(map(_parse_cell, row, keys)))


def _parse_each(
    records: Sequence[Any], first: int, num_keys: int, parse: Callable[[Any], Optional[Sequence[str]]]
) -> Documents:
    """Parse one record at a time. `parse` returns None for no document, and raises DataError for a bad one."""
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


def _parse_valid_lines(lines: Sequence[bytes], keys: Sequence[str]) -> Optional[list[list[str]]]:
    """Columns of texts with orjson; None without it, or if any line needs `_parse_line`."""
    if _fast_loads is None:
        return None
    try:
        objects = list(map(_fast_loads, lines))
        columns = [[item[key] for item in objects] for key in keys]
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return columns if _are_strings(columns) else None


def _are_strings(columns: Sequence[Sequence[Any]]) -> bool:
    return all(set(map(type, column)) <= {str} for column in columns)


def _parse_line(line: bytes, keys: Sequence[str]) -> Optional[tuple[str, ...]]:
    if not line.strip():
        return None
    text = _decode(line)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"it is not JSON: {reason}") from error
    if not isinstance(document, dict):
        raise DataError(f"it is a JSON {type(document).__name__}, not an object with the keys {', '.join(keys)}")
    return tuple(_text_under_key(document, key) for key in keys)


def _text_under_key(document: dict[str, Any], key: str) -> str:
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
            f"the value of {key!r} is not valid Unicode: an unpaired surrogate, \\u{ord(text[error.start]):04x}, at "
            f"character {error.start}"
        ) from error
    return text


def _parse_cell(cell: Any, key: str) -> str:
    if isinstance(cell, bytes):
        _decode(cell)  # raises: `table_readers` returns bytes only for text that is not UTF-8
    if not isinstance(cell, str):
        state = "missing" if cell is None else f"a {type(cell).__name__}"
        raise DataError(f"the value of {key!r} is {state}, not text")
    return cell


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        context = content[max(error.start - MAX_SHOWN // 2, 0) : error.start + MAX_SHOWN // 2]
        raise DataError(f"it is not valid UTF-8: {error.reason} at byte {error.start}, in {context!r}") from error
