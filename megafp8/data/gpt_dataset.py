"""megatron-core's GPTDataset and BlendedDataset, with an order of samples that no length of a run changes.

megatron-core lays an epoch's documents end to end in shuffled order, cuts them into samples and shuffles the samples.
Of several epochs it shuffles all documents together, the last epoch apart or not, as the number of samples asks for: a
run that is made longer reads other samples from its first step on. Here every epoch is shuffled by itself, from a
generator of the seed and the epoch's number:

    documents   epoch 0 shuffled | epoch 1 shuffled | ...      laid end to end over the epochs' borders as well
    samples     those that end in epoch 0, shuffled | those that end in epoch 1, shuffled | ...

so that more epochs add to the order and change nothing before. The first epoch is megatron-core's own order, sample by
sample, and so is a run that needs no second one. A blend adds to its order likewise: which shard is next follows from
the weights and from what was drawn before.

Indices come from `IndexCache` instead of megatron-core's files, which it loads with `allow_pickle=True`, and which are
named after the shards' paths.

megatron-core's dataset of a shard, which stops when the shard changes under it.

megatron-core opens a shard once and trusts it ever after: rewritten in place it gives other tokens; cut short it ends
the process (mapped memory) or gives whatever was in memory before (file reads). Here each read first asks the open
files for size and modification time.

A shard that is renamed or deleted does no harm: the open files stay as they were. A loader process that is started
later and would open other files refuses them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megafp8.data.index_cache import Arrays, IndexCache
from megafp8.data.shards import bin_path, check_files_exist, idx_path, load_manifest
from megafp8.errors import DataError
from megafp8.utils.files import file_sha256


@dataclass
class EpochsConfig(GPTDatasetConfig):
    """megatron-core's settings of datasets, and what the ones here need besides.

    Attributes:
        cache: where indices are kept.
        contents: key of the content of each shard, by prefix.
    """

    cache: IndexCache = IndexCache(None)
    contents: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardSource:
    """One shard's part in a dataset.

    Attributes:
        shard: prefix, for messages; the order of samples does not depend on it.
        content: key of the shard's content.
        documents: first and last + 1 sequence of the shard.
        weight: share of the samples; None where there is no other source.
    """

    shard: str
    content: str
    documents: tuple[int, int]
    weight: Optional[float] = None


class GuardedGPTDataset(GPTDataset):
    """megatron-core's samples, out of guarded shards."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> GuardedIndexedDataset:
        """Open a shard; megatron-core calls it."""
        return GuardedIndexedDataset(dataset_path, mmap=config.mmap_bin_files)


