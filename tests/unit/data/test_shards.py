import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from megafp8.data import shards
from megafp8.data.manifest import load_manifest, manifest_path
from megafp8.data.shards import ShardWriter, check_shard, content_key, encode_index, read_index, token_dtype
from megafp8.data.tokenizer import build_tokenizer
from megafp8.errors import DataError

SUFFIXES = (".bin", ".idx", ".manifest.json")
COUNTS_OFFSET = 18  # magic 9, version 8, dtype code 1


def write_shard(prefix, documents, dtype=np.uint16):
    with ShardWriter(str(prefix), np.dtype(dtype)) as writer:
        for document in documents:
            ids = np.asarray(document, dtype=dtype)
            writer.add_documents(ids.tobytes(), np.array([len(ids)], np.int32))
        writer.finish()
    return str(prefix)


@pytest.fixture
def copy(tmp_path, shard):
    """Prefix of a copy of the shared shard that a test may damage."""
    for suffix in SUFFIXES:
        shutil.copy2(shard + suffix, tmp_path / f"copy{suffix}")
    return str(tmp_path / "copy")


@pytest.fixture
def bare_copy(copy):
    """The same without a manifest, as Megatron makes shards."""
    manifest_path(copy).unlink()
    return copy


def patch(path, offset, content):
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(content)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize(
    "documents", [[[1, 2, 3]], [[5] * 7, [], [1], [2, 3], []], [[]], [], [list(range(n)) for n in range(40)]]
)
def test_same_bytes_as_megatron_cores_builder(tmp_path, documents, dtype):
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in documents:
        builder.add_document(document, [len(document)] if document else [])
    builder.finalize(str(tmp_path / "theirs.idx"))
    write_shard(tmp_path / "ours", documents, dtype)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_megatron_core_reads_what_was_written(tmp_path):
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    documents = [[1, 2, 3], [4], [5, 6]]
    dataset = indexed_dataset.IndexedDataset(write_shard(tmp_path / "s", documents))
    assert [list(map(int, dataset[n])) for n in range(len(dataset))] == documents


def test_a_shard_larger_than_4_gib_keeps_its_pointers():
    lengths = np.full(3, 2**31 - 1, np.int32)
    index = encode_index(lengths, np.dtype(np.int32))
    assert np.frombuffer(index[34 + 12 : 34 + 36], "<i8").tolist() == [0, 4 * (2**31 - 1), 8 * (2**31 - 1)]


@pytest.mark.parametrize(("vocab_size", "name"), [(65499, "uint16"), (65500, "int32"), (128256, "int32")])
def test_dtype_is_megatrons(vocab_size, name):
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    assert token_dtype(vocab_size).name == name
    assert token_dtype(vocab_size) == np.dtype(indexed_dataset.DType.optimal_dtype(vocab_size))


def test_nothing_is_left_when_writing_fails(tmp_path):
    with pytest.raises(RuntimeError), ShardWriter(str(tmp_path / "s"), np.dtype(np.uint16)) as writer:
        writer.add_documents(b"\1\0", np.array([1], np.int32))
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_a_good_shard_passes(copy, tokenizer_config):
    tokenizer = build_tokenizer(tokenizer_config)
    index = check_shard(copy, tokenizer.vocab_size, tokenizer_identifiers=tokenizer.unique_identifiers)
    assert index.num_tokens == load_manifest(copy).num_tokens == Path(f"{copy}.bin").stat().st_size // 2
    assert index.dtype == np.uint16


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file(bare_copy, suffix):
    Path(bare_copy + suffix).unlink()
    with pytest.raises(DataError, match=f"copy\\{suffix} missing"):
        check_shard(bare_copy, 320)


@pytest.mark.parametrize(("given", "hint"), [("x_text_document.bin", "without .bin"), ("x", "mean .*x_text_document")])
def test_wrong_spelling_of_the_prefix_gets_a_hint(tmp_path, given, hint):
    write_shard(tmp_path / "x_text_document", [[1, 2]])
    with pytest.raises(DataError, match=hint):
        check_shard(str(tmp_path / given), 10)


@pytest.mark.parametrize("num_bytes", [0, 2, 1001, -2])
def test_cut_or_grown_tokens(bare_copy, num_bytes):
    path = Path(f"{bare_copy}.bin")
    content = path.read_bytes()
    path.write_bytes(content[:num_bytes] if num_bytes >= 0 else content + b"\0\0")
    with pytest.raises(DataError) as caught:
        check_shard(bare_copy, 320)
    assert str(len(content)) in str(caught.value)
    assert str(path.stat().st_size) in str(caught.value)


