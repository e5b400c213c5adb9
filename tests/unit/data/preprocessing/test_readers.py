"""Files, their division, and the records of each piece: every record once and in order, for any division."""

import gzip
import importlib.util
import os
import random
import tracemalloc
from pathlib import Path

import pytest

from megafp8.data.preprocessing import readers
from megafp8.data.preprocessing.readers import DamagedFileError, read_blocks, read_range, records_before
from megafp8.data.preprocessing.sources import find_sources, overlaps_itself
from megafp8.errors import CapabilityError, DataError

needs_zstd = pytest.mark.skipif(importlib.util.find_spec("backports.zstd") is None, reason="backports.zstd")


def compressed(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(content)
    if name.endswith(".zst"):
        from backports import zstd

        return zstd.compress(content, options={zstd.CompressionParameter.checksum_flag: 1})
    return content


def source_of(path: Path, content: bytes, separator=None, **options):
    path.write_bytes(compressed(path.name, content))
    (source,) = find_sources([str(path)], separator, **options)
    return source


def flat(lists) -> list[bytes]:
    return [record for records in lists for record in records]


def random_records(rng: random.Random, alphabet: bytes) -> list[bytes]:
    return [bytes(rng.choices(alphabet, k=rng.choice((0, 1, 3, 40)))) for _ in range(rng.randrange(30))]


@pytest.mark.parametrize("separator", ["\n", "<|x|>", "ab"])
def test_any_division_gives_every_record_once(tmp_path, monkeypatch, separator):
    monkeypatch.setattr(readers, "BLOCK_BYTES", 7)
    rng = random.Random(separator)
    for _ in range(100):
        # Letters of the separator inside of records: incomplete separators.
        records = [record.replace(separator.encode(), b"") for record in random_records(rng, b"xyz<|ab")]
        content = separator.encode().join(records) + (separator.encode() if rng.random() < 0.5 else b"")
        source = source_of(tmp_path / "a.txt", content, separator)
        expected = content.removesuffix(separator.encode()).split(separator.encode()) if content else []
        cuts = sorted({0, len(content), *(rng.randrange(len(content) + 1) for _ in range(rng.randrange(6)))})
        pieces = [flat(read_range(source, start, stop)) for start, stop in zip(cuts, cuts[1:], strict=False)]
        assert flat(pieces) == expected
        for number, start in enumerate(cuts[:-1]):
            if pieces[number]:
                assert records_before(source, start) == sum(map(len, pieces[:number]))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", pytest.param("a.jsonl.zst", marks=needs_zstd)])
@pytest.mark.parametrize("block_bytes", [1, 10, 1 << 20])
def test_blocks_give_every_record_once(tmp_path, name, block_bytes):
    records = random_records(random.Random(block_bytes), b"xyz") + [b"last"]
    source = source_of(tmp_path / name, b"\n".join(records))
    blocks = list(read_blocks(source, block_bytes))
    assert flat(found for _, found in blocks) == records
    assert sum(count for count, _ in blocks) == source.num_bytes
    assert flat(read_range(source, 0, source.num_bytes)) == records


def test_a_separator_that_overlaps_itself_is_read_from_the_start(tmp_path):
    assert overlaps_itself(b"\n\n") and overlaps_itself(b"aba")
    assert not (overlaps_itself(b"\n") or overlaps_itself(b"<|endoftext|>"))
    source = source_of(tmp_path / "a.txt", b"one\n\n\n\n\ntwo\n\nthree", "\n\n")
    assert not source.is_divisible
    for block_bytes in range(1, 20):
        assert flat(found for _, found in read_blocks(source, block_bytes)) == [b"one", b"", b"\ntwo", b"three"]


def test_a_text_file_is_one_document(tmp_path):
    for name in ("a.txt", "a.txt.gz"):
        source = source_of(tmp_path / name, b"\xef\xbb\xbfone\n\ntwo")
        assert flat(read_range(source, 0, source.num_bytes)) == [b"one\n\ntwo"]


def test_a_large_text_file_needs_a_separator(tmp_path):
    with pytest.raises(DataError, match="--text-separator.*--max-document-bytes"):
        source_of(tmp_path / "a.txt", b"x" * 101, max_document_bytes=100)
    source = source_of(tmp_path / "b.txt.gz", b"x" * 1000, max_document_bytes=100)
    with pytest.raises(DataError, match="b.txt.gz is one document of more than 100 bytes.*--text-separator"):
        list(read_range(source, 0, source.num_bytes))


NAMES = ("a.jsonl", "a.txt", "a.jsonl.gz", pytest.param("a.jsonl.zst", marks=needs_zstd))


def pieces_of(source):
    """The records of a file, in two ranges if it is divisible."""
    cuts = [0, 20, source.num_bytes] if source.is_divisible else [0, source.num_bytes]
    return (read_range(source, start, stop) for start, stop in zip(cuts, cuts[1:], strict=False))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1000])
