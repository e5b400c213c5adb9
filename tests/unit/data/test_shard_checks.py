"""Every kind of damage to a shard is one clear error when it is opened, and never other tokens."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from shard_files import SUFFIXES, patch, write_shard

from megafp8.data import shard_checks
from megafp8.data.manifest import load_manifest, manifest_path
from megafp8.data.shard_checks import check_shard, content_key
from megafp8.data.shards import read_index
from megafp8.data.tokenizer import build_tokenizer
from megafp8.errors import DataError

COUNTS_OFFSET = 18  # magic 9, version 8, dtype code 1


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
    monkeypatch.setattr(shard_checks, "FULL_SCAN_TOKENS", 1000)
    monkeypatch.setattr(shard_checks, "SCAN_CHUNK_TOKENS", 100)
    monkeypatch.setattr(shard_checks, "SCAN_CHUNKS", 10)
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
