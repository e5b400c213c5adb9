"""Every kind of damage to a shard is one error when it is opened, and never gives other tokens."""

import json
import multiprocessing
import os
import shutil
import struct
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from shard_files import SUFFIXES, patch, read_sequences, write_megatron_shard, write_shard

from megafp8.data import shard_verification
from megafp8.data.shard_verification import check_shard, content_key
from megafp8.data.shards import load_manifest, manifest_path, read_index
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.errors import DataError

DTYPE_OFFSET = 17  # magic 9, version 8
COUNTS_OFFSET = 18


@pytest.fixture
def copy(tmp_path, shard):
    """Prefix of a copy of the shared shard that a test may damage."""
    for suffix in SUFFIXES:
        shutil.copy2(shard + suffix, tmp_path / f"copy{suffix}")
    return str(tmp_path / "copy")


@pytest.fixture
def bare_copy(copy):
    """The same without a manifest, like Megatron's shards."""
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
        (0, b"X", "not an index in Megatron-LM's format"),
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


def test_a_flipped_last_length_contradicts_the_token_size(bare_copy):
    length = int(read_index(bare_copy).sequence_lengths[59])
    patch(f"{bare_copy}.idx", 34 + 4 * 59, struct.pack("<i", length + 1))
    with pytest.raises(DataError, match=r"copy\.bin has"):
        check_shard(bare_copy, 320)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("modes", [False, True])
def test_no_damage_to_the_index_gives_other_tokens(tmp_path, dtype, modes):
    """Without a manifest. Header, lengths and pointers reveal every change. Other changes read the same."""
    random = np.random.default_rng(5)
    documents = [[list(range(random.integers(0, 9))) for _ in range(random.integers(0, 3))] for _ in range(40)]
    prefix = write_megatron_shard(tmp_path / "s", documents, dtype, modes=modes)
    path, expected = Path(f"{prefix}.idx"), read_sequences(prefix)
    content = path.read_bytes()
    end_of_pointers = 34 + 12 * len(expected)
    flips = {int(offset): bytes([content[offset] ^ random.integers(1, 256)])
             for offset in (*range(34), *random.integers(34, len(content), 300))}  # fmt: skip
    passed = set()
    for offset, flip in flips.items():
        path.write_bytes(content[:offset] + flip + content[offset + 1 :])
        try:
            check_shard(prefix, 100)
        except DataError:
            continue
        passed.add(offset)
        assert read_sequences(prefix) == expected
    assert {offset for offset in passed if offset < end_of_pointers} <= {DTYPE_OFFSET}
    assert passed < set(flips)
    for length in range(0, len(content), 5):
        path.write_bytes(content[:length])
        with pytest.raises(DataError):
            check_shard(prefix, 100)


def test_any_flip_in_the_index_is_detected_by_the_manifest(copy):
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


@pytest.mark.parametrize(("vocab_size", "is_refused"), [(32768, False), (32769, True)])
def test_a_dtype_too_narrow_for_the_vocabulary(tmp_path, vocab_size, is_refused):
    """uint16 read as int16 is the same up to 32767, and negative beyond, which a check in chunks may miss."""
    prefix = write_shard(tmp_path / "s", [[1, 2, 3]])
    patch(f"{prefix}.idx", DTYPE_OFFSET, b"\3")
    if not is_refused:
        check_shard(prefix, vocab_size)
        return
    with pytest.raises(DataError, match="int16, whose maximum is 32767"):
        check_shard(prefix, vocab_size)


def test_large_shards_are_checked_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_verification, "FULL_SCAN_TOKENS", 1000)
    monkeypatch.setattr(shard_verification, "SCAN_CHUNK_TOKENS", 100)
    monkeypatch.setattr(shard_verification, "SCAN_CHUNKS", 10)
    bad_at_the_end = np.zeros(5000, np.int64)
    bad_at_the_end[-1] = 500
    with pytest.raises(DataError, match="500"):
        check_shard(write_shard(tmp_path / "s", [bad_at_the_end]), 400)


def run_unprivileged(function, *arguments):
    """Call a function in a process to which permissions apply. They do not apply to root."""
    context = multiprocessing.get_context("fork")
    become_nobody = (lambda: os.seteuid(65534)) if os.geteuid() == 0 else None
    with ProcessPoolExecutor(1, mp_context=context, initializer=become_nobody) as pool:
        return pool.submit(function, *arguments).result()


@pytest.fixture
def read_only_copy(copy):
    """A copy in a folder that everyone may read and no user may write to."""
    with tempfile.TemporaryDirectory() as folder:
        for suffix in SUFFIXES:
            shutil.copy(copy + suffix, folder)
        os.chmod(folder, 0o555)
        yield f"{folder}/copy"
        os.chmod(folder, 0o755)


def test_a_read_only_folder_is_enough(read_only_copy):
    assert run_unprivileged(check_shard, read_only_copy, 320).num_tokens > 0
    assert run_unprivileged(content_key, read_only_copy) == content_key(read_only_copy)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_unreadable_file_is_an_error(read_only_copy, suffix):
    os.chmod(read_only_copy + suffix, 0)
    with pytest.raises(DataError, match=f"copy\\{suffix} cannot be read: Permission denied"):
        run_unprivileged(check_shard, read_only_copy, 320)


def test_empty_shard(tmp_path):
    with pytest.raises(DataError, match="has no tokens"):
        check_shard(write_shard(tmp_path / "s", [[]]), 10)


def test_another_tokenizers_shard(copy, tokenizer_config):
    identifiers = dict(build_tokenizer(tokenizer_config).unique_identifiers)
    with pytest.raises(DataError, match="a different tokenizer") as caught:
        check_shard(copy, 320, tokenizer_identifiers=identifiers | {"sha256": ["0" * 64]})
    for text in (identifiers["sha256"][0][:12], "0" * 12, "vocab_size 320", "--allow-other-tokenizer"):
        assert text in str(caught.value)
    check_shard(copy, 320)


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


def test_content_key_of_a_shard_without_a_manifest_stays_with_a_copy(tmp_path):
    key = content_key(write_shard(tmp_path / "s", [[1, 2, 3]]))
    for suffix in (".bin", ".idx"):
        shutil.copyfile(tmp_path / f"s{suffix}", tmp_path / f"copy{suffix}")
        os.utime(tmp_path / f"copy{suffix}", ns=(10**18, 10**18))
    assert content_key(str(tmp_path / "copy")) == key


def test_content_key_of_a_large_shard_uses_chunks_and_size(tmp_path, monkeypatch):
    for name, value in (("FULL_SCAN_TOKENS", 100), ("SCAN_CHUNKS", 4), ("SCAN_CHUNK_TOKENS", 10)):
        monkeypatch.setattr(f"megafp8.data.shard_verification.{name}", value)
    ids = np.arange(300)
    key = content_key(write_shard(tmp_path / "s", [ids]))
    for offset, is_seen in ((0, True), (299, True), (100, True), (50, False)):
        changed = ids.copy()
        changed[offset] += 1
        assert (content_key(write_shard(tmp_path / "s", [changed])) != key) is is_seen, offset
