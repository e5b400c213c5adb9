"""The format: megatron-core writes the same bytes, and each reads what the other wrote."""

import numpy as np
import pytest
from shard_files import content_of, read_sequences, write_megatron_shard, write_shard
from shard_writer import ShardWriter, encode_index

from megafp8.data import shards
from megafp8.data.shards import read_index, token_dtype, write_index

DOCUMENTS = [[[1, 2], [3]], [], [[4]], [[], [5, 6, 7]], [[8] * 9]]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize(
    "documents", [[[1, 2, 3]], [[5] * 7, [], [1], [2, 3], []], [[]], [], [list(range(n)) for n in range(40)]]
)
def test_same_bytes_as_megatron_cores_builder(tmp_path, documents, dtype):
    as_sequences = [[document] if document else [] for document in documents]
    theirs = write_megatron_shard(tmp_path / "theirs", as_sequences, dtype)
    assert content_of(write_shard(tmp_path / "ours", documents, dtype)) == content_of(theirs)


def test_megatron_core_reads_our_shards(tmp_path):
    documents = [[1, 2, 3], [4], [5, 6]]
    assert read_sequences(write_shard(tmp_path / "s", documents)) == documents


@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("block", [1, 2, 1 << 20])
def test_parts_of_megatrons_shards_are_indexed_as_megatron_does(tmp_path, monkeypatch, modes, block):
    monkeypatch.setattr(shards, "INDEX_BLOCK", block)
    whole = read_index(write_megatron_shard(tmp_path / "whole", DOCUMENTS, np.int32, modes=modes))
    assert (whole.num_documents, len(whole.sequence_lengths), whole.num_tokens) == (5, 6, 16)
    assert (whole.sequence_modes is not None) == modes
    for first in range(5):
        for last in range(first, 6):
            expected = write_megatron_shard(tmp_path / "expected", DOCUMENTS[first:last], np.int32, modes=modes)
            # Out of a slice, so that its numbers do not start at 0.
            part = whole.documents(first, 5).documents(0, last - first)
            with open(tmp_path / "part.idx", "wb") as stream:
                write_index(stream, [part])
            assert (tmp_path / "part.idx").read_bytes() == content_of(expected)[1]
            with open(tmp_path / "twice.idx", "wb") as stream:
                write_index(stream, [part, whole])
            together = write_megatron_shard(
                tmp_path / "together", DOCUMENTS[first:last] + DOCUMENTS, np.int32, modes=modes
            )
            assert (tmp_path / "twice.idx").read_bytes() == content_of(together)[1]


def test_a_shard_larger_than_4_gib_keeps_its_pointers():
    lengths = np.full(3, 2**31 - 1, np.int32)
    index = encode_index(lengths, np.dtype(np.int32))
    assert np.frombuffer(index[34 + 12 : 34 + 36], "<i8").tolist() == [0, 4 * (2**31 - 1), 8 * (2**31 - 1)]


@pytest.mark.parametrize(("vocab_size", "name"), [(65499, "uint16"), (65500, "int32"), (128256, "int32")])
def test_dtype_is_megatrons(vocab_size, name):
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    assert token_dtype(vocab_size).name == name
    assert token_dtype(vocab_size) == np.dtype(indexed_dataset.DType.optimal_dtype(vocab_size))


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), ShardWriter(str(tmp_path / "s"), np.dtype(np.uint16)) as writer:
        writer.add_documents(b"\1\0", np.array([1], np.int32))
        raise RuntimeError
    assert not list(tmp_path.iterdir())
