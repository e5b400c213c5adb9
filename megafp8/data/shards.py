"""Token shards in Megatron's format: `PREFIX.bin` and `PREFIX.idx`, exchangeable with megatron-core both ways.

`.bin` is token ids and nothing else. `.idx`, little-endian:

    9 bytes   magic "MMIDIDX\\0\\0"
    uint64    version, 1
    uint8     code of the token dtype
    uint64    S, number of sequences
    uint64    D, number of entries of the document index
    int32[S]  tokens in each sequence
    int64[S]  byte in .bin at which each sequence starts
    int64[D]  first sequence of each document, and S at the end

A document is one sequence here; one without tokens is no sequence, but an entry of the document index (as Megatron's
`preprocess_data.py` writes it). Source: megatron-core 0.16.1, `datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Optional

import numpy as np

from megafp8.data.atomic import publish, sync, temporary_name
from megafp8.data.manifest import ShardManifest, load_manifest, manifest_path
from megafp8.data.tokenizer import file_sha256
from megafp8.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# Megatron's codes; 6 and 7 are floats, which are no token ids.
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
DTYPE_CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
# Megatron's limit below which ids are two bytes wide.
UINT16_MAX_VOCAB_SIZE = 65500

# Shards up to so many tokens are searched in full for ids beyond the vocabulary, larger ones in evenly spread chunks.
FULL_SCAN_TOKENS = 1 << 24
SCAN_CHUNKS = 256
SCAN_CHUNK_TOKENS = 1 << 14


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype that Megatron gives the ids of a vocabulary of this size."""
    return np.dtype(np.uint16 if vocab_size < UINT16_MAX_VOCAB_SIZE else np.int32)


def bin_path(prefix: str) -> Path:
    """Return the path of a shard's tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str) -> Path:
    """Return the path of a shard's index."""
    return Path(f"{prefix}.idx")


@dataclass(frozen=True)
class ShardTotals:
    """What a writer wrote. Sizes in bytes, hashes SHA-256 in hexadecimal."""

    num_documents: int
    num_sequences: int
    num_tokens: int
    bin_bytes: int
    bin_sha256: str
    idx_bytes: int
    idx_sha256: str