class EpochsDataset(GuardedGPTDataset):
    """A part of one shard, `num_samples` or more samples long; None is one epoch."""

    @property
    def sources(self) -> tuple[ShardSource, ...]:
        """Where the samples come from."""
        documents = int(self.indices[0]), int(self.indices[-1]) + 1
        return (ShardSource(self.dataset_path, self.config.contents[self.dataset_path], documents),)

    def sample_ids(self, indices: np.ndarray) -> np.ndarray:
        """What samples are, apart from their number: int64 [samples, 3], source, sequence and offset of the start."""
        starts = self.sample_index[self.shuffle_index[indices]]
        documents = self.document_index[starts[:, 0]]
        return np.stack([np.zeros(len(documents), np.int64), documents, starts[:, 1]], axis=1)

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """megatron-core's hook for the three indices."""
        tokens = self._get_num_tokens_per_epoch()
        num_epochs = self._get_num_epochs(tokens)
        (source,) = self.sources
        content = {
            "kind": "epochs of documents",
            "shard": source.content,
            "documents": source.documents,
            "sequence_length": self.config.sequence_length,
            "seed": self.config.random_seed,
            "num_epochs": num_epochs,
        }
        label = f"{source.shard} ({len(self.indices)} documents, {num_epochs} epochs)"
        arrays = self.config.cache.load_or_build(label, content, lambda: self._build_epochs(num_epochs, tokens))
        return arrays["document_index"], arrays["sample_index"], arrays["shuffle_index"]

    def _build_epochs(self, num_epochs: int, tokens_per_epoch: int) -> Arrays:
        """Documents of every epoch int32, starts of samples (place among them, offset) and the shuffled samples."""
        generators = [epoch_generator(self.config.random_seed, epoch) for epoch in range(num_epochs)]
        documents = np.tile(self.indices, num_epochs).reshape(num_epochs, -1)
        for generator, epoch in zip(generators, documents, strict=True):
            generator.shuffle(epoch)
        # The copy of what is mapped from the disk lets megatron-core's loop run in memory, as its own caller does it.
        lengths = self.dataset.sequence_lengths.copy()
        length = self.config.sequence_length
        samples = helpers.build_sample_idx(lengths, documents.reshape(-1), length, num_epochs, tokens_per_epoch)
        num_samples = len(samples) - 1
        wide = num_samples >= np.iinfo(np.uint32).max - 1
        shuffled = np.arange(num_samples, dtype=np.int64 if wide else np.uint32)
        ends = [max(0, (number * tokens_per_epoch - 1) // length) for number in range(num_epochs + 1)]
        for generator, start, end in zip(generators, ends[:-1], ends[1:], strict=True):
            generator.shuffle(shuffled[start:end])
        return {"document_index": documents.reshape(-1), "sample_index": samples, "shuffle_index": shuffled}

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        """megatron-core's hook for the tokens of a sample, with the ids checked: the embedding would read beyond its
        rows, or raise without a word of where the id is from."""
        tokens, documents = super()._query_document_sample_shuffle_indices(idx)
        vocab_size = self.config.tokenizer.vocab_size
        if tokens.max() >= vocab_size or tokens.min() < 0:
            place = int(np.flatnonzero((tokens >= vocab_size) | (tokens < 0))[0])
            raise DataError(
                f"Shard {self.dataset_path}: token {place} of sample {idx} (documents {documents.tolist()}) has the id "
                f"{tokens[place]}, but the vocabulary has {vocab_size}. Give the tokenizer that the shard was made "
                "with, or make or copy the shard again."
            )
        return tokens, documents


class MockEpochsDataset(EpochsDataset, MockGPTDataset):
    """megatron-core's made-up documents, in the same order of epochs."""

    build_low_level_dataset = staticmethod(MockGPTDataset.build_low_level_dataset)


class EpochsBlend(BlendedDataset):
    """Datasets drawn from in turn so that each keeps its weight at every moment."""

    @property
    def sources(self) -> tuple[ShardSource, ...]:
        """Where the samples come from, in the order of the datasets."""
        pairs = zip(self.datasets, self.weights, strict=True)
        return tuple(replace(source, weight=weight) for dataset, weight in pairs for source in dataset.sources)

    def sample_ids(self, indices: np.ndarray) -> np.ndarray:
        """See `EpochsDataset.sample_ids`."""
        chosen, inner = self.dataset_index[indices], self.dataset_sample_index[indices]
        by_dataset = np.argsort(chosen, kind="stable")
        numbers, starts = np.unique(chosen[by_dataset], return_index=True)
        ids = np.empty((len(chosen), 3), np.int64)
        for number, mine in zip(numbers, np.split(by_dataset, starts)[1:], strict=True):
            ids[mine] = self.datasets[number].sample_ids(inner[mine])
            ids[mine, 0] = number
        return ids

    def _build_indices(self) -> tuple[np.ndarray, np.ndarray]:
        """megatron-core's hook for the number of the dataset of each sample, and the sample's number in it."""
        content = {"kind": "blend", "weights": self.weights, "num_samples": self.size}
        label = f"blend of {len(self.datasets)} shards ({self.size} samples)"
        arrays = self.config.cache.load_or_build(label, content, lambda: build_blend(self.weights, self.size))
        return arrays["dataset_index"], arrays["dataset_sample_index"]


def build_blend(weights: Sequence[float], num_samples: int) -> Arrays:
    """megatron-core's choice of a dataset for each sample: the one that lags its weight most."""
    datasets, samples = np.zeros(num_samples, np.int16), np.zeros(num_samples, np.int64)
    helpers.build_blending_indices(datasets, samples, np.array(weights), len(weights), num_samples, False)
    return {"dataset_index": datasets, "dataset_sample_index": samples}


def epoch_generator(seed: int, epoch: int) -> np.random.RandomState:
    """The source of an epoch's order; megatron-core's for the first. numpy keeps RandomState's streams as they are."""
    return np.random.RandomState(seed if epoch == 0 else [seed, epoch])


class FileStamp(NamedTuple):
    """What tells one content of a file from another without reading it."""

    num_bytes: int
    mtime_ns: int
    inode: int
    device: int


def stamp_of(status: os.stat_result) -> FileStamp:
    """Return the stamp of a file with this status."""
    return FileStamp(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


class GuardedFile:
    """A file held open, whose content must stay what it was.

    Args:
        path: of the file.
        sha256: of its content, where it is known. A file that only its modification time (`touch`) or its place on the
            disk (a copy put back) tells from what it was is then read once, and may go on.
        stamp: what it must be at the start; None takes it as it is.
    """

    def __init__(self, path: Path, sha256: Optional[str], stamp: Optional[FileStamp] = None):
        self.path = path
        self._sha256 = sha256
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from error
        self.stamp = stamp or stamp_of(os.fstat(self.descriptor))

    def check(self) -> None:
        """Check that the content is what it was; a system call, unless something has changed.

        Raises:
            DataError: it is not.
        """
        now = stamp_of(os.fstat(self.descriptor))
        if now == self.stamp:
            return
        if now.num_bytes != self.stamp.num_bytes or self._sha256 is None or self._hash() != self._sha256:
            raise DataError(
                f"{self.path} was changed while this run reads it: {self.stamp.num_bytes} bytes, modified at "
                f"{self.stamp.mtime_ns} ns, became {now.num_bytes} bytes, modified at {now.mtime_ns} ns. Put the old "
                "shard back and resume from the last checkpoint; give a new shard another name."
            )
        self.stamp = now

    def _hash(self) -> str:
        os.lseek(self.descriptor, 0, os.SEEK_SET)  # all other reads bring their own position
        return file_sha256(os.dup(self.descriptor))

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class GuardedReader:
    """Reads tokens as megatron-core's readers do, from a file that is checked first.

    Args:
        tokens: the `.bin`.
        index: the `.idx`, which megatron-core reads; here it is only checked.
        is_mapped: map the tokens into memory, or read them from the file.
    """

    def __init__(self, tokens: GuardedFile, index: GuardedFile, *, is_mapped: bool):
        self._tokens, self._index = tokens, index
        self._map = mmap.mmap(tokens.descriptor, 0, access=mmap.ACCESS_READ) if is_mapped else None

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray:
        """Return `count` ids from the byte `offset` on. Shape: (count,).

        Raises:
            DataError: the shard has changed since it was opened.
        """
        self._index.check()
        self._tokens.check()
        if self._map is not None:
            return np.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
        ids = np.empty(count, dtype=dtype)
        left = memoryview(ids).cast("B")
        while len(left):
            num_bytes = os.preadv(self._tokens.descriptor, [left], int(offset))
            if num_bytes == 0:
                raise DataError(f"{self._tokens.path} ends at byte {offset}, {len(left)} bytes too early.")
            left, offset = left[num_bytes:], offset + num_bytes
        return ids


class GuardedIndexedDataset(IndexedDataset):
    """A shard; `dataset[i]` and `dataset.get(i, ...)` are megatron-core's."""

    stamps: tuple[Optional[FileStamp], Optional[FileStamp]] = (None, None)

    def initialize(self, path_prefix: str, multimodal: bool, mmap: bool, *args: Any) -> None:
        """Open the shard; megatron-core calls it for a new dataset, and for one that comes from another process.

        Raises:
            DataError: the shard is not there, is being replaced, or is another one than in the other process.
        """
        self.bin_reader = self.index = None  # megatron-core deletes both, even where opening fails
        check_files_exist(path_prefix)
        manifest = load_manifest(path_prefix)
        bin_sha256, idx_sha256 = (None, None) if manifest is None else (manifest.bin_sha256, manifest.idx_sha256)
        tokens = GuardedFile(bin_path(path_prefix), bin_sha256, self.stamps[0])
        index = GuardedFile(idx_path(path_prefix), idx_sha256, self.stamps[1])
        tokens.check()
        index.check()
        self.stamps = tokens.stamp, index.stamp
        if tokens.stamp.num_bytes == 0:
            raise DataError(f"{tokens.path} is empty.")
        super().initialize(path_prefix, multimodal, mmap, *args)
        self.bin_reader = GuardedReader(tokens, index, is_mapped=mmap)
        # megatron-core opened the index by its name; that it is the one of above shows now.
        if stamp_of(os.stat(index.path)) != index.stamp:
            raise DataError(f"{index.path} was replaced while this run opens it. Start again.")

    def __getstate__(self) -> Any:
        return super().__getstate__(), self.stamps

    def __setstate__(self, state: Any) -> None:
        of_megatron, self.stamps = state
        super().__setstate__(of_megatron)
