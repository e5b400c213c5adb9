"""Reading every byte detects every change of any byte, and the counts match the content."""

import dataclasses
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from shard_files import SUFFIXES, patch, write_megatron_shard, write_shard

from megafp8.data import shard_summary, shard_verification, shards
from megafp8.data.shard_summary import LengthBin, document_lengths, read_documents, summarize_shard
from megafp8.data.shard_verification import ENDS, INDEX_HASH, MANIFEST, STRUCTURE, TOKEN_IDS, TOKENS_HASH, verify_shard
from megafp8.data.shards import load_manifest, manifest_path, read_index, save_manifest

DOCUMENTS = [[[1, 2], [3]], [], [[4]], [[], [5, 6, 7]], [[8] * 9], []]


@pytest.fixture
def copy(tmp_path, shard):
    for suffix in SUFFIXES:
        shutil.copy2(shard + suffix, tmp_path / f"copy{suffix}")
    return str(tmp_path / "copy")


def states(prefix, **options):
    return {result.check: result.passed for result in verify_shard(prefix, **options)}


def test_an_intact_shard_passes(shard):
    seen = []
    assert states(shard, on_progress=seen.append) == dict.fromkeys(
        (STRUCTURE, MANIFEST, INDEX_HASH, TOKENS_HASH, TOKEN_IDS, ENDS), True
    )
    assert sum(seen) == os.stat(f"{shard}.bin").st_size


def test_without_a_manifest_nothing_is_verified(copy):
    manifest_path(copy).unlink()
    expected = {STRUCTURE: True, MANIFEST: None, INDEX_HASH: None, TOKENS_HASH: None, TOKEN_IDS: None}
    assert states(copy) == expected
    assert states(copy, vocab_size=320) == expected | {TOKEN_IDS: True}
    assert states(copy, vocab_size=300) == expected | {TOKEN_IDS: False}


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_every_changed_byte_is_detected(copy, suffix):
    content = Path(copy + suffix).read_bytes()
    random = np.random.default_rng(3)
    for offset in random.integers(0, len(content), 60).tolist():
        patch(copy + suffix, offset, bytes([content[offset] ^ int(random.integers(1, 256))]))
        assert False in states(copy).values()
        patch(copy + suffix, offset, content[offset : offset + 1])
    assert False not in states(copy).values()


@pytest.mark.parametrize("block_bytes", [8, 1 << 24])
def test_the_first_id_beyond_the_vocabulary_is_named(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(shard_verification, "BLOCK_BYTES", block_bytes)
    prefix = write_shard(tmp_path / "s", [[1] * 10, [], [2, 3, 70], [90]])
    (result,) = [each for each in verify_shard(prefix, vocab_size=50) if each.check == TOKEN_IDS]
    assert result.passed is False
    assert result.detail == "ids from 1 to 90, vocabulary 0 to 49: first token 12 of the shard, in document 2"
    assert states(prefix, vocab_size=91)[TOKEN_IDS] is True
    negative = write_shard(tmp_path / "n", [[1], [-2]], np.int32)
    assert states(negative, vocab_size=50)[TOKEN_IDS] is False


def test_wrong_counts_in_the_manifest_are_detected(copy):
    manifest = load_manifest(copy)
    save_manifest(copy, dataclasses.replace(manifest, num_tokens=manifest.num_tokens + 1, dtype="int32"))
    (result,) = [each for each in verify_shard(copy) if each.check == MANIFEST]
    assert result.passed is False
    assert f"num_tokens is {manifest.num_tokens}, expected {manifest.num_tokens + 1}" in result.detail
    assert "dtype is uint16, expected int32" in result.detail
    manifest_path(copy).write_text("{")
    assert states(copy)[MANIFEST] is False


@pytest.mark.parametrize("block", [1, 2, 1 << 20])
def test_documents_without_an_end_are_detected(tmp_path, monkeypatch, shard, block):
    monkeypatch.setattr(shard_verification, "INDEX_BLOCK", block)
    known = dataclasses.replace(load_manifest(shard), tokenizer={"eod": 9, "vocab_size": 10})
    good = write_megatron_shard(tmp_path / "good", [[[1], [9]], [], [[9]], [[], [5, 9], []], []])
    bad = write_megatron_shard(tmp_path / "bad", [[[1], [9]], [], [[9]], [[9], [5]], [[9]]])
    for prefix in (good, bad):
        save_manifest(prefix, known)
    assert states(good)[ENDS] is True
    (result,) = [each for each in verify_shard(bad) if each.check == ENDS]
    assert (result.passed, result.detail) == (False, "document 3 ends with token 5, expected 9")


def test_unreadable_parts_give_no_other_findings(copy):
    os.truncate(f"{copy}.bin", 10)
    (result,) = verify_shard(copy)
    assert (result.check, result.passed) == (STRUCTURE, False)


@pytest.mark.parametrize("block", [1, 2, 1 << 20])
def test_lengths_and_documents(tmp_path, monkeypatch, block):
    for module in (shards, shard_verification, shard_summary):
        monkeypatch.setattr(module, "INDEX_BLOCK", block)
    prefix = write_megatron_shard(tmp_path / "s", DOCUMENTS, np.int32, modes=True)
    whole = [[token for sequence in document for token in sequence] for document in DOCUMENTS]
    assert document_lengths(read_index(prefix)).tolist() == [len(document) for document in whole] == [3, 0, 1, 3, 9, 0]
    for first in range(7):
        assert [ids.tolist() for ids in read_documents(prefix, first, 3, 100)] == whole[first : first + 3]
    assert [ids.tolist() for ids in read_documents(prefix, 0, 1, 2)] == [[1, 2]]
    summary = summarize_shard(prefix)
    assert (summary.num_documents, summary.num_sequences, summary.num_tokens, summary.num_empty) == (6, 6, 16, 2)
    assert (summary.dtype, summary.has_modes, summary.shortest, summary.longest) == ("int32", True, 0, 9)
    assert summary.quantiles[0.5] == 1
    assert summary.quantiles[0.99] == 3
    assert summary.bins == (
        LengthBin(low=0, high=0, num_documents=2, num_tokens=0),
        LengthBin(low=1, high=1, num_documents=1, num_tokens=1),
        LengthBin(low=2, high=3, num_documents=2, num_tokens=6),
        LengthBin(low=4, high=7, num_documents=0, num_tokens=0),
        LengthBin(low=8, high=15, num_documents=1, num_tokens=9),
    )


def test_a_shard_without_documents(tmp_path):
    summary = summarize_shard(write_shard(tmp_path / "s", []))
    assert (summary.num_documents, summary.longest, summary.bins, summary.quantiles) == (0, 0, (), {})
    assert summarize_shard(write_shard(tmp_path / "e", [[], []])).bins == (
        LengthBin(low=0, high=0, num_documents=2, num_tokens=0),
    )
