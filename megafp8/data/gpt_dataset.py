"""GPT datasets on megatron-core's, with a sample order independent of the run's length, and guarded shard files.

Order of samples. megatron-core concatenates the documents of an epoch in shuffled order, cuts them into samples and
shuffles the samples. For several epochs it shuffles all documents together, with or without the last epoch, depending
on the number of samples. A run that is made longer therefore reads other samples from its first step on. Here every
epoch is shuffled separately, with a generator seeded by the seed and the epoch's number:

    documents   epoch 0 shuffled | epoch 1 shuffled | ...      concatenated, also across epochs
    samples     those that end in epoch 0, shuffled | those that end in epoch 1, shuffled | ...

More epochs only append to the order. The first epoch, and thus a run of one epoch, has exactly
megatron-core's order. A blend is extended likewise: its next shard depends only on the weights and on earlier draws.

Indices come from `IndexCache`. megatron-core's own index files are loaded with `allow_pickle=True`, and named after the
paths of the shards.

Guarded files. megatron-core opens a shard once and never checks it again. If the shard is rewritten in place, it
returns other tokens; if it is truncated, the process dies (mapped memory) or gets uninitialized memory (file reads).
Here each read first checks size and modification time of the open files, the index too. Renaming or deleting a shard
is harmless, because the open files remain. A loader process that is started later and would open other files raises an
error.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Optional

import numpy as np
import torch
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megafp8.data.index_cache import Arrays, IndexCache
from megafp8.data.object_tokens import DEFAULT_CACHE_BYTES, ObjectReader, ObjectTokens
from megafp8.data.shards import bin_path, check_files_exist, idx_path, load_manifest
from megafp8.errors import DataError
from megafp8.utils.files import file_sha256
from megafp8.utils.integers import numpy_seed
from megafp8.utils.object_store import is_url, local_path


@dataclass
class EpochsConfig(GPTDatasetConfig):
    """megatron-core's dataset configuration with additional fields.

    Attributes:
        cache: cache of the indices.
        object_cache_bytes: limit of the local cache of shards in object storage.
        contents: prefix of each shard -> key of its content.
    """

    cache: IndexCache = IndexCache(None)
    object_cache_bytes: int = DEFAULT_CACHE_BYTES
    contents: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardSource:
    """A shard's part of a dataset.

    Attributes:
        shard: prefix, for messages; the order of samples does not depend on it.
        content: key of the shard's content.
        documents: first and last + 1 sequence of the shard.
        weight: fraction of the samples; None if it is the only source.
        first_sample: of the run that may come from it: the start of a phase of `--data-phases`.
    """

    shard: str
    content: str
    documents: tuple[int, int]
    weight: Optional[float] = None
    first_sample: int = 0


class EpochsDataset(GPTDataset):
    """A part of one shard, of at least `num_samples` samples; None is one epoch."""

    order: ClassVar[str] = "epochs of documents"
    """In the key of the cached indices."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> GuardedIndexedDataset:
        """Open a shard; called by megatron-core."""
        opened = GuardedIndexedDataset(dataset_path, mmap=config.mmap_bin_files)
        if isinstance(opened.bin_reader, ObjectReader):
            opened.bin_reader.tokens.cache_bytes = config.object_cache_bytes
        return opened

    def __getitem__(self, idx: Optional[int]) -> dict[str, Any]:
        """A sample of megatron-core's dataset.

        With `reset_attention_mask` it also has `document_starts`, bool [sequence_length]: the first token, and each
        token after an end of document. megatron-core itself would return a mask of sequence_length^2 elements.
        """
        sample: dict[str, Any] = super().__getitem__(idx)
        if self.config.reset_attention_mask:
            starts = torch.ones_like(sample["tokens"], dtype=torch.bool)
            starts[1:] = sample["tokens"][:-1] == self.config.tokenizer.eod
            sample["document_starts"] = starts
        return sample

    @property
    def sources(self) -> tuple[ShardSource, ...]:
        """The shard that the samples come from."""
        documents = int(self.indices[0]), int(self.indices[-1]) + 1
        return (ShardSource(self.dataset_path, self.config.contents[self.dataset_path], documents),)

    @property
    def samples_per_epoch(self) -> float:
        """Samples that the documents fill once."""
        return self._get_num_tokens_per_epoch() / self.config.sequence_length

    @property
    def fresh_samples(self) -> float:
        """Samples before a document is read again."""
        return self.samples_per_epoch

    def sample_ids(self, indices: np.ndarray) -> np.ndarray:
        """Identify samples: int64 [samples, 3], number of the source, sequence in it, and offset of the start."""
        starts = self.sample_index[self.shuffle_index[indices]]
        documents = self.document_index[starts[:, 0]]
        return np.stack([np.zeros(len(documents), np.int64), documents, starts[:, 1]], axis=1)

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the three indices; called by megatron-core."""
        tokens = self._get_num_tokens_per_epoch()
        num_epochs = self._get_num_epochs(tokens)
        (source,) = self.sources
        content = {
            "kind": self.order,
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
        """Build the documents of every epoch, the starts of the samples (position in them, offset), and their order."""
        generators = self._generators(num_epochs)
        documents = np.tile(self.indices, num_epochs).reshape(num_epochs, -1)
        for generator, epoch in zip(generators, documents, strict=True):
            generator.shuffle(epoch)
        # As in megatron-core's own caller: copied from the mapped file, so that its loop runs in memory.
        lengths = self.dataset.sequence_lengths.copy()
        length = self.config.sequence_length
        samples = helpers.build_sample_idx(lengths, documents.reshape(-1), length, num_epochs, tokens_per_epoch)
        num_samples = len(samples) - 1
        dtype = np.int64 if num_samples >= np.iinfo(np.uint32).max - 1 else np.uint32
        shuffled = np.arange(num_samples, dtype=dtype)
        ends = [max(0, (number * tokens_per_epoch - 1) // length) for number in range(num_epochs + 1)]
        for generator, start, end in zip(generators, ends[:-1], ends[1:], strict=True):
            generator.shuffle(shuffled[start:end])
        return {"document_index": documents.reshape(-1), "sample_index": samples, "shuffle_index": shuffled}

    def _generators(self, num_epochs: int) -> list[np.random.RandomState]:
        """The generator of each epoch."""
        seed = self.config.random_seed
        # megatron-core's generator for the first epoch. numpy guarantees that the streams of RandomState do not change.
        seeds = [numpy_seed(seed, epoch) if epoch else numpy_seed(seed) for epoch in range(num_epochs)]
        return [np.random.RandomState(each) for each in seeds]

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[Any, ...]:
        """Return the tokens of a sample, with the ids checked, and its documents; called by megatron-core.

        megatron-core 0.19 also returns the lengths of the documents.
        """
        tokens, documents, *lengths = super()._query_document_sample_shuffle_indices(idx)
        self._check_ids(tokens, documents, idx)
        return tokens, documents, *lengths

    def _check_ids(self, tokens: np.ndarray, documents: np.ndarray, idx: int) -> None:
        """Check the ids of a sample.

        With an invalid one, the embedding would read out of bounds, or raise without saying where the id comes from.
        """
        vocab_size = self.config.tokenizer.vocab_size
        if tokens.max() >= vocab_size or tokens.min() < 0:
            index = int(np.flatnonzero((tokens >= vocab_size) | (tokens < 0))[0])
            raise DataError(
                f"Shard {self.dataset_path}: token {index} of sample {idx} (documents {documents.tolist()}) has the id "
                f"{tokens[index]}, but the vocabulary size is {vocab_size}. Use the tokenizer that the shard was "
                "created with, or create or copy the shard again."
            )


class MockEpochsDataset(EpochsDataset, MockGPTDataset):
    """megatron-core's mock documents, in the same order."""

    build_low_level_dataset = staticmethod(MockGPTDataset.build_low_level_dataset)


