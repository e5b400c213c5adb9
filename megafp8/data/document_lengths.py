"""How long the documents of the training data are, and how much is padding, by the lengths in the shards' indices.

Attention that stops at the borders of documents costs what the squares of their lengths say. A plan and a dry run
estimate it here before the first step; the records of a run count it (`document_squares`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Optional

import numpy as np

from megafp8.config import derived
from megafp8.config.data_blend import Blend
from megafp8.config.schema import DataConfig
from megafp8.config.schema.io import BEST_FIT
from megafp8.data.packing import pack_lengths
from megafp8.data.shards import load_manifest, read_index
from megafp8.errors import ConfigError, DataError
from megafp8.utils.object_store import is_url

MOST_DOCUMENTS, BLOCKS = 1 << 20, 1 << 6
"""Documents of a shard whose lengths are read, and the blocks that they are in: an index may have gigabytes."""


class DocumentEstimate(NamedTuple):
    """What is known about the training data.

    Attributes:
        length: tokens of a token's document within its sequence, on average over tokens; None without
            `--reset-attention-mask`, or if it is not known.
        padding_fraction: of all tokens; None without packing, or if it is not known.
        problem: why something is not known.
    """

    length: Optional[float] = None
    padding_fraction: Optional[float] = None
    problem: str = ""


class _Shard(NamedTuple):
    """Tokens of the training part of a shard, and of each token on average: its document's length, and padding."""

    num_tokens: float
    length: float
    padding_fraction: float


def estimate_documents(data: DataConfig, blends: Iterable[tuple[float, Blend]]) -> DocumentEstimate:
    """Estimate the documents of a run from `MOST_DOCUMENTS` of each shard. Without need no shard is opened.

    Args:
        blends: `data_phases.training_blends`, whose errors become the problem of the estimate.
    """
    is_packed = data.packing == BEST_FIT
    if not data.reset_attention_mask and not is_packed:
        return DocumentEstimate()
    if data.mock_data:
        return DocumentEstimate(problem="documents are made up; name shards with --data-path")
    try:
        parts = list(_weighted_shards(data, blends))
    except (ConfigError, DataError, ValueError) as error:
        return DocumentEstimate(problem=str(error))
    weights = [weight for weight, _ in parts]
    length = np.average([shard.length for _, shard in parts], weights=weights)
    padding = np.average([shard.padding_fraction for _, shard in parts], weights=weights)
    return DocumentEstimate(float(length) if data.reset_attention_mask else None, float(padding) if is_packed else None)


def expected_squares(lengths: np.ndarray, seq_length: int) -> np.ndarray:
    """Expected sum of the squared lengths of the pieces of each document, if sequences cut it at a random offset.

    Two tokens of a document of L tokens with distance d are in the same sequence of S tokens with probability 1 - d/S,
    and L - d pairs have this distance. Summed over d from 1 to n = min(L - 1, S), twice, and each token with itself:

        L + 2 (n L - (1 + L/S) n (n + 1) / 2 + n (n + 1) (2 n + 1) / (6 S))
    """
    length = lengths.astype(np.float64)
    most = np.minimum(np.maximum(length - 1, 0), seq_length)
    sums = most * (most + 1) / 2
    return length + 2 * (most * length - (1 + length / seq_length) * sums + sums * (2 * most + 1) / (3 * seq_length))


def _weighted_shards(data: DataConfig, blends: Iterable[tuple[float, Blend]]) -> Iterator[tuple[float, _Shard]]:
    """The shards of the training data with their share of the samples."""
    known: dict[str, _Shard] = {}
    for share, blend in blends:
        for prefix in blend.prefixes:
            known[prefix] = known.get(prefix) or _read_shard(data, prefix)
        shards = [known[prefix] for prefix in blend.prefixes]
        weights = blend.weights or [shard.num_tokens for shard in shards]
        yield from ((share * weight / sum(weights), shard) for weight, shard in zip(weights, shards, strict=True))


def _read_shard(data: DataConfig, prefix: str) -> _Shard:
    """Estimate the training part of a shard.

    Raises:
        DataError: the shard is not here, or its part has no tokens.
    """
    assert data.seq_length is not None
    if is_url(prefix):
        raise DataError(f"{prefix} is in object storage, from which a plan and a dry run read nothing")
    index, manifest = read_index(prefix), load_manifest(prefix)
    is_packed = data.packing == BEST_FIT
    # A sequence of an index is packed by itself, but without packing only the end of a document is a border.
    has_parts = not is_packed and index.num_documents < len(index.sequence_lengths)
    count = index.num_documents if has_parts else len(index.sequence_lengths)
    count = derived.num_training_documents(data, count)
    size = count if count <= MOST_DOCUMENTS else MOST_DOCUMENTS // BLOCKS
    starts = [0] if size == count else np.linspace(0, count - size, BLOCKS).astype(int).tolist()
    parts = []
    for start in starts:
        if not has_parts:
            parts.append(index.sequence_lengths[start : start + size])
            continue
        borders = index.document_indices[start : start + size + 1]
        ends = np.cumsum(index.sequence_lengths[borders[0] : borders[-1]], dtype=np.int64)
        parts.append(np.diff(np.concatenate([[0], ends])[borders - borders[0]]))
    lengths = np.concatenate(parts)
    num_tokens = int(lengths.sum(dtype=np.int64))
    if not num_tokens:
        raise DataError(f"{prefix} has no tokens for training")
    scaled = num_tokens * count / len(lengths)
    if is_packed:
        packing = pack_lengths(lengths, data.seq_length)
        num_slots = packing.num_sequences * data.seq_length
        return _Shard(scaled, packing.squares / num_slots, packing.num_padding_tokens / num_slots)
    if manifest is not None and manifest.append_eod is False:  # nothing marks where a document ends
        return _Shard(scaled, data.seq_length, 0.0)
    return _Shard(scaled, float(expected_squares(lengths, data.seq_length).sum()) / num_tokens, 0.0)
