"""Datasets of packed sequences (`--packing best-fit`).

Every token of a document is once an input in an epoch. The label of the last token of a sequence is the next token of
its document, if the document is cut there, and else nothing.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Optional

import numpy as np
import torch

from megafp8.data.gpt_dataset import EpochsDataset, MockEpochsDataset
from megafp8.data.index_cache import Arrays
from megafp8.data.packing import DocumentPacking, build_packed_epochs, pack_lengths


class PackedDataset(EpochsDataset):
    """Packed sequences of a part of one shard: complete epochs of them, at least `num_samples`; None is one epoch."""

    order = "epochs of packed documents"

    @cached_property
    def packing(self) -> DocumentPacking:
        """How the documents fill the sequences of an epoch."""
        return pack_lengths(self._lengths, self.config.sequence_length)

    @property
    def _lengths(self) -> np.ndarray:
        """Of the documents of this part, int32."""
        return self.dataset.sequence_lengths[self.indices]

    @property
    def samples_per_epoch(self) -> float:
        """Sequences that the documents fill once."""
        return float(self.packing.num_sequences)

    def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
        return 1 if self.num_samples is None else max(1, math.ceil(self.num_samples / self.packing.num_sequences))

    def _build_epochs(self, num_epochs: int, tokens_per_epoch: int) -> Arrays:
        """Build the documents of every epoch, the starts of the samples (position in them, offset), and their order."""
        return build_packed_epochs(self._lengths, self.indices, self.packing, self._generators(num_epochs))

    def __getitem__(self, idx: Optional[int]) -> dict[str, Any]:
        """A sequence, as `EpochsDataset.__getitem__`.

        Padding is token 0 after the last document. It has no loss, and is a document of its own. Not trained are also
        the last token of a sequence, unless its document continues, and a token before the rest of a cut document.
        """
        assert idx is not None
        row, length, config = self.shuffle_index[idx], self.config.sequence_length, self.config
        (first, offset), (last, _) = self.sample_index[row : row + 2].tolist()
        documents = self.document_index[first:last]
        lengths = self.dataset.sequence_lengths[documents].astype(np.int64)
        offsets = lengths // length * length
        offsets[0] = offset
        sizes = np.minimum(lengths - offsets, length)
        continues = int(lengths[0] > offset + length)  # a full sequence, whose last label is the token after it
        parts = zip(documents.tolist(), offsets.tolist(), (sizes + continues).tolist(), strict=True)
        text = np.concatenate([self.dataset.get(*part) for part in parts], dtype=np.int64)
        self._check_ids(text, documents, idx)
        padded = torch.zeros(length + 1, dtype=torch.int64)
        padded[: len(text)] = torch.from_numpy(text)
        ends = np.cumsum(sizes)
        num_tokens = int(ends[-1])
        is_eod = text[:num_tokens] == config.tokenizer.eod
        starts = np.zeros(length + 1, bool)
        starts[0] = starts[ends] = True
        starts[1:num_tokens] |= is_eod[:-1]
        mask = np.zeros(length, np.float32)
        mask[: num_tokens - 1 + continues] = 1
        mask[ends[:-1][offsets[1:] > 0] - 1] = 0
        if config.eod_mask_loss:
            mask[:num_tokens][is_eod] = 0
        positions = np.arange(length)
        if config.reset_position_ids:
            positions -= np.maximum.accumulate(np.where(starts[:-1], positions, 0))
        sample = {
            "tokens": padded[:-1].contiguous(),
            "labels": padded[1:].contiguous(),
            "loss_mask": torch.from_numpy(mask),
            "position_ids": torch.from_numpy(positions),
        }
        return sample | ({"document_starts": torch.from_numpy(starts[:-1])} if config.reset_attention_mask else {})


class MockPackedDataset(PackedDataset, MockEpochsDataset):
    """megatron-core's mock documents, packed."""


def packing_text(dataset: Any) -> str:
    """What an epoch of each shard of a dataset pads and cuts, for the user; empty without packing."""
    packings = [shard.packing for shard in _shards(dataset).values()]
    if not packings:
        return ""
    num_sequences = sum(each.num_sequences for each in packings)
    padding = sum(each.num_padding_tokens for each in packings) / sum(
        each.num_sequences * each.seq_length for each in packings
    )
    num_cut, num_documents = sum(each.num_cut for each in packings), sum(each.num_documents for each in packings)
    return (
        f"{num_sequences:,} sequences an epoch, {padding:.3%} of their tokens are padding; {num_cut:,} of "
        f"{num_documents:,} documents are longer than a sequence and cut"
    )


def _shards(dataset: Any) -> dict[int, PackedDataset]:
    """The packed datasets of a blend or of phases, each once."""
    if isinstance(dataset, PackedDataset):
        return {id(dataset): dataset}
    found: dict[int, PackedDataset] = {}
    for part in getattr(dataset, "datasets", ()):
        found |= _shards(part)
    return found