class EpochsBlend(BlendedDataset):
    """Datasets interleaved so that their fractions of the samples match their weights at every point."""

    @property
    def sources(self) -> tuple[ShardSource, ...]:
        """The shards that the samples come from, in the order of the datasets."""
        pairs = zip(self.datasets, self.weights, strict=True)
        return tuple(replace(source, weight=weight) for dataset, weight in pairs for source in dataset.sources)

    @property
    def fresh_samples(self) -> float:
        """Samples before a document of any of the datasets is read again."""
        pairs = zip(self.datasets, self.weights, strict=True)
        return min(dataset.samples_per_epoch / weight for dataset, weight in pairs if weight > 0)

    def sample_ids(self, indices: np.ndarray) -> np.ndarray:
        """Identify samples, see `EpochsDataset.sample_ids`."""
        return ids_of_draws(self.datasets, self.dataset_index[indices], self.dataset_sample_index[indices])

    def _build_indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Return for each sample the number of its dataset, and its number in it; called by megatron-core."""
        content = {"kind": "blend", "weights": self.weights, "num_samples": self.size}
        label = f"blend of {len(self.datasets)} shards ({self.size} samples)"
        arrays = self.config.cache.load_or_build(label, content, self._build_blend)
        return arrays["dataset_index"], arrays["dataset_sample_index"]

    def _build_blend(self) -> Arrays:
        """Choose a dataset for each sample, as megatron-core does: the one that is furthest behind its weight."""
        datasets, samples = np.zeros(self.size, np.int16), np.zeros(self.size, np.int64)
        weights = np.array(self.weights)
        helpers.build_blending_indices(datasets, samples, weights, len(weights), self.size, False)
        return {"dataset_index": datasets, "dataset_sample_index": samples}


def ids_of_draws(datasets: Sequence[EpochsDataset], chosen: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Identify samples of several datasets, see `EpochsDataset.sample_ids`.

    Args:
        chosen: dataset of each sample.
        drawn: number of the sample in it.
    """
    by_dataset = np.argsort(chosen, kind="stable")
    numbers, starts = np.unique(chosen[by_dataset], return_index=True)
    ids = np.empty((len(chosen), 3), np.int64)
    for number, rows in zip(numbers, np.split(by_dataset, starts)[1:], strict=True):
        ids[rows] = datasets[number].sample_ids(drawn[rows])
        ids[rows, 0] = number
    return ids


