"""Shards for tests: ours, those of megatron-core's builder, and damaged copies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shard_writer import ShardWriter

from megafp8.config.schema import DataConfig
from megafp8.data.preprocessing.plan import PreprocessJob

NULL = DataConfig(tokenizer_type="NullTokenizer")
SUFFIXES = (".bin", ".idx", ".manifest.json")


def write_shard(prefix: Any, documents: Sequence[Sequence[int]], dtype: Any = np.uint16) -> str:
    """Write a shard with `ShardWriter`; return its prefix."""
    with ShardWriter(str(prefix), np.dtype(dtype)) as writer:
        for document in documents:
            ids = np.asarray(document, dtype=dtype)
            writer.add_documents(ids.tobytes(), np.array([len(ids)], np.int32))
        writer.finish()
    return str(prefix)


def write_megatron_shard(
    prefix: Any, documents: Sequence[Sequence[Sequence[int]]], dtype: Any = np.uint16, *, modes: bool = False
) -> str:
    """Write a shard with megatron-core's own builder; a document is a list of sequences. Return its prefix."""
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=modes)
    for document in documents:
        lengths = [len(sequence) for sequence in document]
        ids = [token for sequence in document for token in sequence]
        builder.add_document(ids, lengths, [n % 2 for n in range(len(lengths))] if modes else None)
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def read_sequences(prefix: str) -> list[list[int]]:
    """The sequences of a shard as megatron-core reads them."""
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    dataset = indexed_dataset.IndexedDataset(prefix)
    return [dataset[n].tolist() for n in range(len(dataset))]


def patch(path: Any, offset: int, content: bytes) -> None:
    """Overwrite bytes of a file in place."""
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(content)


def content_of(prefix: str) -> tuple[bytes, bytes]:
    """Bytes of .bin and .idx."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def shard_bytes(prefix: Any) -> list[bytes]:
    """The content of a shard's tokens and index."""
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def null_job(tmp_path: Path, lines: Sequence[str], **options: Any) -> PreprocessJob:
    """A job of lines of numbers, each of which is its own token."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    return PreprocessJob(
        inputs=(str(path),), output_prefix=str(tmp_path / "out" / "n"), tokenizer=NULL, vocab_size=1000, **options
    )


def names_in(folder: Any) -> list[str]:
    """The names of its files, in order."""
    return sorted(path.name for path in Path(folder).iterdir())
