"""The manifest beside a shard: what it holds and what it was made from.

A shard whose files are not those that `PREFIX.manifest.json` describes is refused. Shards made by other programs have
no manifest; they are checked as far as their own two files go.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

from megafp8.data.atomic import atomic_write_json
from megafp8.errors import DataError
from megafp8.utils.small_files import LIST_BYTES, UnreadableFile, read_bytes
from megafp8.utils.strict_json import parse_json

FORMAT = "megafp8-shard-1"


@dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """Everything known about a shard. Sizes in bytes, hashes SHA-256 in hexadecimal.

    What is not known is None: a shard joined from shards without a manifest has hashes, but no tokenizer.

    Attributes:
        tokenizer: the tokenizer's `unique_identifiers`: what decides the ids.
        json_key: where the text was in JSONL.
        append_eod: each document ends with the end-of-document token.
        dtype: numpy's name of the token dtype.
        sources: `path`, `bytes` and `mtime_ns` of each input file, in order; of text its `separator`, of a dataset its
            `fingerprint`, where there are any.
        encoder: what gave the ids: the tokenizer's own library, or gigatoken.
        num_skipped: records that were left out, since they were no documents; of a divided shard not known.
        tokenizer_settings: how to build the tokenizer again, see `tokenizer_settings`; not compared with anything.
        parts: of a joined or divided shard, what it was made from, in order: `prefix`, `content_key`, `first_document`
            and `num_documents` of each shard.
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
    format: str = FORMAT


def manifest_path(prefix: str) -> Path:
    """Return the path of a shard's manifest."""
    return Path(f"{prefix}.manifest.json")


def save_manifest(prefix: str, manifest: ShardManifest) -> None:
    """Write the manifest, whole or not at all."""
    atomic_write_json(manifest_path(prefix), asdict(manifest))


def load_manifest(prefix: str) -> Optional[ShardManifest]:
    """Return the manifest of a shard, or None when it has none.

    Raises:
        DataError: the file is there but is not such a manifest.
    """
    path = manifest_path(prefix)
    try:
        text = read_bytes(path, LIST_BYTES)
    except UnreadableFile as error:
        if error.is_missing:
            return None
        raise DataError(f"{path} cannot be read: {error.reason}.") from error
    try:
        content = parse_json(text)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, expected {FORMAT!r}")
        return ShardManifest(**content)
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path} is not a manifest of a shard: {error}. Make the shard again, or delete the manifest to have only "
            "the shard's own files checked."
        ) from error
