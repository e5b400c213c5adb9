"""Parquet files and datasets as input: pieces cover every row once, and non-text columns are refused."""

import subprocess
import sys

import pytest

from megafp8.data.preprocessing import table_readers
from megafp8.data.preprocessing.sources import find_sources
from megafp8.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"text {number} \u00e9" * (1 + number % 5) for number in range(100)]


def write(path, columns, **options):
    parquet.write_table(pyarrow.table(columns), path, **options)
    (source,) = find_sources([str(path)])
    return source


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "a.parquet", {"id": range(100), "text": TEXTS, "url": TEXTS[::-1]}, row_group_size=7)


@pytest.mark.parametrize("piece_bytes", [1, 500, 1 << 30])
def test_pieces_cover_every_row_once(source, piece_bytes, monkeypatch):
    monkeypatch.setattr(table_readers, "BLOCK_BYTES", 100)
    pieces = table_readers.divide(source, ("text",), piece_bytes)
    assert [start for start, _, _ in pieces] == [0, *(stop for _, stop, _ in pieces[:-1])]
    assert pieces[-1][1] == table_readers.table_end(source) == 15
    assert sum(share for *_, share in pieces) == source.num_bytes
    assert len(pieces) == {1: 15, 1 << 30: 1}.get(piece_bytes, len(pieces))
    assert table_readers.rows_before(source, pieces[-1][0]) == (98 if piece_bytes == 1 else pieces[-1][0] * 7)
    rows = [
        row
        for start, stop, _ in pieces
        for columns in table_readers.read_rows(source, ("text", "url"), start, stop)
        for row in zip(*columns, strict=True)
    ]
    assert rows == list(zip(TEXTS, TEXTS[::-1], strict=True))


def test_an_empty_file(tmp_path):
    source = write(tmp_path / "a.parquet", {"text": pyarrow.array([], pyarrow.string())})
    assert [rows for *rows, _ in table_readers.divide(source, ("text",), 1)] in ([], [[0, 1]])


def test_missing_and_undecodable_values(tmp_path):
    values = pyarrow.array([b"a", None, b"\xff", b"b"], pyarrow.binary())
    undecodable = pyarrow.Array.from_buffers(pyarrow.string(), 4, values.buffers())
    source = write(tmp_path / "a.parquet", {"text": undecodable})
    assert list(table_readers.read_rows(source, ("text",), 0, 1)) == [[["a", None, b"\xff", "b"]]]


def test_columns_that_are_no_text_are_refused(source, tmp_path):
    with pytest.raises(DataError, match="no column 'body'; its columns are 'id', 'text', 'url'.*--json-keys"):
        table_readers.divide(source, ("body",), 1)
    with pytest.raises(DataError, match="column 'id' contains int64, not text"):
        table_readers.divide(source, ("id",), 1)


@pytest.mark.parametrize("remaining_bytes", [0, 10, 1000])
def test_a_damaged_file_is_one_error(source, remaining_bytes):
    with open(source.path, "r+b") as stream:
        stream.truncate(remaining_bytes)
    with pytest.raises(DataError, match="a.parquet is not a Parquet file, or is damaged"):
        table_readers.divide(source, ("text",), 1)


def test_damage_inside_a_file_is_one_error(tmp_path):
    source = write(tmp_path / "a.parquet", {"text": [str(n) * 9 for n in range(5000)]}, compression="gzip")
    with open(source.path, "r+b") as stream:
        stream.seek(200)
        stream.write(b"\xff" * 500)
    with pytest.raises(DataError, match="a.parquet is damaged"):
        list(table_readers.read_rows(source, ("text",), 0, 1))


def test_without_the_libraries(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"")
    code = (
        "import sys; sys.modules['pyarrow'] = sys.modules['datasets'] = None\n"
        "from megafp8.data.preprocessing import sources, table_readers\n"
        "from megafp8.errors import CapabilityError\n"
        f"source, = sources.find_sources([{str(tmp_path / 'a.parquet')!r}])\n"
        "for call in (lambda: table_readers.divide(source, ['text'], 1),\n"
        "             lambda: table_readers.find_dataset('name', None, 'train')):\n"
        "    try:\n"
        "        call()\n"
        "    except CapabilityError as error:\n"
        "        print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install -e '.[data]'" in result.stdout, result.stderr
    assert "--hf-dataset name needs the package datasets" in result.stdout


@pytest.fixture
def dataset(source, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = str(tmp_path)
    return table_readers.find_dataset(folder, None, "train")


def test_a_dataset_gives_every_row_once(dataset, monkeypatch):
    monkeypatch.setattr(table_readers, "DATASET_ROWS", 30)
    pieces = table_readers.divide(dataset, ("text",), 1)
    assert len(pieces) == 4
    found = [text for start, stop, _ in pieces for (texts,) in table_readers.read_rows(dataset, ("text",), start, stop)
             for text in texts]  # fmt: skip
    assert found == TEXTS
    assert dataset.describe()["fingerprint"]


def test_a_missing_dataset_is_an_error(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match="--hf-dataset .* cannot be loaded"):
        table_readers.find_dataset(str(tmp_path / "none"), None, "train")
