"""Whether a shard can be trusted, asked before the first step; megatron-core asks nothing and hands out garbage.

What an index says is said twice: lengths and pointers follow from each other, and both from the size of the tokens. So
damage to any of them shows without reading the tokens. What can only be seen by comparing hashes (a flipped bit in the
tokens that leaves them within the vocabulary) is `shard_verify`'s part.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any, Optional

import numpy as np

from megafp8.data.atomic import file_sha256
from megafp8.data.manifest import ShardManifest, load_manifest, manifest_path
from megafp8.data.shards import INDEX_BLOCK, REMAKE, ShardIndex, bin_path, idx_path, read_index
from megafp8.data.tokenizer import describe_tokenizer
from megafp8.errors import DataError

# Shards up to so many tokens are searched in full for ids beyond the vocabulary, larger ones in evenly spread chunks.
FULL_SCAN_TOKENS = 1 << 24
SCAN_CHUNKS = 256
SCAN_CHUNK_TOKENS = 1 << 14
READ_TOKENS = 1 << 20


def check_shard(prefix: str, vocab_size: int, *, tokenizer_identifiers: Optional[dict[str, Any]] = None) -> ShardIndex:
    """Check that a shard is whole and fits the tokenizer.

    Always: files, header, sizes, every length, pointer and document entry; with a manifest also the index's SHA-256 and
    the tokenizer. Token ids are all compared with the vocabulary up to 2^24 tokens (16.8 million); of a larger shard,
    256 evenly spread chunks of 16,384.

    Args:
        prefix: path without suffix.
        vocab_size: of the tokenizer, without padding.
        tokenizer_identifiers: `unique_identifiers` of the tokenizer; None compares the vocabulary only.

    Returns:
        The index.

    Raises:
        DataError: what is wrong, with the two numbers that differ.
    """
    index = read_index(prefix)
    check_structure(prefix, index)
    if index.num_tokens == 0:
        raise DataError(f"{bin_path(prefix)} holds no tokens.")
    manifest = load_manifest(prefix)
    if manifest is not None:
        _check_manifest(prefix, manifest, tokenizer_identifiers)
    _check_token_range(prefix, index, vocab_size)
    return index


def check_structure(prefix: str, index: ShardIndex) -> None:
    """Check that lengths, pointers, document index and the size of the tokens fit each other.

    Time: one pass over the index; the tokens are not read.

    Raises:
        DataError: the first place that does not fit, and what it should be.
    """
    end = _check_sequences(prefix, index)
    _check_documents(prefix, index)
    num_bytes = bin_path(prefix).stat().st_size
    if num_bytes != end:
        raise DataError(
            f"{bin_path(prefix)} is {num_bytes} bytes long, but its index counts {end // index.dtype.itemsize} tokens "
            f"of {index.dtype.itemsize} bytes, which are {end} bytes.{REMAKE}"
        )


def content_key(prefix: str) -> str:
    """Return a SHA-256 that changes when a shard is replaced under its path.

    It stays the same when the shard is copied or moved. With a manifest that describes the index on disk it covers the
    content of both files. Without, it covers the content of the index, and of the tokens their number and those that
    `check_shard` looks at, because reading all tokens of a large shard takes too long.
    """
    manifest = load_manifest(prefix)
    index_sha256 = file_sha256(idx_path(prefix))
    if manifest is not None and manifest.idx_sha256 == index_sha256:
        tokens = manifest.bin_sha256
    else:
        digest = hashlib.sha256()
        for chunk in _sampled_tokens(prefix, read_index(prefix).dtype):
            digest.update(chunk)
        tokens = f"{bin_path(prefix).stat().st_size}:{digest.hexdigest()}"
    return hashlib.sha256(f"{index_sha256}:{tokens}".encode()).hexdigest()


def _sampled_tokens(prefix: str, dtype: np.dtype) -> Iterator[np.ndarray]:
    """All tokens of a shard of up to 2^24, 2^20 at a time, or 256 evenly spread chunks of a larger one.

    Read and not mapped: of a mapped file the kernel fetches much more than is asked for.
    """
    try:
        with open(bin_path(prefix), "rb", buffering=0) as stream:
            num_tokens = os.fstat(stream.fileno()).st_size // dtype.itemsize
            if num_tokens <= FULL_SCAN_TOKENS:
                starts, count = np.arange(0, num_tokens, READ_TOKENS), READ_TOKENS
            else:
                starts, count = np.linspace(0, num_tokens - SCAN_CHUNK_TOKENS, SCAN_CHUNKS), SCAN_CHUNK_TOKENS
            for start in starts.astype(np.int64).tolist():
                stream.seek(start * dtype.itemsize)
                yield np.fromfile(stream, dtype=dtype, count=count)
    except OSError as error:
        raise DataError(f"{bin_path(prefix)} cannot be read: {error.strerror}.") from error


def _check_sequences(prefix: str, index: ShardIndex) -> int:
    """Check each length, and each pointer against the lengths before it; return the byte at which the last one ends."""
    path, end = idx_path(prefix), 0
    for first in range(0, len(index.sequence_lengths), INDEX_BLOCK):
        block = slice(first, first + INDEX_BLOCK)
        lengths, pointers = index.sequence_lengths[block].astype(np.int64), index.sequence_pointers[block]
        negative = np.flatnonzero(lengths < 0)
        if len(negative):
            place = int(negative[0])
            raise DataError(f"{path}: sequence {first + place} has the length {lengths[place]}.{REMAKE}")
        sizes = lengths * index.dtype.itemsize
        ends = end + np.cumsum(sizes)
        wrong = np.flatnonzero(pointers != ends - sizes)
        if len(wrong):
            place = int(wrong[0])
            raise DataError(
                f"{path}: sequence {first + place} starts at byte {pointers[place]}, but the sequences before it end "
                f"at byte {ends[place] - sizes[place]}.{REMAKE}"
            )
        end = int(ends[-1])
    return end


def _check_documents(prefix: str, index: ShardIndex) -> None:
    documents, num_sequences = index.document_indices, len(index.sequence_lengths)
    bounds = (int(documents[0]), int(documents[-1])) if len(documents) else None
    rises = all(
        (np.diff(documents[first : first + INDEX_BLOCK + 1]) >= 0).all()
        for first in range(0, len(documents), INDEX_BLOCK)
    )
    if bounds != (0, num_sequences) or not rises:
        text = "is empty" if bounds is None else f"goes from {bounds[0]} to {bounds[1]} over {len(documents)} entries"
        raise DataError(
            f"{idx_path(prefix)}: the document index {text}; it must rise from 0 to {num_sequences}.{REMAKE}"
        )


def _check_manifest(prefix: str, manifest: ShardManifest, tokenizer_identifiers: Optional[dict[str, Any]]) -> None:
    found = file_sha256(idx_path(prefix))
    num_bytes = bin_path(prefix).stat().st_size
    if (found, num_bytes) != (manifest.idx_sha256, manifest.bin_bytes):
        raise DataError(
            f"Shard {prefix} is not the one that {manifest_path(prefix)} describes: SHA-256 of the index {found}, "
            f"expected {manifest.idx_sha256}; {num_bytes} bytes of tokens, expected {manifest.bin_bytes}.{REMAKE} "
            "If you replaced it on purpose, delete the manifest."
        )
    if None in (tokenizer_identifiers, manifest.tokenizer):
        return
    if manifest.tokenizer != dict(tokenizer_identifiers):
        raise DataError(
            f"Shard {prefix} was made with another tokenizer:\n"
            f"  the shard's: {describe_tokenizer(manifest.tokenizer)}\n"
            f"  this run's:  {describe_tokenizer(tokenizer_identifiers)}\n"
            "Give the shard's with --tokenizer-type and --tokenizer-model, or preprocess the text again. If you know "
            "that the ids mean the same, --allow-other-tokenizer compares the size of the vocabulary only."
        )


def _check_token_range(prefix: str, index: ShardIndex, vocab_size: int) -> None:
    if index.dtype.kind == "i" and np.iinfo(index.dtype).max < vocab_size - 1:
        # Else the ids above the limit would read as negative numbers, and few of them may lie in the chunks below.
        raise DataError(
            f"{idx_path(prefix)} says that the ids are {index.dtype.name}, which ends at "
            f"{np.iinfo(index.dtype).max}, but the vocabulary has {vocab_size}.{REMAKE}"
        )
    bounds = [(int(chunk.min()), int(chunk.max())) for chunk in _sampled_tokens(prefix, index.dtype)]
    smallest, largest = min(low for low, _ in bounds), max(high for _, high in bounds)
    if smallest < 0 or largest >= vocab_size:
        raise DataError(
            f"{bin_path(prefix)} holds token ids from {smallest} to {largest}, but the vocabulary has {vocab_size} "
            f"(0 to {vocab_size - 1}). Give the tokenizer that the shard was made with, or preprocess the text again."
        )
