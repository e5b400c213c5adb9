"""Merged and split shards equal those of megatron-core's builder. Incompatible ones are refused."""

import dataclasses
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from shard_files import content_of, patch, read_sequences, write_megatron_shard, write_shard
from shard_writer import ShardWriter

from megafp8.data import shard_merge
from megafp8.data.shard_merge import MergeJob, find_shards, merge_shards
from megafp8.data.shard_verification import check_shard, failures, verify_shard
from megafp8.data.shards import ShardManifest, build_document_index, load_manifest, manifest_path, save_manifest
from megafp8.errors import ConfigError, DataError

A = [[[1, 2], [3]], [], [[4]]]
B = [[], [[5, 6, 7]], [[8] * 9], [[9]]]
TOKENIZER = {"class": "NullTokenizer", "sha256": [], "vocab_size": 101, "eod": 100}


def write_with_manifest(prefix, documents, dtype=np.uint16, **changes):
    """A shard with the manifest of preprocessing."""
    with ShardWriter(str(prefix), np.dtype(dtype)) as writer:
        for document in documents:
            ids = np.asarray(document, dtype=dtype)
            writer.add_documents(ids.tobytes(), np.array([len(ids)], np.int32))
        totals = dataclasses.asdict(writer.finish())
    known = {
        "tokenizer": TOKENIZER, "json_key": "text", "append_eod": False, "dtype": np.dtype(dtype).name,
        "sources": [{"path": f"{Path(prefix).name}.jsonl"}], "tokenizer_settings": {"tokenizer_type": "NullTokenizer"},
    }  # fmt: skip
    save_manifest(str(prefix), ShardManifest(**{**known, **totals, **changes}))
    return str(prefix)


@pytest.fixture
def pair(tmp_path):
    """Two shards of three and four documents."""
    return (
        write_with_manifest(tmp_path / "a", [[1, 2, 3], [], [4]]),
        write_with_manifest(tmp_path / "b", [[], [5, 6, 7], [8] * 9, [9]]),
    )


def merge(inputs, output, **options):
    return merge_shards(MergeJob(inputs=tuple(inputs), output_prefix=str(output), **options))


@pytest.mark.parametrize(("dtype", "modes"), [(np.uint16, False), (np.int32, True)])
def test_merged_shards_equal_megatrons_builder(tmp_path, dtype, modes):
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    inputs = [
        write_megatron_shard(tmp_path / name, documents, dtype, modes=modes)
        for name, documents in (("a", A), ("b", B), ("c", A[:1]))
    ]
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype, multimodal=modes)
    for prefix in inputs:
        builder.add_index(prefix)
    builder.finalize(str(tmp_path / "theirs.idx"))
    summary = merge(inputs, tmp_path / "ours")
    assert content_of(str(tmp_path / "ours")) == content_of(str(tmp_path / "theirs"))
    manifest = load_manifest(str(tmp_path / "ours"))
    assert summary.shards == ((str(tmp_path / "ours"), manifest),)
    assert manifest.tokenizer is None
    assert failures(verify_shard(str(tmp_path / "ours"), vocab_size=10)) == []
    check_shard(str(tmp_path / "ours"), 10, tokenizer_identifiers=TOKENIZER)


@pytest.mark.parametrize("copy_bytes", [3, 1 << 23])
@pytest.mark.parametrize(
    ("options", "names", "cuts"),
    [
        ({"documents_per_part": 3}, ["00000-of-00003", "00001-of-00003", "00002-of-00003"], [0, 3, 6, 7]),
        ({"documents_per_part": 7}, ["00000-of-00001"], [0, 7]),
        ({"num_parts": 2}, ["00000-of-00002", "00001-of-00002"], [0, 6, 7]),  # 16 tokens and 1
        ({"num_parts": 3}, ["00000-of-00003", "00001-of-00003", "00002-of-00003"], [0, 5, 6, 7]),  # 7, 9 and 1
        ({"num_parts": 1}, ["00000-of-00001"], [0, 7]),
        ({"split": "4,2,1"}, ["train", "valid", "test"], [0, 4, 6, 7]),
        ({"split": "50,0,50"}, ["train", "test"], [0, 4, 7]),
        ({"split": "0.9,0.1"}, ["train", "valid"], [0, 6, 7]),
    ],
)
def test_split_shards_equal_megatrons_builder(tmp_path, monkeypatch, copy_bytes, options, names, cuts):
    monkeypatch.setattr(shard_merge, "COPY_BYTES", copy_bytes)
    inputs = [write_megatron_shard(tmp_path / name, part, np.int32) for name, part in (("a", A), ("b", B))]
    summary = merge(inputs, tmp_path / "out", **options)
    assert [prefix for prefix, _ in summary.shards] == [f"{tmp_path}/out_{name}" for name in names]
    for (prefix, manifest), first, last in zip(summary.shards, cuts[:-1], cuts[1:], strict=True):
        expected = write_megatron_shard(tmp_path / "expected", (A + B)[first:last], np.int32)
        assert content_of(prefix) == content_of(expected)
        assert failures(verify_shard(prefix)) == []
        assert sum(part["num_documents"] for part in manifest.parts) == last - first == manifest.num_documents