@pytest.mark.parametrize("num_bytes", [0, 20, 34, 100, -1])
def test_cut_index(bare_copy, num_bytes):
    path = Path(f"{bare_copy}.idx")
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(DataError, match="bytes"):
        check_shard(bare_copy, 320)


@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [
        (0, b"X", "not an index in Megatron's format"),
        (9, b"\2", "version 2"),
        (17, b"\7", "dtype code 7"),
        (17, b"\4", "bytes"),
        (COUNTS_OFFSET, struct.pack("<Q", 2**40), f"{2**40} sequences"),
        (COUNTS_OFFSET + 8, struct.pack("<Q", 2**60), "document entries"),
        (34, struct.pack("<i", 3), "sequence 1 starts at byte"),
        (34, struct.pack("<i", -3), "sequence 0 has the length -3"),
        (34 + 4 * 60, struct.pack("<q", 2), "sequence 0 starts at byte 2"),
        (34 + 4 * 60 + 8 * 30, struct.pack("<q", -8), "sequence 30 starts at byte -8"),
        (34 + 12 * 60 + 8 * 20, struct.pack("<q", 7), "document index"),
        (34 + 12 * 60, struct.pack("<q", 1), "document index"),
        (34 + 12 * 60 + 8 * 60, struct.pack("<q", 59), "document index"),
    ],
)
def test_flipped_bytes_in_the_index(bare_copy, offset, content, message):
    check_shard(bare_copy, 320)
    patch(f"{bare_copy}.idx", offset, content)
    with pytest.raises(DataError, match=message):
        check_shard(bare_copy, 320)


def test_last_length_flipped_shows_in_the_size_of_the_tokens(bare_copy):
    length = int(read_index(bare_copy).sequence_lengths[59])
    patch(f"{bare_copy}.idx", 34 + 4 * 59, struct.pack("<i", length + 1))
    with pytest.raises(DataError, match=r"copy\.bin is"):
        check_shard(bare_copy, 320)


def test_any_flip_in_the_index_shows_against_the_manifest(copy):
    patch(f"{copy}.idx", 17, b"\3")  # uint16 read as int16: every size still fits
    with pytest.raises(DataError, match="SHA-256"):
        check_shard(copy, 320)


def test_tokens_beyond_the_vocabulary(tmp_path):
    prefix = write_shard(tmp_path / "s", [[1, 2], [59995]])
    with pytest.raises(DataError, match="to 59995.*32000"):
        check_shard(prefix, 32000)
    with pytest.raises(DataError, match="to 59994"):
        check_shard(prefix, 59995)
    check_shard(prefix, 59996)


def test_negative_tokens(tmp_path):
    prefix = write_shard(tmp_path / "s", [[1, -2]], np.int32)
    with pytest.raises(DataError, match="from -2"):
        check_shard(prefix, 32000)


def test_large_shards_are_searched_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FULL_SCAN_TOKENS", 1000)
    monkeypatch.setattr(shards, "SCAN_CHUNK_TOKENS", 100)
    monkeypatch.setattr(shards, "SCAN_CHUNKS", 10)
    bad_at_the_end = np.zeros(5000, np.int64)
    bad_at_the_end[-1] = 500
    with pytest.raises(DataError, match="500"):
        check_shard(write_shard(tmp_path / "s", [bad_at_the_end]), 400)


def test_empty_shard(tmp_path):
    with pytest.raises(DataError, match="holds no tokens"):
        check_shard(write_shard(tmp_path / "s", [[]]), 10)


def test_another_tokenizers_shard(copy, tokenizer_config):
    identifiers = dict(build_tokenizer(tokenizer_config).unique_identifiers)
    with pytest.raises(DataError, match="another tokenizer"):
        check_shard(copy, 320, tokenizer_identifiers=identifiers | {"sha256": ["0" * 64]})


def test_broken_manifest(copy):
    manifest_path(copy).write_text('{"format": ')
    with pytest.raises(DataError, match="not a manifest"):
        check_shard(copy, 320)
    manifest_path(copy).write_text(json.dumps({"format": "megafp8-shard-9"}))
    with pytest.raises(DataError, match="megafp8-shard-9"):
        check_shard(copy, 320)


def test_content_key_follows_content_not_path(tmp_path, shard, copy):
    assert content_key(copy) == content_key(shard)
    one = write_shard(tmp_path / "s", [[1, 2, 3]])
    key = content_key(one)
    assert content_key(one) == key
    assert content_key(write_shard(tmp_path / "s", [[1, 2, 4]])) != key