@dataclass(frozen=True)
class ShardIndex:
    """The index of a shard.

    Attributes:
        dtype: of the token ids.
        sequence_lengths: int32 [S], tokens.
        sequence_pointers: int64 [S], bytes.
        document_indices: int64 [D].
    """

    dtype: np.dtype
    sequence_lengths: np.ndarray
    sequence_pointers: np.ndarray
    document_indices: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences."""
        return int(self.sequence_lengths.sum(dtype=np.int64))


class ShardWriter:
    """Writes one shard; use as a context manager. Nothing has its name before `finish`; without it nothing is left.

    Memory: 4 bytes a document, 20 while the index is written.

    Args:
        prefix: path without suffix.
        dtype: of the token ids, see `token_dtype`.
    """

    def __init__(self, prefix: str, dtype: np.dtype):
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self._bin_temporary = temporary_name(bin_path(prefix))
        self._idx_temporary = temporary_name(idx_path(prefix))
        self._lengths: list[np.ndarray] = []
        self._digest = hashlib.sha256()
        self._bin_bytes = 0
        self._stream = open(self._bin_temporary, "wb")  # noqa: SIM115  closed by finish() or __exit__()

    def __enter__(self) -> "ShardWriter":
        return self

    def add_documents(self, token_bytes: bytes, lengths: np.ndarray) -> None:
        """Append documents.

        Args:
            token_bytes: the ids of all of them, in the shard's dtype.
            lengths: int32 [documents], tokens in each; 0 for a document without tokens.
        """
        assert int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize == len(token_bytes)
        self._stream.write(token_bytes)
        self._digest.update(token_bytes)
        self._bin_bytes += len(token_bytes)
        self._lengths.append(lengths.astype(np.int32, copy=True))

    def finish(self) -> ShardTotals:
        """Write the index and give both files their names."""
        document_lengths = np.concatenate([np.empty(0, np.int32), *self._lengths])
        sync(self._stream)
        self._stream.close()
        index = encode_index(document_lengths, self.dtype)
        with open(self._idx_temporary, "wb") as stream:
            stream.write(index)
            sync(stream)
        # An old index goes first: should the machine stop in between, there is a shard with a file missing, which every
        # reader notices, and never new tokens under an old index.
        idx_path(self.prefix).unlink(missing_ok=True)
        publish(self._bin_temporary, bin_path(self.prefix))
        publish(self._idx_temporary, idx_path(self.prefix))
        return ShardTotals(
            num_documents=len(document_lengths),
            num_sequences=int(np.count_nonzero(document_lengths)),
            num_tokens=self._bin_bytes // self.dtype.itemsize,
            bin_bytes=self._bin_bytes,
            bin_sha256=self._digest.hexdigest(),
            idx_bytes=len(index),
            idx_sha256=hashlib.sha256(index).hexdigest(),
        )

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._stream.close()
        self._bin_temporary.unlink(missing_ok=True)
        self._idx_temporary.unlink(missing_ok=True)


def encode_index(document_lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """Return the bytes of the `.idx` of documents that are one sequence each (none when the length is 0).

    Args:
        document_lengths: int32 [documents], tokens.
        dtype: of the token ids.
    """
    holds_tokens = document_lengths > 0
    lengths = document_lengths[holds_tokens].astype("<i4")
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    pointers = np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)]
    documents = np.concatenate([np.zeros(1, np.int64), np.cumsum(holds_tokens, dtype=np.int64)])
    header = HEADER.pack(MAGIC, VERSION, DTYPE_CODES[dtype], len(lengths), len(documents))
    return b"".join([header, lengths.tobytes(), pointers.astype("<i8").tobytes(), documents.astype("<i8").tobytes()])


def read_index(prefix: str) -> ShardIndex:
    """Map the index of a shard into memory, after checking that its size is what its header says.

    Raises:
        DataError: a file is missing, or the header or the size is wrong.
    """
    path = idx_path(prefix)
    _check_files_exist(prefix)
    num_bytes = path.stat().st_size
    if num_bytes < HEADER.size:
        raise DataError(f"{path} is {num_bytes} bytes long, less than its {HEADER.size} bytes of header.{_REMAKE}")
    with open(path, "rb") as stream:
        magic, version, code, num_sequences, num_entries = HEADER.unpack(stream.read(HEADER.size))
    if magic != MAGIC or version != VERSION:
        raise DataError(
            f"{path} is not an index in Megatron's format: it starts with {magic!r}, version {version}; "
            f"expected {MAGIC!r}, version {VERSION}."
        )
    if code not in DTYPES:
        raise DataError(f"{path} has the dtype code {code}; token ids have one of {sorted(DTYPES)}.{_REMAKE}")
    expected = HEADER.size + 12 * num_sequences + 8 * num_entries
    if num_bytes != expected:
        raise DataError(
            f"{path} is {num_bytes} bytes long, but {num_sequences} sequences and {num_entries} document entries take "
            f"{expected} bytes. It is cut short, damaged, or multimodal (which megafp8 does not train).{_REMAKE}"
        )
    content = np.memmap(path, dtype=np.uint8, mode="r")
    lengths_end = HEADER.size + 4 * num_sequences
    pointers_end = lengths_end + 8 * num_sequences
    return ShardIndex(
        dtype=np.dtype(DTYPES[code]),
        sequence_lengths=content[HEADER.size : lengths_end].view("<i4"),
        sequence_pointers=content[lengths_end:pointers_end].view("<i8"),
        document_indices=content[pointers_end:].view("<i8"),
    )


def check_shard(prefix: str, vocab_size: int, *, tokenizer_identifiers: Optional[dict[str, Any]] = None) -> ShardIndex:
    """Check that a shard is whole and fits the tokenizer; megatron-core checks neither and hands out garbage.

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
    _check_index(prefix, index)
    num_bytes = bin_path(prefix).stat().st_size
    expected = index.num_tokens * index.dtype.itemsize
    if num_bytes != expected:
        raise DataError(
            f"{bin_path(prefix)} is {num_bytes} bytes long, but its index counts {index.num_tokens} tokens of "
            f"{index.dtype.itemsize} bytes, which are {expected} bytes.{_REMAKE}"
        )
    if index.num_tokens == 0:
        raise DataError(f"{bin_path(prefix)} holds no tokens.")
    manifest = load_manifest(prefix)
    if manifest is not None:
        _check_manifest(prefix, manifest, tokenizer_identifiers)
    _check_token_range(prefix, index, vocab_size)
    return index


