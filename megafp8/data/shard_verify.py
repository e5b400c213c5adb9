"""Everything that can be said about the soundness of a shard, from one pass over its files.

`shard_checks` asks before a run what is cheap to ask; here every byte is read, hashed and compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Optional

import numpy as np

from megafp8.data.atomic import file_sha256
from megafp8.data.manifest import ShardManifest, load_manifest
from megafp8.data.shard_checks import check_structure
from megafp8.data.shards import INDEX_BLOCK, ShardIndex, bin_path, idx_path, read_index
from megafp8.errors import DataError

BLOCK_BYTES = 1 << 24

STRUCTURE = "structure of the index, size of the tokens"
MANIFEST = "counts of the manifest"
INDEX_HASH = "SHA-256 of the index"
TOKENS_HASH = "SHA-256 of the tokens"
TOKEN_IDS = "token ids within the vocabulary"
ENDS = "every document ends with the end-of-document token"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what.
        passed: whether it is sound; None where nothing is known to compare with.
        detail: the numbers.
    """

    check: str
    passed: Optional[bool]
    detail: str


def verify_shard(
    prefix: str, *, vocab_size: Optional[int] = None, on_progress: Optional[Callable[[int], None]] = None
) -> list[Finding]:
    """Read all of a shard and compare it with itself and with its manifest.

    Memory: 16 MiB of tokens and 2^20 entries of the index at a time.

    Args:
        prefix: path without suffix.
        vocab_size: ids must be below; None takes the manifest's.
        on_progress: called with the number of bytes of tokens that were read since.

    Returns:
        What was looked at, in the order in which it was. What could not be looked at any more is not in it.
    """
    try:
        index = read_index(prefix)
        check_structure(prefix, index)
    except DataError as error:
        return [Finding(STRUCTURE, False, str(error))]
    findings = [Finding(STRUCTURE, True, f"{index.num_documents} documents, {index.num_tokens} tokens")]
    try:
        manifest = load_manifest(prefix)
    except DataError as error:
        manifest, findings = None, [*findings, Finding(MANIFEST, False, str(error))]
    else:
        findings.append(_compare_counts(index, manifest))
    findings.append(_compare(INDEX_HASH, file_sha256(idx_path(prefix)), manifest and manifest.idx_sha256))
    if vocab_size is None and manifest is not None and manifest.tokenizer is not None:
        vocab_size = manifest.tokenizer.get("vocab_size")
    found_sha256, ids = _read_tokens(prefix, index, vocab_size, on_progress)
    findings += [_compare(TOKENS_HASH, found_sha256, manifest and manifest.bin_sha256), ids]
    if manifest is not None and manifest.append_eod and "eod" in (manifest.tokenizer or {}):
        findings.append(_check_ends(prefix, index, manifest.tokenizer["eod"]))
    return findings


def failures(findings: list[Finding]) -> list[Finding]:
    """Return what is not sound."""
    return [finding for finding in findings if finding.passed is False]


def _compare(check: str, found: str, expected: Optional[str]) -> Finding:
    if expected is None:
        return Finding(check, None, f"{found}; no manifest to compare with")
    if found == expected:
        return Finding(check, True, found)
    return Finding(check, False, f"{found}, but the manifest says {expected}")


def _compare_counts(index: ShardIndex, manifest: Optional[ShardManifest]) -> Finding:
    if manifest is None:
        return Finding(MANIFEST, None, "there is no manifest")
    counted = {
        "dtype": index.dtype.name,
        "num_documents": index.num_documents,
        "num_sequences": len(index.sequence_lengths),
        "num_tokens": index.num_tokens,
        "bin_bytes": index.num_tokens * index.dtype.itemsize,
    }
    wrong = [
        f"{name} {value} instead of {getattr(manifest, name)}"
        for name, value in counted.items()
        if value != getattr(manifest, name)
    ]
    return Finding(MANIFEST, not wrong, ", ".join(wrong) or "as counted")


def _read_tokens(
    prefix: str, index: ShardIndex, vocab_size: Optional[int], on_progress: Optional[Callable[[int], None]]
) -> tuple[str, Finding]:
    """Hash the tokens and look for the first id that is not in the vocabulary."""
    digest, smallest, largest, first_wrong, position = hashlib.sha256(), None, None, None, 0
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
            if on_progress is not None:
                on_progress(len(block))
    seen = "no tokens" if smallest is None else f"ids from {smallest} to {largest}"
    if vocab_size is None:
        return digest.hexdigest(), Finding(TOKEN_IDS, None, f"{seen}; the size of the vocabulary is not known")
    if first_wrong is None:
        return digest.hexdigest(), Finding(TOKEN_IDS, True, f"{seen}, vocabulary 0 to {vocab_size - 1}")
    where = f"token {first_wrong} of the shard, in document {_document_of(index, first_wrong)}"
    return digest.hexdigest(), Finding(TOKEN_IDS, False, f"{seen}, vocabulary 0 to {vocab_size - 1}: first {where}")


def _document_of(index: ShardIndex, position: int) -> int:
    """Number of the document that holds the token at `position`."""
    sequence = int(np.searchsorted(index.sequence_pointers, position * index.dtype.itemsize, side="right")) - 1
    return int(np.searchsorted(index.document_indices, sequence, side="right")) - 1


def _check_ends(prefix: str, index: ShardIndex, eod: int) -> Finding:
    if index.num_tokens == 0:
        return Finding(ENDS, None, "no document has tokens")
    tokens = np.memmap(bin_path(prefix), dtype=index.dtype, mode="r")
    number = 0
    for starts, ends in document_bounds(index):
        holds_tokens = np.flatnonzero(ends > starts)
        wrong = holds_tokens[tokens[ends[holds_tokens] - 1] != eod]
        if len(wrong):
            last = tokens[ends[wrong[0]] - 1]
            return Finding(ENDS, False, f"document {number + wrong[0]} ends with {last} instead of {eod}")
        number += len(ends)
    return Finding(ENDS, True, f"token {eod}")


def document_bounds(index: ShardIndex) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield first token and last token + 1 of documents, counted over the whole shard, 2^20 documents at a time.

    Args:
        index: of a whole shard, and sound.
    """
    num_sequences, num_tokens = len(index.sequence_lengths), index.num_tokens
    for first in range(0, index.num_documents, INDEX_BLOCK):
        entries = index.document_indices[first : first + INDEX_BLOCK + 1]
        bounds = np.full(len(entries), num_tokens, dtype=np.int64)
        is_inside = entries < num_sequences
        bounds[is_inside] = index.sequence_pointers[entries[is_inside]] // index.dtype.itemsize
        yield bounds[:-1], bounds[1:]
