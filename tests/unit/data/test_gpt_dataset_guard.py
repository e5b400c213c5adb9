"""A shard that changes during a run stops the run. It never gives other tokens."""

import multiprocessing
import os
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from shard_files import SUFFIXES, patch, write_megatron_shard, write_shard

pytest.importorskip("megatron.core")
from megafp8.data.gpt_dataset import GuardedIndexedDataset
from megafp8.data.shards import manifest_path
from megafp8.errors import DataError

DOCUMENTS = [[1, 2, 3], [4], [], [5, 6]]
SEQUENCES = [[1, 2, 3], [4], [5, 6]]


def read_all(dataset):
    return [dataset[n].tolist() for n in range(len(dataset))]


@pytest.fixture(params=[True, False], ids=["mapped", "file"])
def is_mapped(request):
    return request.param


@pytest.fixture
def prefix(tmp_path):
    """A shard whose files are old, so that a change is visible at any resolution of the modification time."""
    prefix = write_shard(tmp_path / "s", DOCUMENTS)
    for suffix in (".bin", ".idx"):
        os.utime(prefix + suffix, ns=(10**18, 10**18))
    return prefix


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("modes", [True, False])
def test_reads_equal_megatron_cores_dataset(tmp_path, is_mapped, dtype, modes):
    documents = [[[1, 2, 3], []], [], [[4], [50_000]]]
    prefix = write_megatron_shard(tmp_path / "s", documents, dtype, modes=modes)
    dataset = GuardedIndexedDataset(prefix, mmap=is_mapped)
    assert read_all(dataset) == [[1, 2, 3], [], [4], [50_000]]
    assert dataset[0].dtype == dtype
    assert dataset.get(0, offset=1, length=1).tolist() == [2]
    assert [part.tolist() for part in dataset[0:3]] == [[1, 2, 3], [], [4]]


@pytest.mark.parametrize(
    "damage",
    [
        lambda prefix: patch(f"{prefix}.bin", 0, b"\7"),
        lambda prefix: os.truncate(f"{prefix}.bin", 0),
        lambda prefix: os.truncate(f"{prefix}.bin", 4),
        lambda prefix: patch(f"{prefix}.idx", 34, struct.pack("<i", 2)),
        lambda prefix: os.truncate(f"{prefix}.idx", 40),
    ],
    ids=["other tokens", "empty", "cut short", "other index", "index cut short"],
)
def test_a_change_in_place_is_an_error_at_the_next_read(prefix, is_mapped, damage):
    dataset = GuardedIndexedDataset(prefix, mmap=is_mapped)
    assert dataset[0].tolist() == [1, 2, 3]
    damage(prefix)
    with pytest.raises(DataError, match="was modified while this run reads it"):
        dataset.get(0)


@pytest.mark.parametrize(
    "read",
    [
        lambda dataset: dataset[3999],
        lambda dataset: dataset.sequence_lengths.sum(),
        lambda dataset: dataset.document_indices.sum(),
        lambda dataset: dataset.get_document_indices().sum(),
    ],
)
def test_an_index_of_several_pages_that_is_cut_short_is_an_error(tmp_path, read):
    """In a process of its own: an access to a mapped page that is gone ends the process."""
    prefix = write_shard(tmp_path / "s", [[1]] * 4000)
    dataset = GuardedIndexedDataset(prefix)
    os.truncate(f"{prefix}.idx", 40)

    def expect_error():
        with pytest.raises(DataError, match="idx was modified while this run reads it"):
            read(dataset)

    process = multiprocessing.get_context("fork").Process(target=expect_error)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_an_open_shard_is_read_after_its_file_is_replaced(tmp_path, prefix, is_mapped):
    dataset = GuardedIndexedDataset(prefix, mmap=is_mapped)
    for suffix in (".bin", ".idx"):
        os.replace(write_shard(tmp_path / "other", [[9] * 6]) + suffix, prefix + suffix)
    assert read_all(dataset) == SEQUENCES
    for suffix in (".bin", ".idx"):
        os.unlink(prefix + suffix)
    assert read_all(dataset) == SEQUENCES


def test_a_later_process_refuses_a_replaced_shard(tmp_path, prefix, is_mapped):
    dataset = GuardedIndexedDataset(prefix, mmap=is_mapped)
    for_a_process = pickle.dumps(dataset)
    assert read_all(pickle.loads(for_a_process)) == SEQUENCES
    other = write_shard(tmp_path / "other", [[9, 9, 9], [9], [], [9, 9]])
    for suffix in (".bin", ".idx"):
        os.replace(other + suffix, prefix + suffix)
    with pytest.raises(DataError, match="was modified"):
        pickle.loads(for_a_process)
    Path(f"{prefix}.idx").unlink()
    with pytest.raises(DataError, match="missing"):
        pickle.loads(for_a_process)


def test_touching_a_shard_with_a_manifest_is_accepted(tmp_path, shard, is_mapped):
    prefix = str(tmp_path / "copy")
    for suffix in SUFFIXES:
        shutil.copyfile(shard + suffix, prefix + suffix)
    dataset = GuardedIndexedDataset(prefix, mmap=is_mapped)
    expected = read_all(dataset)
    for suffix in (".bin", ".idx"):
        os.utime(prefix + suffix, ns=(10**18, 10**18))
    assert read_all(dataset) == expected
    assert read_all(pickle.loads(pickle.dumps(dataset))) == expected
    # Its hashes are in the manifest, so an equal time does not make other tokens valid.
    patch(f"{prefix}.bin", 0, b"\1\1")
    with pytest.raises(DataError, match="was modified"):
        dataset.get(0)


def test_touching_a_shard_without_a_manifest_is_an_error(prefix):
    assert not manifest_path(prefix).exists()
    dataset = GuardedIndexedDataset(prefix)
    os.utime(f"{prefix}.bin")
    with pytest.raises(DataError, match="was modified"):
        dataset.get(0)


def test_an_empty_shard_is_an_error(tmp_path, is_mapped):
    with pytest.raises(DataError, match="is empty"):
        GuardedIndexedDataset(write_shard(tmp_path / "s", [[]]), mmap=is_mapped)