def content_key(prefix: str) -> str:
    """Return a SHA-256 that changes when a shard is replaced under its path.

    With a manifest that describes the index on disk it covers the content of both files. Without, it covers the content
    of the index and size and modification time of the tokens, because reading all tokens takes too long.
    """
    manifest = load_manifest(prefix)
    index_sha256 = file_sha256(idx_path(prefix))
    if manifest is not None and manifest.idx_sha256 == index_sha256:
        tokens = manifest.bin_sha256
    else:
        status = bin_path(prefix).stat()
        tokens = f"{status.st_size}:{status.st_mtime_ns}"
    return hashlib.sha256(f"{index_sha256}:{tokens}".encode()).hexdigest()


_REMAKE = " Make the shard again (tools/preprocess_data.py --overwrite) or copy it again."


def _check_files_exist(prefix: str) -> None:
    missing = [str(path) for path in (idx_path(prefix), bin_path(prefix)) if not path.is_file()]
    if not missing:
        return
    hint = ""
    if prefix.endswith((".bin", ".idx")):
        hint = " The path is given without .bin or .idx."
    elif idx_path(f"{prefix}_text_document").is_file():
        hint = f" Did you mean {prefix}_text_document?"
    raise DataError(f"Shard {prefix}: {' and '.join(missing)} missing.{hint}")


def _check_index(prefix: str, index: ShardIndex) -> None:
    lengths, pointers, documents = index.sequence_lengths, index.sequence_pointers, index.document_indices
    path = idx_path(prefix)
    negative = np.flatnonzero(lengths < 0)
    if len(negative):
        place = int(negative[0])
        raise DataError(f"{path}: sequence {place} has the length {lengths[place]}.{_REMAKE}")
    ends = np.cumsum(lengths, dtype=np.int64) * index.dtype.itemsize
    starts = np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)]
    wrong = np.flatnonzero(pointers != starts)
    if len(wrong):
        place = int(wrong[0])
        raise DataError(
            f"{path}: sequence {place} starts at byte {pointers[place]}, but the sequences before it end at byte "
            f"{starts[place]}.{_REMAKE}"
        )
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
        ends_text = f"{documents[0]} to {documents[-1]}" if len(documents) else "nothing"
        raise DataError(
            f"{path}: the document index goes from {ends_text} over {len(documents)} entries; it must rise from 0 to "
            f"{len(lengths)}.{_REMAKE}"
        )


def _check_manifest(prefix: str, manifest: ShardManifest, tokenizer_identifiers: Optional[dict[str, Any]]) -> None:
    found = file_sha256(idx_path(prefix))
    num_bytes = bin_path(prefix).stat().st_size
    if (found, num_bytes) != (manifest.idx_sha256, manifest.bin_bytes):
        raise DataError(
            f"Shard {prefix} is not the one that {manifest_path(prefix)} describes: SHA-256 of the index {found}, "
            f"expected {manifest.idx_sha256}; {num_bytes} bytes of tokens, expected {manifest.bin_bytes}.{_REMAKE} "
            "If you replaced it on purpose, delete the manifest."
        )
    if tokenizer_identifiers is not None and manifest.tokenizer != dict(tokenizer_identifiers):
        raise DataError(
            f"Shard {prefix} was made with another tokenizer: {manifest.tokenizer}, but this run has "
            f"{dict(tokenizer_identifiers)}. Give --tokenizer-type and --tokenizer-model of the shard, or preprocess "
            "the text again."
        )


def _check_token_range(prefix: str, index: ShardIndex, vocab_size: int) -> None:
    tokens = np.memmap(bin_path(prefix), dtype=index.dtype, mode="r")
    if len(tokens) <= FULL_SCAN_TOKENS:
        chunks = [tokens]
    else:
        starts = np.linspace(0, len(tokens) - SCAN_CHUNK_TOKENS, SCAN_CHUNKS).astype(np.int64)
        chunks = [tokens[start : start + SCAN_CHUNK_TOKENS] for start in starts]
    smallest = min(int(chunk.min()) for chunk in chunks)
    largest = max(int(chunk.max()) for chunk in chunks)
    if smallest < 0 or largest >= vocab_size:
        raise DataError(
            f"{bin_path(prefix)} holds token ids from {smallest} to {largest}, but the vocabulary has {vocab_size} "
            f"(0 to {vocab_size - 1}). Give the tokenizer that the shard was made with, or preprocess the text again."
        )
