"""Text to token shards.

One process reads batches of raw lines and appends finished tokens; workers decode, parse and tokenize a batch at a time
and send back bytes, not lists. Batches are cut by the reader and appended in order, so that the output does not depend
on the number of workers. Memory: about four batches a worker, whatever the size of the input.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional

import numpy as np

from megafp8.config.schema import DataConfig
from megafp8.data.atomic import file_sha256
from megafp8.data.manifest import ShardManifest, load_manifest, manifest_path, save_manifest
from megafp8.data.readers import RawBatch, expand_inputs, parse_texts, read_batches
from megafp8.data.shards import ShardWriter, bin_path, idx_path, token_dtype
from megafp8.data.tokenizer import Tokenizer, build_tokenizer, tokenizer_settings
from megafp8.errors import DataError


@dataclass(frozen=True, kw_only=True)
class PreprocessJob:
    """What to make.

    Attributes:
        inputs: files or glob patterns, see `readers`.
        output_prefix: each key goes to `PREFIX_KEY_document.bin/.idx`.
        tokenizer: the data section that names the tokenizer.
        vocab_size: --vocab-size, see `build_tokenizer`.
        json_keys: which texts of a JSON line to take, one shard each.
        append_eod: end each document with the end-of-document token.
        workers: processes that tokenize; 1 tokenizes in this process.
        overwrite: make shards again that are there.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: DataConfig
    vocab_size: Optional[int] = None
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    overwrite: bool = False

    def shard_prefix(self, key: str) -> str:
        """Return the prefix of the shard of one key, named as Megatron names it."""
        return f"{self.output_prefix}_{key}_document"


@dataclass(frozen=True)
class Progress:
    """How far a job is. `num_tokens` counts all keys; `input_bytes` is compressed where the file is."""

    input_bytes: int
    num_documents: int
    num_tokens: int


@dataclass(frozen=True)
class PreprocessSummary:
    """What a job made: prefix and manifest of each shard. `made` is False when they were there already."""

    shards: tuple[tuple[str, ShardManifest], ...]
    made: bool


@dataclass(frozen=True)
class EncoderSettings:
    """What a worker needs to encode; hashable, so that a worker builds its tokenizer once."""

    tokenizer: DataConfig
    vocab_size: Optional[int]
    json_keys: tuple[str, ...]
    append_eod: bool


@dataclass(frozen=True)
class EncodedBatch:
    """Token ids of one batch: for each key the bytes of all ids and int32 lengths of the documents."""

    shards: tuple[tuple[bytes, np.ndarray], ...]
    input_bytes: int