class CountedReads(Sequence):
    """An array of an index that counts the entries that are read."""

    def __init__(self, array):
        self.array, self.num_reads = array, 0

    def __len__(self):
        return len(self.array)

    def __getitem__(self, index):
        self.num_reads += 1
        return self.array[index]


def test_cuts_read_a_few_entries_of_an_index():
    """Arrays of a mapped index are not aligned, so that numpy's search would copy them, for every cut."""
    index = build_document_index(np.full(10_000, 7, np.int32), np.dtype(np.uint16))
    pointers, entries = CountedReads(index.sequence_pointers), CountedReads(index.document_indices)
    index = dataclasses.replace(index, sequence_pointers=pointers, document_indices=entries)
    outputs = shard_merge._plan_outputs(MergeJob(inputs=("a",), output_prefix="b", num_parts=10), [index])
    assert [output.last for output in outputs] == [1000 * part for part in range(1, 11)]
    assert pointers.num_reads < 200
    assert entries.num_reads < 200


def test_split_and_merged_shards_equal_the_original(tmp_path, shard):
    parts = merge([shard], tmp_path / "part", num_parts=7)
    sizes = [manifest.num_tokens for _, manifest in parts.shards]
    whole = load_manifest(shard)
    assert len(sizes) == 7
    assert max(sizes) - min(sizes) < 2 * whole.num_tokens / whole.num_documents * 3
    joined = merge([prefix for prefix, _ in parts.shards], tmp_path / "again")
    assert content_of(joined.shards[0][0]) == content_of(shard)
    ((_, manifest),) = joined.shards
    for name in ("tokenizer", "json_key", "append_eod", "bin_sha256", "idx_sha256", "sources", "tokenizer_settings"):
        assert getattr(manifest, name) == getattr(whole, name), name


def test_the_manifest_lists_the_inputs(tmp_path, pair):
    ((_, manifest),) = merge(pair, tmp_path / "out").shards
    assert [source["path"] for source in manifest.sources] == ["a.jsonl", "b.jsonl"]
    assert [(part["prefix"], part["first_document"], part["num_documents"]) for part in manifest.parts] == [
        (pair[0], 0, 3), (pair[1], 0, 4),
    ]  # fmt: skip
    assert manifest.tokenizer == TOKENIZER


def test_the_manifest_keeps_skipped_documents_and_encoder(tmp_path, pair):
    one = write_with_manifest(tmp_path / "one", [[1]], encoder="sentencepiece", num_skipped=2)
    two = write_with_manifest(tmp_path / "two", [[2]], encoder="sentencepiece", num_skipped=3)
    ((_, joined),) = merge([one, two], tmp_path / "joined").shards
    assert (joined.encoder, joined.num_skipped) == ("sentencepiece", 5)
    ((_, mixed),) = merge([one, pair[0]], tmp_path / "mixed").shards
    assert (mixed.encoder, mixed.num_skipped) == (None, 2)
    divided = merge([str(tmp_path / "joined")], tmp_path / "divided", num_parts=2).shards
    assert [(manifest.encoder, manifest.num_skipped) for _, manifest in divided] == [("sentencepiece", None)] * 2


def test_a_second_run_does_nothing_or_resumes(tmp_path, pair):
    options = {"documents_per_part": 2}
    made = [prefix for prefix, _ in merge(pair, tmp_path / "out", **options).shards]
    expected = {prefix: content_of(prefix) for prefix in made}
    times = {prefix: os.stat(f"{prefix}.bin").st_mtime_ns for prefix in made}
    assert merge(pair, tmp_path / "out", **options).unchanged == tuple(made)
    Path(f"{made[1]}.idx").unlink()  # the state that a killed job leaves of its current output
    assert merge(pair, tmp_path / "out", **options).unchanged == (made[0], *made[2:])
    assert {prefix: content_of(prefix) for prefix in made} == expected
    assert [prefix for prefix in made if os.stat(f"{prefix}.bin").st_mtime_ns != times[prefix]] == [made[1]]


def test_other_files_are_not_replaced_without_overwrite(tmp_path, pair):
    merge(pair, tmp_path / "out")
    before = content_of(str(tmp_path / "out"))
    for inputs in (pair[:1], pair[::-1]):
        with pytest.raises(DataError, match="already exists.*--overwrite"):
            merge(inputs, tmp_path / "out")
    assert content_of(str(tmp_path / "out")) == before
    merge(pair[:1], tmp_path / "out", overwrite=True)
    assert content_of(str(tmp_path / "out")) == content_of(pair[0])
    os.truncate(tmp_path / "out.bin", 2)
    with pytest.raises(DataError, match="incomplete"):
        merge(pair[:1], tmp_path / "out")
    manifest_path(str(tmp_path / "out")).unlink()
    with pytest.raises(DataError, match="already exists"):
        merge(pair[:1], tmp_path / "out")


