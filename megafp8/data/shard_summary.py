"""Summary of a shard from its index: counts, and the distribution of document lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np

from megafp8.data.shard_verification import check_structure, document_bounds
from megafp8.data.shards import (
    INDEX_BLOCK,
    VERSION,
    ShardIndex,
    ShardManifest,
    bin_path,
    idx_path,
    load_manifest,
    read_index,
)

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """Documents of `low` to `high` tokens, both included."""

    low: int
    high: int
    num_documents: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class ShardSummary:
    """Contents of a shard. Sizes in bytes, lengths in tokens.

    Attributes:
        has_modes: it is a multimodal shard.
        num_empty: number of documents without tokens.
        quantiles: fraction of the documents -> length that they do not exceed.
        bins: histogram of document lengths, in powers of two.
        manifest: None if there is none.
    """

    prefix: str
    version: int
    dtype: str
    has_modes: bool
    num_documents: int
    num_sequences: int
    num_tokens: int
    num_empty: int
    bin_bytes: int
    idx_bytes: int
    shortest: int
    longest: int
    quantiles: dict[float, int]
    bins: tuple[LengthBin, ...]
    manifest: Optional[ShardManifest]


def summarize_shard(prefix: str) -> ShardSummary:
    """Summarize a shard from its index.

    Memory: 16 bytes per document.

    Raises:
        DataError: the shard is damaged.
    """
    index = read_index(prefix)
    check_structure(prefix, index)
    lengths = document_lengths(index)
    return ShardSummary(
        prefix=prefix,
        version=VERSION,
        dtype=index.dtype.name,
        has_modes=index.sequence_modes is not None,
        num_documents=index.num_documents,
        num_sequences=len(index.sequence_lengths),
        num_tokens=index.num_tokens,
        num_empty=int(np.count_nonzero(lengths == 0)),
        bin_bytes=bin_path(prefix).stat().st_size,
        idx_bytes=idx_path(prefix).stat().st_size,
        shortest=int(lengths.min()) if len(lengths) else 0,
        longest=int(lengths.max()) if len(lengths) else 0,
        quantiles=_quantiles(lengths),
        bins=_bins(lengths),
        manifest=load_manifest(prefix),
    )


def document_lengths(index: ShardIndex) -> np.ndarray:
    """Return the number of tokens of each document, int64 [documents]."""
    return np.concatenate([np.empty(0, np.int64), *(ends - starts for starts, ends in document_bounds(index))])


def read_documents(prefix: str, first: int, count: int, max_tokens: int) -> Sequence[np.ndarray]:
    """Return the first `max_tokens` ids of each of `count` documents, from number `first` on; fewer at the shard's end.

    Raises:
        DataError: the index cannot be read.
    """
    index = read_index(prefix)
    part = index.documents(min(first, index.num_documents), min(first + count, index.num_documents))
    if part.num_tokens == 0:
        return [np.empty(0, index.dtype)] * part.num_documents
    tokens = np.memmap(bin_path(prefix), dtype=index.dtype, mode="r")
    offset = int(part.sequence_pointers[0]) // index.dtype.itemsize
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(part.sequence_lengths, dtype=np.int64)])
    bounds = offset + ends[part.document_indices - part.document_indices[0]]
    return [
        np.array(tokens[start : min(end, start + max_tokens)])
        for start, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def _quantiles(lengths: np.ndarray) -> dict[float, int]:
    if len(lengths) == 0:
        return {}
    positions = {fraction: int(fraction * (len(lengths) - 1)) for fraction in QUANTILES}
    ordered = np.partition(lengths, list(positions.values()))
    return {fraction: int(ordered[position]) for fraction, position in positions.items()}


def _bins(lengths: np.ndarray) -> tuple[LengthBin, ...]:
    """Histogram over the number of bits of the length: 0, 1, 2 to 3, 4 to 7, ..."""
    documents, tokens = np.zeros(64, np.int64), np.zeros(64, np.int64)
    for first in range(0, len(lengths), INDEX_BLOCK):
        block = lengths[first : first + INDEX_BLOCK]
        num_bits = np.frexp(block.astype(np.float64))[1]
        documents += np.bincount(num_bits, minlength=64)
        np.add.at(tokens, num_bits, block)
    used = np.flatnonzero(documents)
    return tuple(
        LengthBin(
            low=(1 << bits) >> 1,
            high=(1 << bits) - 1,
            num_documents=int(documents[bits]),
            num_tokens=int(tokens[bits]),
        )
        for bits in (range(int(used[0]), int(used[-1]) + 1) if len(used) else ())
    )