class FileStamp(NamedTuple):
    """File attributes that distinguish contents without reading them."""

    num_bytes: int
    mtime_ns: int
    inode: int
    device: int


def _file_stamp(status: os.stat_result) -> FileStamp:
    return FileStamp(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


class GuardedFile:
    """An open file whose content must not change.

    Args:
        path: path of the file.
        sha256: SHA-256 of its content, if known. A file of the same size with another modification time or inode (after
            `touch`, or restored from a copy) is then read once, and accepted if the hash matches.
        stamp: required stamp of the file; None accepts any.
    """

    def __init__(self, path: Path, sha256: Optional[str], stamp: Optional[FileStamp] = None):
        self.path = path
        self._sha256 = sha256
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from error
        self.stamp = stamp or _file_stamp(os.fstat(self.descriptor))

    def check(self) -> None:
        """Check that the content has not changed. This takes one system call, unless the stamp has changed.

        Raises:
            DataError: the content has changed.
        """
        now = _file_stamp(os.fstat(self.descriptor))
        if now == self.stamp:
            return
        if now.num_bytes != self.stamp.num_bytes or self._sha256 is None or self._hash() != self._sha256:
            raise DataError(
                f"{self.path} was modified while this run reads it: from {self.stamp.num_bytes} bytes, modified at "
                f"{self.stamp.mtime_ns} ns, to {now.num_bytes} bytes, modified at {now.mtime_ns} ns. Restore the old "
                "shard and resume from the last checkpoint; give new shards new names."
            )
        self.stamp = now

    def _hash(self) -> str:
        os.lseek(self.descriptor, 0, os.SEEK_SET)  # no other read uses the file position
        return file_sha256(os.dup(self.descriptor))

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class GuardedReader:
    """Reads tokens, with the interface of megatron-core's readers, and checks the file first.

    Args:
        tokens: the `.bin`.
        use_mmap: map the tokens into memory; False reads them from the file.
    """

    def __init__(self, tokens: GuardedFile, *, use_mmap: bool):
        self._tokens = tokens
        self._map = mmap.mmap(tokens.descriptor, 0, access=mmap.ACCESS_READ) if use_mmap else None

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray:
        """Return `count` ids from the byte `offset` on, of shape [count].

        Raises:
            DataError: the tokens have changed since they were opened.
        """
        self._tokens.check()
        if self._map is not None:
            return np.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
        ids = np.empty(count, dtype=dtype)
        left = ids.data.cast("B")
        while len(left):
            num_bytes = os.preadv(self._tokens.descriptor, [left], int(offset))
            if num_bytes == 0:
                raise DataError(
                    f"{self._tokens.path} is truncated: it ends at byte {offset}, {len(left)} bytes are missing."
                )
            left, offset = left[num_bytes:], offset + num_bytes
        return ids


class GuardedIndexedDataset(IndexedDataset):
    """megatron-core's IndexedDataset on guarded files."""

    stamps: tuple[Optional[FileStamp], Optional[FileStamp]] = (None, None)

    def initialize(self, path_prefix: str, multimodal: bool, mmap: bool, *args: Any) -> None:
        """Open the shard; called by megatron-core for a new dataset, and for one from another process.

        Raises:
            DataError: the shard is missing, is being replaced, or differs from that in the other process.
        """
        self.bin_reader = self.index = None  # megatron-core deletes both, even if opening fails
        check_files_exist(path_prefix)
        if is_url(path_prefix):
            # Its index is a copy, and its place has no tokens.
            super().initialize(str(local_path(path_prefix)), multimodal, False, *args)
            self.path_prefix = path_prefix
            reader: Any = ObjectReader(ObjectTokens(path_prefix))
            self.bin_reader = reader
            self._index_file = GuardedFile(idx_path(path_prefix), None)
            return
        manifest = load_manifest(path_prefix)
        bin_sha256, idx_sha256 = (None, None) if manifest is None else (manifest.bin_sha256, manifest.idx_sha256)
        tokens = GuardedFile(bin_path(path_prefix), bin_sha256, self.stamps[0])
        index = GuardedFile(idx_path(path_prefix), idx_sha256, self.stamps[1])
        tokens.check()
        index.check()
        self._index_file, self.stamps = index, (tokens.stamp, index.stamp)
        if tokens.stamp.num_bytes == 0:
            raise DataError(f"{tokens.path} is empty.")
        super().initialize(path_prefix, multimodal, mmap, *args)
        self.bin_reader = GuardedReader(tokens, use_mmap=mmap)
        # megatron-core opened the index by its name. Check that it is the file that was opened above.
        if _file_stamp(os.stat(index.path)) != index.stamp:
            raise DataError(f"{index.path} was replaced while this run opened it. Start the run again.")

    # megatron-core maps the index, and reading pages of it that are gone would end the process.

    def __getitem__(self, idx: Any) -> Any:
        """The tokens of a sequence or of a slice; errors as `get`."""
        self._index_file.check()
        return super().__getitem__(idx)

    def get(self, idx: int, offset: int = 0, length: Optional[int] = None) -> Any:
        """The tokens of a sequence, or some of them.

        Raises:
            DataError: the shard has changed since it was opened.
        """
        self._index_file.check()
        return super().get(idx, offset, length)

    @property
    def sequence_lengths(self) -> np.ndarray:
        """Tokens in each sequence, int32 [sequences], mapped; errors as `get`."""
        self._index_file.check()
        return super().sequence_lengths

    @property
    def document_indices(self) -> np.ndarray:
        """First sequence of each document, then the number of all, int64 [documents + 1], mapped; errors as `get`."""
        self._index_file.check()
        return super().document_indices

    def get_document_indices(self) -> np.ndarray:
        """`document_indices`."""
        return self.document_indices

    def __getstate__(self) -> Any:
        return super().__getstate__(), self.stamps

    def __setstate__(self, state: Any) -> None:
        megatron_state, self.stamps = state
        super().__setstate__(megatron_state)
