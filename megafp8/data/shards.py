"""Token shards in Megatron's format: `PREFIX.bin` and `PREFIX.idx`, exchangeable with megatron-core both ways.

`.bin` holds only the token ids. `.idx`, little-endian:

    9 bytes   magic "MMIDIDX\0\0"
    uint64    version, 1
    uint8     code of the token dtype
    uint64    S, number of sequences
    uint64    D, number of entries of the document index
    int32[S]  tokens in each sequence
    int64[S]  byte offset in .bin at which each sequence starts
    int64[D]  first sequence of each document, and S at the end
    int8[S]   mode of each sequence; only in multimodal shards

This package writes one sequence per document. As with Megatron's `preprocess_data.py`, a document without tokens has no
sequence, only an entry in the document index. Other writers may divide documents into several sequences.
Source: megatron-core 0.16.1, `datasets/indexed_dataset.py`.

The manifest, `PREFIX.manifest.json`, records what a shard holds and what it was made from. A shard whose files do not
match its manifest is refused. Shards made by other programs have none.

This module reads and writes the format; `shard_verification` checks shards.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Optional, Union

import numpy as np

from megafp8.data.object_tokens import ObjectTokens, copy_index
from megafp8.errors import DataError
from megafp8.utils.files import LIST_BYTES, HashedStream, UnreadableFile, atomic_write_json, publish, read_bytes, sync
from megafp8.utils.object_store import is_url, local_path
from megafp8.utils.strict_json import parse_json

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# Megatron's codes. 6 and 7 are floats, which cannot be token ids.
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
DTYPE_CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
# Megatron's limit: ids of smaller vocabularies are two bytes wide.
UINT16_MAX_VOCAB_SIZE = 65500
# Entries of an index that are processed at a time, which bounds the memory beside the mapped file.
INDEX_BLOCK = 1 << 20
REMAKE = " Create the shard again (megafp8 preprocess --overwrite), or copy it again."


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype that Megatron gives the ids of a vocabulary of this size.

    Raises:
        DataError: its ids do not fit int32.
    """
    if vocab_size > 1 << 31:
        raise DataError(f"The vocabulary has the token id {vocab_size - 1}; shards hold ids up to 2^31 - 1.")
    return np.dtype(np.uint16 if vocab_size < UINT16_MAX_VOCAB_SIZE else np.int32)


def bin_path(prefix: str) -> Path:
    """Return the path of a shard's tokens."""
    return local_path(f"{prefix}.bin")


def num_token_bytes(prefix: str) -> int:
    """Return the size of a shard's tokens."""
    return ObjectTokens(prefix).num_bytes if is_url(prefix) else bin_path(prefix).stat().st_size


def idx_path(prefix: str) -> Path:
    """Return the path of a shard's index."""
    return local_path(f"{prefix}.idx")


@dataclass(frozen=True)
class ShardTotals:
    """Counts, sizes in bytes, and SHA-256 in hexadecimal of the two files of a shard."""

    num_documents: int
    num_sequences: int
    num_tokens: int
    bin_bytes: int
    bin_sha256: str
    idx_bytes: int
    idx_sha256: str


