"""Readers of tables, through pyarrow: Parquet files by row groups, Hugging Face datasets by rows.

Only the requested columns are read, about one block (4 MiB) at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Optional

from megafp8.data.preprocessing.readers import BLOCK_BYTES
from megafp8.data.preprocessing.sources import DATASET, PARQUET, InputSource
from megafp8.errors import CapabilityError, DataError
from megafp8.utils.installation import pip_install

DATASET_ROWS = 1024
SAMPLED_ROWS = 256


def find_dataset(name: str, config: Optional[str], split: str) -> InputSource:
    """Return the source of a Hugging Face dataset. It is downloaded if it is not in the library's cache.

    Args:
        name: name on the hub, or a folder.
        config: name of the dataset's configuration, such as sample-10BT.
        split: such as train; slices (train[:1%]) work too.

    Raises:
        CapabilityError: the library is not installed.
        DataError: it cannot load the dataset.
    """
    path = f"{name}:{config or ''}:{split}"
    dataset = _load_dataset(path)
    num_bytes = int(dataset.dataset_size or dataset.data.nbytes)
    return InputSource(path, DATASET, num_bytes, mtime_ns=0, fingerprint=dataset._fingerprint)


def divide(source: InputSource, keys: Sequence[str], piece_bytes: int) -> list[tuple[int, int, int]]:
    """Divide a table into pieces of about `piece_bytes` of uncompressed text.

    Returns:
        For each piece its first row group, its last row group + 1 and its share of `source.num_bytes`. For a dataset,
        rows in place of row groups.

    Raises:
        CapabilityError: pyarrow is not installed.
        DataError: no such file, or a column is missing or is not text.
    """
    sizes = _row_group_bytes(source, keys) if source.kind == PARQUET else _dataset_bytes(source, keys)
    end, total = sum(count for count, _ in sizes), max(sum(size for _, size in sizes), 1)
    pieces: list[tuple[int, int, int]] = []
    start = stop = piece_size = shared = 0
    for count, size in sizes:
        stop, piece_size = stop + count, piece_size + size
        if piece_size >= piece_bytes or stop == end:
            share = source.num_bytes - shared if stop == end else source.num_bytes * piece_size // total
            pieces.append((start, stop, share))
            start, piece_size, shared = stop, 0, shared + share
    return pieces


def read_rows(source: InputSource, keys: Sequence[str], start: int, stop: int) -> Iterator[list[list[Any]]]:
    """Yield the values of rows, block by block: one list per key, of str, bytes that are not UTF-8, and None.

    Args:
        source: a table.
        keys: the columns.
        start, stop: row groups of a Parquet file, rows of a dataset.
    """
    tables = _parquet_tables if source.kind == PARQUET else _dataset_tables
    for table in tables(source, keys, start, stop):
        yield [_values(table.column(key)) for key in keys]


def table_end(source: InputSource) -> int:
    """Return the `stop` with which `read_rows` reads the complete table."""
    return len(_load_dataset(source.path)) if source.kind == DATASET else _open_parquet(source).metadata.num_row_groups


def rows_before(source: InputSource, start: int) -> int:
    """Return how many rows come before a piece that starts at `start`."""
    if source.kind == DATASET:
        return start
    metadata = _open_parquet(source).metadata
    return sum(metadata.row_group(group).num_rows for group in range(start))


def _row_group_bytes(source: InputSource, keys: Sequence[str]) -> list[tuple[int, int]]:
    """For each row group 1 and the bytes of its text, uncompressed."""
    file = _open_parquet(source)
    _check_columns(source, file.schema_arrow, keys)
    return [(1, _text_bytes(file.metadata.row_group(group), keys)) for group in range(file.metadata.num_row_groups)]


def _text_bytes(row_group: Any, keys: Sequence[str]) -> int:
    columns = (row_group.column(number) for number in range(row_group.num_columns))
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema in keys)


def _dataset_bytes(source: InputSource, keys: Sequence[str]) -> list[tuple[int, int]]:
    """For each block of rows the number of rows and the bytes of their text, estimated from the first rows."""
    dataset = _load_dataset(source.path)
    _check_columns(source, dataset.data.schema, keys)
    sample = dataset.with_format("arrow")[: min(SAMPLED_ROWS, len(dataset))]
    row_bytes = sum(sample.column(key).nbytes for key in keys) / max(len(sample), 1)
    counts = [min(DATASET_ROWS, len(dataset) - row) for row in range(0, len(dataset), DATASET_ROWS)]
    return [(count, int(count * row_bytes) + 1) for count in counts]


def _parquet_tables(source: InputSource, keys: Sequence[str], start: int, stop: int) -> Iterator[Any]:
    file = _open_parquet(source)
    try:
        for group in range(start, stop):
            row_group = file.metadata.row_group(group)
            row_bytes = _text_bytes(row_group, keys) / max(row_group.num_rows, 1)
            num_rows = max(int(BLOCK_BYTES / max(row_bytes, 1)), 1)
            yield from file.iter_batches(num_rows, row_groups=[group], columns=list(keys), use_threads=False)
    except (OSError, _import_pyarrow(source.path).ArrowException) as error:
        raise DataError(f"{source.path} is damaged ({error}). Download the file again.") from error


def _dataset_tables(source: InputSource, keys: Sequence[str], start: int, stop: int) -> Iterator[Any]:
    dataset = _load_dataset(source.path).select_columns(list(keys)).with_format("arrow")
    for row in range(start, stop, DATASET_ROWS):
        yield dataset[row : min(row + DATASET_ROWS, stop)]


def _values(column: Any) -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        import pyarrow

        return [_decode(value) for value in column.cast(pyarrow.large_binary()).to_pylist()]


def _decode(value: Optional[bytes]) -> Any:
    try:
        return None if value is None else value.decode("utf-8")
    except UnicodeDecodeError:
        return value


def _check_columns(source: InputSource, schema: Any, keys: Sequence[str]) -> None:
    for key in keys:
        if key not in schema.names:
            raise DataError(
                f"{source.path} has no column {key!r}; its columns are {', '.join(map(repr, schema.names))}. Choose "
                "one with --json-keys."
            )
        kind = str(schema.field(key).type)
        if kind not in ("string", "large_string", "string_view"):
            raise DataError(
                f"{source.path}: the column {key!r} contains {kind}, not text. Choose another with --json-keys."
            )


def _open_parquet(source: InputSource) -> Any:
    pyarrow = _import_pyarrow(source.path)
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(source.path, memory_map=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{source.path} is not a Parquet file, or is damaged ({error}).") from error


def _import_pyarrow(path: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise CapabilityError(
            f"{path} is Parquet, which needs the package pyarrow ({error}). Install it: {pip_install('data')}"
        ) from error
    return pyarrow


@lru_cache(maxsize=1)
def _load_dataset(path: str) -> Any:
    name, config, split = path.rsplit(":", 2)
    try:
        import datasets
    except ImportError as error:
        raise CapabilityError(
            f"--hf-dataset {name} needs the package datasets ({error}). Install it: {pip_install('datasets')}"
        ) from error
    try:
        return datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # the library raises errors of many types, its dependencies' among them
        raise DataError(
            f"--hf-dataset {name} (configuration {config or 'none'}, split {split}) cannot be loaded: {error}"
        ) from error