@pytest.mark.parametrize("at", ["sync", "save_manifest", "publish_shard"])
def test_a_failed_job_leaves_no_complete_shard(tmp_path, pair, monkeypatch, at):
    before = set(tmp_path.iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(shard_merge, at, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            merge(pair, tmp_path / "out")
    left = set(tmp_path.iterdir()) - before
    assert left <= {tmp_path / "out.manifest.json"}
    merge(pair, tmp_path / "out")
    check_shard(str(tmp_path / "out"), 101)


@pytest.mark.parametrize("num_steps", [1, 4, 7, 9])
def test_a_killed_job_resumes_with_the_same_bytes(tmp_path, pair, monkeypatch, num_steps):
    monkeypatch.setattr(shard_merge, "COPY_BYTES", 4)
    options = {"num_parts": 3, "is_verified": False}
    expected = [content_of(prefix) for prefix, _ in merge(pair, tmp_path / "expected", **options).shards]
    child = os.fork()
    if child == 0:
        left = iter(range(num_steps))
        merge_shards(
            MergeJob(inputs=pair, output_prefix=str(tmp_path / "out"), **options),
            lambda _: None if next(left, None) is not None else os.kill(os.getpid(), signal.SIGKILL),
        )
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    (tmp_path / f".out_00001-of-00003.bin.elsewhere.{child}.tmp").touch()  # of another machine, where it may be alive
    assert list(tmp_path.glob(f".out*.{socket.gethostname()}.{child}.tmp"))
    assert [content_of(prefix) for prefix, _ in merge(pair, tmp_path / "out", **options).shards] == expected
    assert [path.name.split(".")[3] for path in tmp_path.glob(".*")] == ["elsewhere"]


def test_damaged_inputs_are_not_given_new_hashes(tmp_path, pair):
    patch(f"{pair[1]}.bin", 4, b"\1\0")
    with pytest.raises(DataError, match=f"{pair[1]} is damaged: SHA-256 of the tokens"):
        merge(pair, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    merge(pair, tmp_path / "out", is_verified=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": TOKENIZER | {"sha256": ["ab" * 32]}}, "different tokenizers:\n.*sha256 -.*\n.*sha256 abababab"),
        ({"append_eod": True}, "Only one of .* ends its documents"),
        ({"tokenizer": None}, "b: no manifest with the tokenizer.*--trust-missing-manifests"),
    ],
)
def test_incompatible_shards_are_refused(tmp_path, pair, change, message):
    other = write_with_manifest(tmp_path / "b", [[5]], **change)
    with pytest.raises(DataError, match=message):
        merge([pair[0], other], tmp_path / "out", is_verified=False)


def test_dtypes_and_modes_must_agree(tmp_path, pair):
    wide = write_with_manifest(tmp_path / "wide", [[5]], np.int32)
    with pytest.raises(DataError, match="uint16.*int32"):
        merge([pair[0], wide], tmp_path / "out")
    modes = write_megatron_shard(tmp_path / "modes", A, np.int32, modes=True)
    with pytest.raises(DataError, match="sequence modes"):
        merge([wide, modes], tmp_path / "out")


def test_a_missing_manifest_may_be_trusted(tmp_path, pair):
    bare = write_shard(tmp_path / "bare", [[7]])
    with pytest.raises(DataError, match=r"bare: no manifest"):
        merge([pair[0], bare], tmp_path / "out")
    ((prefix, manifest),) = merge([pair[0], bare], tmp_path / "out", trust_missing_manifests=True).shards
    assert manifest.tokenizer == TOKENIZER
    assert read_sequences(prefix) == [[1, 2, 3], [4], [7]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_parts": 2, "split": "1,1"}, "--num-parts and --split exclude each other"),
        ({"num_parts": 0}, "--num-parts 0: must be at least 1"),
        ({"documents_per_part": -1}, "--documents-per-part -1"),
        ({"split": "1,2,3,4"}, "--split 1,2,3,4 must be"),
        ({"num_parts": 8}, "No document would be in .*_00004-of-00008"),
        ({"split": "99,1"}, "No document would be in .*out_valid: there are only 7 documents"),
    ],
)
def test_impossible_jobs_are_refused(tmp_path, pair, options, message):
    with pytest.raises(ConfigError, match=message):
        merge(pair, tmp_path / "out", **options)


def test_inputs_are_not_outputs_and_not_named_twice(tmp_path, pair):
    with pytest.raises(DataError, match="is also an input"):
        merge(pair, pair[0])
    with pytest.raises(ConfigError, match="twice"):
        merge([pair[0], pair[0]], tmp_path / "out")


def test_a_folder_stands_for_its_shards(tmp_path, pair):
    (tmp_path / "lone.idx").touch()
    (tmp_path / "empty").mkdir()
    assert find_shards([str(tmp_path), "x"]) == (*pair, "x")
    with pytest.raises(DataError, match="has no shards"):
        find_shards([str(tmp_path / "empty")])