@dataclass(frozen=True)
class ShardIndex:
    """The index of a shard, or of consecutive documents of one.

    Attributes:
        dtype: dtype of the token ids.
        sequence_lengths: int32 [S], tokens.
        sequence_pointers: int64 [S], bytes.
        document_indices: int64 [D]; the first entry is the number of the first sequence in the complete shard.
        sequence_modes: int8 [S], or None; has no meaning for text.
    """

    dtype: np.dtype
    sequence_lengths: np.ndarray
    sequence_pointers: np.ndarray
    document_indices: np.ndarray
    sequence_modes: Optional[np.ndarray] = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all sequences."""
        return int(self.sequence_lengths.sum(dtype=np.int64))

    @property
    def num_documents(self) -> int:
        """Number of documents, including those without tokens."""
        return len(self.document_indices) - 1

    def documents(self, first: int, last: int) -> "ShardIndex":
        """Return the index of documents first to last - 1, which shares the memory."""
        entries = self.document_indices[first : last + 1]
        sequences = slice(*(int(entry - self.document_indices[0]) for entry in (entries[0], entries[-1])))
        return ShardIndex(
            dtype=self.dtype,
            sequence_lengths=self.sequence_lengths[sequences],
            sequence_pointers=self.sequence_pointers[sequences],
            document_indices=entries,
            sequence_modes=None if self.sequence_modes is None else self.sequence_modes[sequences],
        )


def publish_shard(prefix: str, bin_temporary: Path, idx_temporary: Path) -> None:
    """Rename the two closed and synced files of a shard to their final names."""
    # The old index is deleted first. If the machine stops in between, the shard lacks a file, which every reader
    # notices; there are never new tokens under an old index.
    idx_path(prefix).unlink(missing_ok=True)
    publish(bin_temporary, bin_path(prefix))
    publish(idx_temporary, idx_path(prefix))


def write_index(stream: Union[BinaryIO, HashedStream], parts: Sequence[ShardIndex]) -> None:
    """Write the `.idx` of a shard whose tokens are those of `parts`, concatenated.

    Memory: 2^20 entries at a time.

    Args:
        stream: open for writing.
        parts: all of the same dtype, and all with modes or all without.
    """
    dtype = parts[0].dtype
    assert all(part.dtype == dtype for part in parts)
    assert len({part.sequence_modes is None for part in parts}) == 1
    num_sequences = sum(len(part.sequence_lengths) for part in parts)
    num_documents = sum(part.num_documents for part in parts)
    stream.write(HEADER.pack(MAGIC, VERSION, DTYPE_CODES[dtype], num_sequences, num_documents + 1))
    for lengths in _blocks(part.sequence_lengths for part in parts):
        stream.write(lengths.astype("<i4").tobytes())
    end = 0
    for lengths in _blocks(part.sequence_lengths for part in parts):
        ends = end + np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
        stream.write((ends - lengths.astype(np.int64) * dtype.itemsize).astype("<i8").tobytes())
        end = int(ends[-1])
    stream.write(struct.pack("<q", 0))
    num_before = 0
    for part in parts:
        for entries in _blocks([part.document_indices[1:]]):
            stream.write((entries - part.document_indices[0] + num_before).astype("<i8").tobytes())
        num_before += len(part.sequence_lengths)
    for modes in _blocks(part.sequence_modes for part in parts if part.sequence_modes is not None):
        stream.write(modes.astype("i1").tobytes())


def write_index_file(path: Path, parts: Sequence[ShardIndex], *, bin_bytes: int, bin_sha256: str) -> ShardTotals:
    """Write and sync the `.idx` of `parts`, see `write_index`.

    Returns:
        The totals of the shard, whose tokens have the given size and hash.
    """
    with open(path, "wb") as stream:
        index = HashedStream(stream)
        write_index(index, parts)
        sync(stream)
    return ShardTotals(
        num_documents=sum(part.num_documents for part in parts),
        num_sequences=sum(len(part.sequence_lengths) for part in parts),
        num_tokens=bin_bytes // parts[0].dtype.itemsize,
        bin_bytes=bin_bytes,
        bin_sha256=bin_sha256,
        idx_bytes=index.num_bytes,
        idx_sha256=index.sha256,
    )


def read_index(prefix: str) -> ShardIndex:
    """Map the index of a shard into memory. Its size is checked against its header.

    Raises:
        DataError: a file is missing or cannot be read, or the header or the size is wrong.
    """
    check_files_exist(prefix)
    path = idx_path(prefix)
    try:
        num_bytes = path.stat().st_size
        with open(path, "rb") as stream:
            header = stream.read(HEADER.size)
        if len(header) < HEADER.size:
            raise DataError(f"{path} has {num_bytes} bytes, less than its header of {HEADER.size} bytes.{REMAKE}")
        content = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    magic, version, code, num_sequences, num_entries = HEADER.unpack(header)
    if magic != MAGIC or version != VERSION:
        raise DataError(
            f"{path} is not an index in Megatron-LM's format: it starts with {magic!r}, version {version}; expected "
            f"{MAGIC!r}, version {VERSION}."
        )
    if code not in DTYPES:
        raise DataError(f"{path} has the dtype code {code}; supported codes of token ids: {sorted(DTYPES)}.{REMAKE}")
    lengths_end = HEADER.size + 4 * num_sequences
    pointers_end = lengths_end + 8 * num_sequences
    documents_end = pointers_end + 8 * num_entries
    if len(content) not in (documents_end, documents_end + num_sequences):
        raise DataError(
            f"{path} has {len(content)} bytes, but {num_sequences} sequences and {num_entries} document entries need "
            f"{documents_end} bytes ({documents_end + num_sequences} with modes). It is truncated or damaged.{REMAKE}"
        )
    modes = content[documents_end:].view(np.int8)
    return ShardIndex(
        dtype=np.dtype(DTYPES[code]),
        sequence_lengths=content[HEADER.size : lengths_end].view("<i4"),
        sequence_pointers=content[lengths_end:pointers_end].view("<i8"),
        document_indices=content[pointers_end:documents_end].view("<i8"),
        sequence_modes=modes if len(modes) else None,
    )


def check_files_exist(prefix: str) -> None:
    """Check that both files of a shard exist. The index of one in object storage is copied to the cache.

    Raises:
        DataError: names the missing files, and the likely mistake.
    """
    if is_url(prefix):
        copy_index(prefix)
        return
    missing = [str(path) for path in (idx_path(prefix), bin_path(prefix)) if not path.is_file()]
    if not missing:
        return
    hint = ""
    if prefix.endswith((".bin", ".idx")):
        hint = " Give the path without .bin or .idx."
    elif idx_path(f"{prefix}_text_document").is_file():
        hint = f" Did you mean {prefix}_text_document?"
    raise DataError(f"Shard {prefix}: {' and '.join(missing)} missing.{hint}")


def build_document_index(document_lengths: np.ndarray, dtype: np.dtype) -> ShardIndex:
    """Return the index of documents that are one sequence each, or none if the length is 0.

    Args:
        document_lengths: int32 [documents], tokens.
        dtype: dtype of the token ids.
    """
    has_tokens = document_lengths > 0
    lengths = document_lengths[has_tokens]
    return ShardIndex(
        dtype=dtype,
        sequence_lengths=lengths,
        sequence_pointers=(np.cumsum(lengths, dtype=np.int64) - lengths) * dtype.itemsize,
        document_indices=np.concatenate([np.zeros(1, np.int64), np.cumsum(has_tokens, dtype=np.int64)]),
    )


def _blocks(arrays: Iterator[np.ndarray] | Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    for array in arrays:
        for first in range(0, len(array), INDEX_BLOCK):
            yield array[first : first + INDEX_BLOCK]


MANIFEST_FORMAT = "megafp8-shard-1"


@dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """The manifest of a shard. Sizes in bytes, hashes SHA-256 in hexadecimal.

    Unknown values are None: a shard joined from shards without a manifest has hashes, but no tokenizer.

    Attributes:
        tokenizer: the tokenizer's `unique_identifiers`, which decide the ids.
        json_key: key of the text in JSONL.
        append_eod: each document ends with the end-of-document token.
        dtype: numpy's name of the token dtype.
        sources: `path`, `bytes` and `mtime_ns` of each input file, in order; also the `separator` of a text file and
            the `fingerprint` of a dataset.
        encoder: encoder that gave the ids: the tokenizer's own library, or gigatoken.
        num_skipped: records that were left out because they were no documents; unknown for a part of a shard.
        tokenizer_settings: settings to rebuild the tokenizer, see `tokenizer_settings`; not compared with anything.
        parts: what a joined or divided shard was made from, in order: `prefix`, `content_key`, `first_document` and
            `num_documents` of each shard.
    """

    tokenizer: Optional[dict[str, Any]]
    json_key: Optional[str]
    append_eod: Optional[bool]
    dtype: str
    num_documents: int
    num_sequences: int
    num_tokens: int
    bin_bytes: int
    bin_sha256: str
    idx_bytes: int
    idx_sha256: str
    sources: list[dict[str, Any]]
    encoder: Optional[str] = None
    num_skipped: Optional[int] = 0
    tokenizer_settings: dict[str, Any] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)
    format: str = MANIFEST_FORMAT


def manifest_path(prefix: str) -> Path:
    """Return the path of a shard's manifest."""
    return local_path(f"{prefix}.manifest.json")


def save_manifest(prefix: str, manifest: ShardManifest) -> None:
    """Write the manifest atomically."""
    atomic_write_json(manifest_path(prefix), asdict(manifest))


def load_manifest(prefix: str) -> Optional[ShardManifest]:
    """Return the manifest of a shard; None if it has none.

    Raises:
        DataError: the file exists, but is not such a manifest.
    """
    path = manifest_path(prefix)
    if is_url(prefix):
        copy_index(prefix)
    try:
        text = read_bytes(path, LIST_BYTES)
    except UnreadableFile as error:
        if error.is_missing:
            return None
        raise DataError(f"{path} cannot be read: {error.reason}.") from error
    try:
        content = parse_json(text)
        if content["format"] != MANIFEST_FORMAT:
            raise ValueError(f"its format is {content['format']!r}, expected {MANIFEST_FORMAT!r}")
        return ShardManifest(**content)
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path} is not a manifest of a shard: {error}. Create the shard again, or delete the manifest to check "
            "only the shard's own files."
        ) from error