def preprocess(job: PreprocessJob, on_progress: Optional[Callable[[Progress], None]] = None) -> PreprocessSummary:
    """Tokenize text files into one shard a key, each whole or not at all.

    Args:
        job: what to make.
        on_progress: called after each batch.

    Raises:
        ConfigError, CapabilityError: the tokenizer's flags or library.
        DataError: inputs that cannot be read, or other shards under the same prefix.
        OSError: the output cannot be written.
    """
    files = expand_inputs(job.inputs)
    tokenizer = build_tokenizer(job.tokenizer, job.vocab_size)
    finished = _finished_before(job, files, tokenizer)
    if finished is not None:
        return finished
    Path(job.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    sources = [_describe_source(path) for path in files]
    dtype = token_dtype(tokenizer.vocab_size)
    settings = EncoderSettings(job.tokenizer, job.vocab_size, job.json_keys, job.append_eod)
    with ExitStack() as stack:
        writers = [stack.enter_context(ShardWriter(job.shard_prefix(key), dtype)) for key in job.json_keys]
        progress = Progress(0, 0, 0)
        for encoded in _encode_all(settings, (batch for path in files for batch in read_batches(path)), job.workers):
            for writer, (token_bytes, lengths) in zip(writers, encoded.shards, strict=True):
                writer.add_documents(token_bytes, lengths)
            progress = Progress(
                progress.input_bytes + encoded.input_bytes,
                progress.num_documents + len(encoded.shards[0][1]),
                progress.num_tokens + sum(len(tokens) for tokens, _ in encoded.shards) // dtype.itemsize,
            )
            if on_progress is not None:
                on_progress(progress)
        if progress.num_tokens == 0:
            raise DataError(f"--input holds no text: {len(files)} files, {progress.num_documents} documents, 0 tokens.")
        shards = []
        for key, writer in zip(job.json_keys, writers, strict=True):
            manifest_path(writer.prefix).unlink(missing_ok=True)
            manifest = ShardManifest(
                tokenizer=dict(tokenizer.unique_identifiers),
                json_key=key,
                append_eod=job.append_eod,
                dtype=dtype.name,
                sources=sources,
                tokenizer_settings=tokenizer_settings(job.tokenizer, job.vocab_size),
                **asdict(writer.finish()),
            )
            save_manifest(writer.prefix, manifest)
            shards.append((writer.prefix, manifest))
    return PreprocessSummary(tuple(shards), made=True)


def encode_batch(settings: EncoderSettings, batch: RawBatch) -> EncodedBatch:
    """Parse and tokenize one batch.

    Raises:
        DataError: a document that cannot be read, or a token id beyond the vocabulary; with file and line number.
    """
    tokenizer = _tokenizer_of(settings)
    documents = parse_texts(batch, settings.json_keys)
    dtype = token_dtype(tokenizer.vocab_size)
    shards = []
    for column in range(len(settings.json_keys)):
        try:
            ids = tokenizer.tokenize_batch([texts[column] for texts in documents])
        except DataError as error:
            raise DataError(f"{batch.path}, from line {batch.first_line}: {error}") from error
        if settings.append_eod:
            for document in ids:
                if document:
                    document.append(tokenizer.eod)
        lengths = np.fromiter(map(len, ids), dtype=np.int32, count=len(ids))
        flat = np.fromiter((token for document in ids for token in document), np.int64, count=int(lengths.sum()))
        if len(flat) and not 0 <= flat.min() <= flat.max() < tokenizer.vocab_size:
            raise DataError(
                f"{batch.path}, from line {batch.first_line}: token ids from {flat.min()} to {flat.max()}, but the "
                f"vocabulary has {tokenizer.vocab_size}."
            )
        shards.append((flat.astype(dtype).tobytes(), lengths))
    return EncodedBatch(tuple(shards), batch.input_bytes)


@lru_cache(maxsize=1)
def _tokenizer_of(settings: EncoderSettings) -> Tokenizer:
    return build_tokenizer(settings.tokenizer, settings.vocab_size)


def _start_worker(settings: EncoderSettings) -> None:
    # One process a core is all the parallelism there is to have; `tokenizers` would start its threads on top.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer_of(settings)


def _encode_all(settings: EncoderSettings, batches: Iterable[RawBatch], workers: int) -> Iterator[EncodedBatch]:
    """Encode batches in order; with workers, a bounded number of them ahead of the consumer."""
    if workers <= 1:
        yield from (encode_batch(settings, batch) for batch in batches)
        return
    # Fork shares what is imported; the tools have no threads at this point. macOS has no safe fork.
    context = multiprocessing.get_context("fork" if os.uname().sysname == "Linux" else "spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(settings,))
    pending: deque[Any] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(encode_batch, settings, batch))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"A tokenizer process died (killed, or out of memory?). No shard was written. Fewer --workers than "
            f"{workers} take less memory."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _describe_source(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {
        "path": str(path),
        "bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "sha256": file_sha256(path),
    }


def _finished_before(job: PreprocessJob, files: Sequence[Path], tokenizer: Tokenizer) -> Optional[PreprocessSummary]:
    """Return what is there when it came from the same inputs and settings, None when there is nothing.

    Raises:
        DataError: something else is there and --overwrite was not given.
    """
    if job.overwrite:
        return None
    shards = []
    for key in job.json_keys:
        prefix = job.shard_prefix(key)
        if not (bin_path(prefix).exists() or idx_path(prefix).exists()):
            continue
        difference = _difference(job, key, files, tokenizer)
        if difference:
            raise DataError(
                f"{prefix} is there already, but {difference}. Choose another --output-prefix, or --overwrite."
            )
        manifest = load_manifest(prefix)
        assert manifest is not None
        shards.append((prefix, manifest))
    # Some keys there and others not: a job that was stopped between two shards. It makes all of them again.
    return PreprocessSummary(tuple(shards), made=False) if len(shards) == len(job.json_keys) else None


def _difference(job: PreprocessJob, key: str, files: Sequence[Path], tokenizer: Tokenizer) -> str:
    """Say in what the shard of `key` differs from what the job asks for; an empty text when in nothing."""
    prefix = job.shard_prefix(key)
    manifest = load_manifest(prefix)
    if manifest is None:
        return f"without the manifest {manifest_path(prefix)} that says from what"
    if manifest.tokenizer != dict(tokenizer.unique_identifiers):
        return f"with the tokenizer {manifest.tokenizer}, now asked for is {dict(tokenizer.unique_identifiers)}"
    if manifest.append_eod != job.append_eod:
        return f"{'with' if manifest.append_eod else 'without'} --append-eod"
    sizes = {"tokens": bin_path(prefix), "index": idx_path(prefix)}
    for name, expected in (("tokens", manifest.bin_bytes), ("index", manifest.idx_bytes)):
        found = sizes[name].stat().st_size if sizes[name].exists() else 0
        if found != expected:
            return f"its {name} file {sizes[name]} is {found} bytes long instead of {expected}"
    if len(manifest.sources) != len(files):
        return f"from {len(manifest.sources)} input files, now {len(files)}"
    for source, path in zip(manifest.sources, files, strict=True):
        if not _is_same_source(source, path):
            return f"from {source['path']} of {source['bytes']} bytes, which {path} is not"
    return ""


def _is_same_source(source: dict[str, Any], path: Path) -> bool:
    """Compare by size and modification time, and by content where only the time differs (a copy)."""
    status = path.stat()
    if status.st_size != source["bytes"]:
        return False
    if status.st_mtime_ns == source["mtime_ns"] and str(path) == source["path"]:
        return True
    return file_sha256(path) == source["sha256"]