@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("separator", ["\n", "<|x|>"])
def test_document_size_limit(tmp_path, monkeypatch, name, block_bytes, index, separator):
    """For any blocks, also for the last document, and where the limit cuts a separator."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", block_bytes)
    if not name.endswith(".txt"):
        separator = "\n"
    for length, is_read in ((100, True), (101, False)):
        records = [b"one", b"two", b"three"]
        records.insert(index, b"x" * length)
        source = source_of(tmp_path / name, separator.encode().join(records), separator, max_document_bytes=100)
        for read in (
            lambda source=source: flat(read_range(source, 0, source.num_bytes)),
            lambda source=source: flat(found for _, found in read_blocks(source, block_bytes)),
            lambda source=source: flat(flat(map(list, pieces_of(source)))),
        ):
            if is_read:
                assert read() == records
                continue
            with pytest.raises(DataError, match=f"{name} has a (line|document) of more than 100 bytes.*--max-doc"):
                read()


def test_the_limit_does_not_change_blocks(tmp_path):
    """Otherwise parts that were built before a long document would not fit those after it with a higher limit."""
    records = [b"x" * length for length in (5, 90, 3, 60, 100, 1, 1, 80)]
    low, high = (
        list(read_blocks(source_of(tmp_path / "a.jsonl.gz", b"\n".join(records), max_document_bytes=limit), 7))
        for limit in (100, 10_000)
    )
    assert [found for _, found in low] == [found for _, found in high]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz", pytest.param("a.jsonl.zst", marks=needs_zstd)])
def test_a_highly_compressed_document_needs_little_memory(tmp_path, name):
    (tmp_path / name).write_bytes(compressed(name, bytes(1 << 26)))
    (source,) = find_sources([str(tmp_path / name)], max_document_bytes=1 << 20)
    assert source.num_bytes < 1 << 18
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="of more than 1048576 bytes"):
            list(read_range(source, 0, source.num_bytes))
        assert tracemalloc.get_traced_memory()[1] < 1 << 25
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_byte_order_mark_is_not_text(tmp_path, name):
    source = source_of(tmp_path / name, b"\xef\xbb\xbf{}\n\xef\xbb\xbf\n")
    assert flat(read_range(source, 0, source.num_bytes)) == [b"{}", b"\xef\xbb\xbf"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", pytest.param("a.jsonl.zst", marks=needs_zstd)])
@pytest.mark.parametrize("damage", ["cut", "cut early", "flipped"])
def test_damage_is_reported_after_the_intact_records(tmp_path, name, damage):
    rng = random.Random(0)
    records = [b"%d %s" % (number, rng.randbytes(20).hex().encode()) for number in range(20_000)]
    source = source_of(tmp_path / name, b"\n".join(records))
    content = bytearray(Path(source.path).read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    else:
        del content[len(content) // 2 if damage == "cut" else 4 :]
    Path(source.path).write_bytes(content)
    found = []
    with pytest.raises(DamagedFileError):
        for block in read_range(source, 0, source.num_bytes):
            found += block
    # A flipped bit may give other text before the checksum detects it.
    assert damage == "flipped" or found == records[: len(found)]
    if damage == "cut":
        assert len(records) * 0.4 < len(found) < len(records) * 0.6


def test_inputs_are_found_and_all_problems_reported(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt", "d.bin", "sub/e.ndjson.gz", "sub/deep/f.parquet", "g.parquet.gz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_sources([str(tmp_path / "c.txt"), str(tmp_path / "*.jsonl"), str(tmp_path / "sub")])
    assert [Path(source.path).name for source in found] == ["c.txt", "a.jsonl", "b.jsonl", "f.parquet", "e.ndjson.gz"]
    assert [source.kind for source in found] == ["text", "jsonl", "jsonl", "parquet", "jsonl"]
    (tmp_path / "empty").mkdir()
    names = ["none.jsonl", "d.bin", "*.zst", "g.parquet.gz", "empty"]
    with pytest.raises(DataError) as caught:
        find_sources([str(tmp_path / name) for name in names])
    assert str(caught.value).count("--input") == len(names)


def test_an_undecodable_file_name_is_refused(tmp_path):
    open(os.fsencode(tmp_path) + b"/a\xff.txt", "w").close()
    with pytest.raises(DataError, match="it is not UTF-8. Rename the file"):
        find_sources([str(tmp_path)])


def test_files_written_by_tools_are_excluded(tmp_path):
    """Found by folder or pattern, they are skipped with a warning. A file that is named itself is read."""
    written = (
        "t.json",
        "gpt/tokenizer.json",
        "gpt/training.json",
        "gpt/vocab.json",
        "gpt/merges.txt",
        "gpt2-vocab.json",
        "c_text_document.manifest.json",
        "c.skipped.jsonl",
        "c.parts/job.json",
        "c.parts/000000.json",
    )
    text = ("a.jsonl", "b/t.json", "b/training.json", "b/c.parts.txt")
    for name in (*written, *text, "t.model", "t.vocab"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    messages = []
    found = find_sources([str(tmp_path)], on_message=messages.append)
    assert sorted(Path(source.path).relative_to(tmp_path).as_posix() for source in found) == sorted(text)
    assert len(messages) == 1 and f"ignored {len(written)} files" in messages[0]
    found = find_sources([str(tmp_path / "*.json*")], on_message=messages.append)
    assert [Path(source.path).name for source in found] == ["a.jsonl"] and "ignored 4 files" in messages[1]
    assert (
        len(find_sources([str(tmp_path / "c.skipped.jsonl")], on_message=messages.append)) == 1 and len(messages) == 2
    )
    with pytest.raises(DataError, match="no such file of a supported type"):
        find_sources([str(tmp_path / "gpt")])


def test_a_file_is_not_read_twice(tmp_path):
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match=r"b\.txt and 1 more is given twice"):
        find_sources([str(tmp_path / "b.txt"), str(tmp_path / "c.txt"), str(tmp_path)])
    assert len(find_sources([str(tmp_path / "a.txt"), str(tmp_path / "[bc].txt")])) == 3


def test_zstandard_without_its_library(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "backports.zstd", None)
    monkeypatch.setitem(__import__("sys").modules, "backports", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    with pytest.raises((CapabilityError, DataError), match="backports.zstd"):
        find_sources([str(tmp_path / "a.jsonl.zst")])


def test_an_empty_separator_is_refused():
    with pytest.raises(DataError, match="--text-separator is empty"):
        find_sources(["a.txt"], "")
