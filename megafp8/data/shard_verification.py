"""Verification of shards: the check before a run, and the check of every byte.

megatron-core does not check shards and returns garbage from damaged ones. The index is redundant: lengths and pointers
follow from each other, and both from the size of the tokens. `check_shard` therefore finds damage to any of them
without reading all tokens. Damage that only hashes reveal, such as a flipped bit that leaves the ids within the
vocabulary, is found by `verify_shard`, which reads, hashes and compares both files.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from megafp8.data.object_tokens import ObjectTokens
from megafp8.data.shards import (
    INDEX_BLOCK,
    REMAKE,
    ShardIndex,
    ShardManifest,
    bin_path,
    idx_path,
    load_manifest,
    manifest_path,
    num_token_bytes,
    read_index,
)
from megafp8.data.tokenizers.build import describe_tokenizer
from megafp8.errors import DataError
from megafp8.utils.files import file_sha256
from megafp8.utils.object_store import is_url, local_path

# Up to this number of tokens, `check_shard` compares all ids with the vocabulary; beyond, evenly spread chunks.
FULL_SCAN_TOKENS = 1 << 24
SCAN_CHUNKS = 256
SCAN_CHUNK_TOKENS = 1 << 14
READ_TOKENS = 1 << 20
BLOCK_BYTES = 1 << 24

# Names of the checks of `verify_shard`.
STRUCTURE = "structure of the index, size of the tokens"
MANIFEST = "counts of the manifest"
INDEX_HASH = "SHA-256 of the index"
TOKENS_HASH = "SHA-256 of the tokens"
TOKEN_IDS = "token ids within the vocabulary"
ENDS = "every document ends with the end-of-document token"


def check_shard(prefix: str, vocab_size: int, *, tokenizer_identifiers: Optional[dict[str, Any]] = None) -> ShardIndex:
    """Check that a shard is complete and fits the tokenizer.

    Checks files, header, sizes, every length, pointer and document entry, and with a manifest the SHA-256 of the index
    and the tokenizer. All token ids are compared with the vocabulary up to 2^24 tokens (16.8 million), of a larger
    shard those of 256 evenly spread chunks of 16,384 tokens.

    Args:
        prefix: path without suffix.
        vocab_size: vocabulary size of the tokenizer, without padding.
        tokenizer_identifiers: `unique_identifiers` of the tokenizer; None compares only the vocabulary size.

    Returns:
        The index.

    Raises:
        DataError: what is wrong, with the values that differ.
    """
    if not is_url(prefix):
        return _check_shard(prefix, vocab_size, tokenizer_identifiers)
    try:
        return _check_shard(prefix, vocab_size, tokenizer_identifiers)
    except DataError as error:
        # The messages have the place of its copy in the cache.
        raise DataError(str(error).replace(str(local_path(prefix)), prefix)) from error


def _check_shard(prefix: str, vocab_size: int, tokenizer_identifiers: Optional[dict[str, Any]]) -> ShardIndex:
    index = read_index(prefix)
    check_structure(prefix, index)
    if index.num_tokens == 0:
        raise DataError(f"{bin_path(prefix)} has no tokens.")
    manifest = load_manifest(prefix)
    if manifest is not None:
        _check_manifest(prefix, manifest, tokenizer_identifiers)
    _check_token_range(prefix, index, vocab_size)
    return index


def check_structure(prefix: str, index: ShardIndex) -> None:
    """Check that lengths, pointers, document index and the size of the tokens are consistent.

    This takes one pass over the index; the tokens are not read.

    Raises:
        DataError: the first inconsistent entry, and what it should be.
    """
    end = _check_sequences(prefix, index)
    _check_documents(prefix, index)
    num_bytes = num_token_bytes(prefix)
    if num_bytes != end:
        raise DataError(
            f"{bin_path(prefix)} has {num_bytes} bytes, but according to its index it has "
            f"{end // index.dtype.itemsize} tokens of {index.dtype.itemsize} bytes, {end} bytes in total.{REMAKE}"
        )


def content_key(prefix: str) -> str:
    """Return a SHA-256 that changes when a shard is replaced under its path.

    It is the same for a copy of the shard. With a manifest that describes the index on disk, it covers the content of
    both files. Without one, it covers the content of the index, the number of tokens and the tokens that `check_shard`
    samples, because reading all tokens of a large shard takes too long.
    """
    manifest = load_manifest(prefix)
    index_sha256 = file_sha256(idx_path(prefix))
    if manifest is not None and manifest.idx_sha256 == index_sha256:
        tokens = manifest.bin_sha256
    else:
        digest = hashlib.sha256()
        for chunk in _sampled_tokens(prefix, read_index(prefix).dtype):
            digest.update(chunk.data)
        tokens = f"{num_token_bytes(prefix)}:{digest.hexdigest()}"
    return hashlib.sha256(f"{index_sha256}:{tokens}".encode()).hexdigest()


def _sampled_tokens(prefix: str, dtype: np.dtype) -> Iterator[np.ndarray]:
    """All tokens of a shard of up to 2^24 tokens, 2^20 at a time, or 256 evenly spread chunks of a larger one.

    They are read, not mapped, because the kernel reads much more of a mapped file than is accessed.
    """
    if is_url(prefix):
        tokens = ObjectTokens(prefix)
        starts, count = _sample_starts(tokens.num_bytes // dtype.itemsize)
        if count == READ_TOKENS:  # small: it is read again soon
            for start in starts:
                chunk = np.empty(min(count, tokens.num_bytes // dtype.itemsize - start), dtype)
                tokens.read_into(chunk.data.cast("B"), start * dtype.itemsize)
                yield chunk
        else:
            sizes = [start * dtype.itemsize for start in starts]
            yield from (np.frombuffer(each, dtype) for each in tokens.read_ranges(sizes, count * dtype.itemsize))
        return
    try:
        with open(bin_path(prefix), "rb", buffering=0) as stream:
            starts, count = _sample_starts(os.fstat(stream.fileno()).st_size // dtype.itemsize)
            for start in starts:
                stream.seek(start * dtype.itemsize)
                yield np.fromfile(stream, dtype=dtype, count=count)
    except OSError as error:
        raise DataError(f"{bin_path(prefix)} cannot be read: {error.strerror}.") from error


def _sample_starts(num_tokens: int) -> tuple[list[int], int]:
    """First token of each chunk of a sample, and the tokens of a chunk."""
    if num_tokens <= FULL_SCAN_TOKENS:
        return list(range(0, num_tokens, READ_TOKENS)), READ_TOKENS
    spread = np.linspace(0, num_tokens - SCAN_CHUNK_TOKENS, SCAN_CHUNKS)
    return spread.astype(np.int64).tolist(), SCAN_CHUNK_TOKENS


def _check_sequences(prefix: str, index: ShardIndex) -> int:
    """Check each length, and each pointer against the lengths before it; return the byte where the last one ends."""
    path, end = idx_path(prefix), 0
    for first in range(0, len(index.sequence_lengths), INDEX_BLOCK):
        block = slice(first, first + INDEX_BLOCK)
        lengths, pointers = index.sequence_lengths[block].astype(np.int64), index.sequence_pointers[block]
        if len(negative := np.flatnonzero(lengths < 0)):
            number = int(negative[0])
            raise DataError(f"{path}: sequence {first + number} has the length {lengths[number]}.{REMAKE}")
        sizes = lengths * index.dtype.itemsize
        ends = end + np.cumsum(sizes)
        if len(wrong := np.flatnonzero(pointers != ends - sizes)):
            number = int(wrong[0])
            raise DataError(
                f"{path}: sequence {first + number} starts at byte {pointers[number]}, but the sequences before it end "
                f"at byte {ends[number] - sizes[number]}.{REMAKE}"
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
        text = "is empty" if bounds is None else f"ranges from {bounds[0]} to {bounds[1]} over {len(documents)} entries"
        raise DataError(
            f"{idx_path(prefix)}: the document index {text}; it must increase from 0 to {num_sequences}.{REMAKE}"
        )


def _check_manifest(prefix: str, manifest: ShardManifest, tokenizer_identifiers: Optional[dict[str, Any]]) -> None:
    found = file_sha256(idx_path(prefix))
    num_bytes = num_token_bytes(prefix)
    if (found, num_bytes) != (manifest.idx_sha256, manifest.bin_bytes):
        raise DataError(
            f"Shard {prefix} does not match its manifest {manifest_path(prefix)}: SHA-256 of the index {found}, "
            f"expected {manifest.idx_sha256}; {num_bytes} bytes of tokens, expected {manifest.bin_bytes}.{REMAKE} If "
            "you replaced it on purpose, delete the manifest."
        )
    if tokenizer_identifiers is None or manifest.tokenizer is None:
        return
    if manifest.tokenizer != dict(tokenizer_identifiers):
        raise DataError(
            f"Shard {prefix} was created with a different tokenizer:\n  the shard's: "
            f"{describe_tokenizer(manifest.tokenizer)}\n  this run's:  "
            f"{describe_tokenizer(tokenizer_identifiers)}\nUse the shard's with --tokenizer-type and "
            "--tokenizer-model, or preprocess the text again. If the token ids are known to be the same, use "
            "--allow-other-tokenizer, which compares only the vocabulary sizes."
        )


def _check_token_range(prefix: str, index: ShardIndex, vocab_size: int) -> None:
    if index.dtype.kind == "i" and np.iinfo(index.dtype).max < vocab_size - 1:
        # Ids above the limit would be read as negative numbers, of which the chunks below may hold none.
        raise DataError(
            f"{idx_path(prefix)}: token ids are {index.dtype.name}, whose maximum is {np.iinfo(index.dtype).max}, but "
            f"the vocabulary size is {vocab_size}.{REMAKE}"
        )
    bounds = [(int(chunk.min()), int(chunk.max())) for chunk in _sampled_tokens(prefix, index.dtype)]
    smallest, largest = min(low for low, _ in bounds), max(high for _, high in bounds)
    if smallest < 0 or largest >= vocab_size:
        raise DataError(
            f"{bin_path(prefix)} has token ids from {smallest} to {largest}, but the vocabulary size is {vocab_size} "
            f"(0 to {vocab_size - 1}). Use the tokenizer that the shard was created with, or preprocess the text again."
        )


@dataclass(frozen=True)
class ShardCheckResult:
    """Result of one check.

    Attributes:
        check: name of the check.
        passed: None if there is nothing to compare with.
        detail: the values.
    """

    check: str
    passed: Optional[bool]
    detail: str


def verify_shard(
    prefix: str, *, vocab_size: Optional[int] = None, on_progress: Callable[[int], None] = lambda _: None
) -> list[ShardCheckResult]:
    """Read a complete shard, and check that it is consistent and matches its manifest.

    Memory: 16 MiB of tokens and 2^20 entries of the index at a time.

    Args:
        prefix: path without suffix.
        vocab_size: upper limit of the ids; None takes the manifest's.
        on_progress: called with the number of bytes of tokens read since the last call.

    Returns:
        The results, in the order of the checks, without the checks that an earlier failure made impossible.
    """
    try:
        index = read_index(prefix)
        check_structure(prefix, index)
    except DataError as error:
        return [ShardCheckResult(STRUCTURE, False, str(error))]
    results = [ShardCheckResult(STRUCTURE, True, f"{index.num_documents} documents, {index.num_tokens} tokens")]
    manifest: Optional[ShardManifest] = None
    try:
        manifest = load_manifest(prefix)
    except DataError as error:
        results.append(ShardCheckResult(MANIFEST, False, str(error)))
    else:
        results.append(_compare_counts(index, manifest))
    idx_sha256, bin_sha256 = (None, None) if manifest is None else (manifest.idx_sha256, manifest.bin_sha256)
    tokenizer = (manifest and manifest.tokenizer) or {}
    results.append(_compare_hash(INDEX_HASH, file_sha256(idx_path(prefix)), idx_sha256))
    vocab_size = tokenizer.get("vocab_size") if vocab_size is None else vocab_size
    found_sha256, ids = _read_tokens(prefix, index, vocab_size, on_progress)
    results += [_compare_hash(TOKENS_HASH, found_sha256, bin_sha256), ids]
    if manifest is not None and manifest.append_eod and "eod" in tokenizer:
        results.append(_check_ends(prefix, index, tokenizer["eod"]))
    return results


def failures(results: list[ShardCheckResult]) -> list[ShardCheckResult]:
    """Return the results of the checks that failed."""
    return [result for result in results if result.passed is False]


def _compare_hash(check: str, found: str, expected: Optional[str]) -> ShardCheckResult:
    if expected is None:
        return ShardCheckResult(check, None, f"{found}; no manifest to compare with")
    if found == expected:
        return ShardCheckResult(check, True, found)
    return ShardCheckResult(check, False, f"{found}, but the manifest has {expected}")


def _compare_counts(index: ShardIndex, manifest: Optional[ShardManifest]) -> ShardCheckResult:
    if manifest is None:
        return ShardCheckResult(MANIFEST, None, "no manifest")
    counted = {
        "dtype": index.dtype.name,
        "num_documents": index.num_documents,
        "num_sequences": len(index.sequence_lengths),
        "num_tokens": index.num_tokens,
        "bin_bytes": index.num_tokens * index.dtype.itemsize,
    }
    wrong = [
        f"{name} is {value}, expected {getattr(manifest, name)}"
        for name, value in counted.items()
        if value != getattr(manifest, name)
    ]
    return ShardCheckResult(MANIFEST, not wrong, ", ".join(wrong) or "as counted")


def _read_tokens(
    prefix: str, index: ShardIndex, vocab_size: Optional[int], on_progress: Callable[[int], None]
) -> tuple[str, ShardCheckResult]:
    """Hash the tokens, and find the first id that is not in the vocabulary."""
    digest, position = hashlib.sha256(), 0
    smallest = largest = first_wrong = None
    with open(bin_path(prefix), "rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
            ids = np.frombuffer(block, dtype=index.dtype, count=len(block) // index.dtype.itemsize)
            low, high = int(ids.min()), int(ids.max())
            smallest = low if smallest is None else min(smallest, low)
            largest = high if largest is None else max(largest, high)
            if first_wrong is None and vocab_size is not None and (low < 0 or high >= vocab_size):
                first_wrong = position + int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
            position += len(ids)
            on_progress(len(block))
    detail = "no tokens" if smallest is None else f"ids from {smallest} to {largest}"
    if vocab_size is None:
        result = ShardCheckResult(TOKEN_IDS, None, f"{detail}; the vocabulary size is unknown")
    else:
        detail += f", vocabulary 0 to {vocab_size - 1}"
        if first_wrong is not None:
            document = _document_of(index, first_wrong)
            detail += f": first token {first_wrong} of the shard, in document {document}"
        result = ShardCheckResult(TOKEN_IDS, first_wrong is None, detail)
    return digest.hexdigest(), result


def _document_of(index: ShardIndex, position: int) -> int:
    """Number of the document with the token at `position`."""
    sequence = bisect_right(index.sequence_pointers, position * index.dtype.itemsize) - 1
    return bisect_right(index.document_indices, sequence) - 1


def _check_ends(prefix: str, index: ShardIndex, eod: int) -> ShardCheckResult:
    if index.num_tokens == 0:
        return ShardCheckResult(ENDS, None, "no document has tokens")
    tokens = np.memmap(bin_path(prefix), dtype=index.dtype, mode="r")
    number = 0
    for starts, ends in document_bounds(index):
        has_tokens = np.flatnonzero(ends > starts)
        wrong = has_tokens[tokens[ends[has_tokens] - 1] != eod]
        if len(wrong):
            last = tokens[ends[wrong[0]] - 1]
            return ShardCheckResult(ENDS, False, f"document {number + wrong[0]} ends with token {last}, expected {eod}")
        number += len(ends)
    return ShardCheckResult(ENDS, True, f"token {eod}")


def document_bounds(index: ShardIndex) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the first token and the last token + 1 of each document in the shard, 2^20 documents at a time.

    Args:
        index: valid index of a complete shard.
    """
    num_sequences, num_tokens = len(index.sequence_lengths), index.num_tokens
    for first in range(0, index.num_documents, INDEX_BLOCK):
        entries = index.document_indices[first : first + INDEX_BLOCK + 1]
        bounds = np.full(len(entries), num_tokens, dtype=np.int64)
        is_inside = entries < num_sequences
        bounds[is_inside] = index.sequence_pointers[entries[is_inside]] // index.dtype.itemsize
        yield bounds[:-1], bounds[1:]
