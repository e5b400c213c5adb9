"""Text to token shards, as fast as the tokenizer.

The input is divided into parts (`preprocess_plan`). Workers read, tokenize and write whole parts (`preprocess_work`,
`part_files`); nothing but counts comes back to this process, which copies finished parts into the shards, in the order
of the input, while the workers go on (`shard_assembly`). So the shards do not depend on the number of workers, and a
job that was killed goes on with the parts that it has.

Memory: a worker's, see `preprocess_work`; here about a kilobyte a part, of which there are some thousands at most.
Disk: the tokens twice, until the shards are whole, where the file system cannot share blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from glob import escape
from typing import Any, Optional

from megafp8.config.schema import DataConfig
from megafp8.data.preprocessing.part_files import PartFolder, PartRecord
from megafp8.data.preprocessing.plan import InputPart, ShardAssembly, Unit, divide, part_bytes_for, tasks_of
from megafp8.data.preprocessing.readers import MAX_DOCUMENT_BYTES, InputSource, find_sources
from megafp8.data.preprocessing.table_readers import find_dataset
from megafp8.data.preprocessing.workers import (
    FinishedPart,
    Worker,
    WorkerDiedError,
    WorkSettings,
    run_tasks,
    sample_texts,
)
from megafp8.data.shards import (
    ShardManifest,
    bin_path,
    idx_path,
    load_manifest,
    manifest_path,
    save_manifest,
    token_dtype,
)
from megafp8.data.tokenizers.build import Tokenizer, build_tokenizer, describe_tokenizer, tokenizer_settings
from megafp8.data.tokenizers.encoder_names import AUTO, GIGATOKEN, LIBRARY
from megafp8.data.tokenizers.encoders import EncoderChoice, EncoderMismatchError, LibraryEncoder, choose_encoder
from megafp8.errors import CapabilityError, DataError

# Below, comparing encoders takes as long as the library does for all of it. What is compressed has more text.
SMALL_INPUT_BYTES = 512 << 10
COMPRESSION_FACTOR = 10


@dataclass(frozen=True, kw_only=True)
class PreprocessJob:
    """What to make.

    Attributes:
        inputs: files, folders or glob patterns, see `readers`.
        output_prefix: each key goes to `PREFIX_KEY_document.bin/.idx`.
        tokenizer: the data section that names the tokenizer.
        dataset: in place of inputs a Hugging Face dataset: name, configuration and split.
        vocab_size: --vocab-size, see `build_tokenizer`.
        json_keys: which texts of a JSON line, or columns of a table, to take, one shard each.
        text_separator: what stands between the documents of a text file; None: each file is one.
        max_document_bytes: a longer line or text stops the job.
        append_eod: end each document with the end-of-document token.
        skip_bad: leave out records that are no documents, and count them; else the first stops the job.
        encoder: one of `encoder_choice.ENCODERS`.
        workers: processes that tokenize; 1 tokenizes in this process.
        overwrite: make shards again that are there.
    """

    inputs: tuple[str, ...] = ()
    output_prefix: str
    tokenizer: DataConfig
    dataset: Optional[tuple[str, Optional[str], str]] = None
    vocab_size: Optional[int] = None
    json_keys: tuple[str, ...] = ("text",)
    text_separator: Optional[str] = None
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    append_eod: bool = False
    skip_bad: bool = False
    encoder: str = AUTO
    workers: int = 1
    overwrite: bool = False

    def shard_prefix(self, key: str) -> str:
        """Return the prefix of the shard of one key, named as Megatron names it."""
        return f"{self.output_prefix}_{key}_document"


@dataclass(frozen=True)
class PreprocessProgress:
    """How far a job is. `num_tokens` counts all keys; bytes are the input's, compressed where it is."""

    input_bytes: int
    total_bytes: int
    num_documents: int = 0
    num_tokens: int = 0
    num_skipped: int = 0

    def plus(self, record: PartRecord) -> "PreprocessProgress":
        """Return the progress with one part more."""
        return PreprocessProgress(
            self.input_bytes + record.input_bytes,
            self.total_bytes,
            self.num_documents + record.num_documents,
            self.num_tokens + sum(record.num_tokens),
            self.num_skipped + record.num_skipped,
        )


@dataclass(frozen=True)
class PreprocessSummary:
    """What a job made: prefix and manifest of each shard. `made` is False when they were there already."""

    shards: tuple[tuple[str, ShardManifest], ...]
    made: bool


def preprocess(
    job: PreprocessJob,
    on_progress: Callable[[PreprocessProgress], None] = lambda _: None,
    on_notice: Callable[[str], None] = lambda _: None,
) -> PreprocessSummary:
    """Tokenize text into one shard a key, each whole or not at all.

    Args:
        job: what to make.
        on_progress: called at the start, with what an earlier run left, and after each part.
        on_notice: called with what the user should know: files that are left out, which encoder runs and why, and what
            is done again.

    Raises:
        ConfigError, CapabilityError: the tokenizer's flags, or a library that is not there.
        DataError: inputs that cannot be read, other shards under the same prefix, or a worker that died.
        OSError: the output cannot be written.
    """
    if job.dataset:
        sources: tuple[InputSource, ...] = (find_dataset(*job.dataset),)
    else:
        sources = tuple(find_sources(job.inputs, job.text_separator, on_notice, job.max_document_bytes))
    tokenizer = build_tokenizer(job.tokenizer, job.vocab_size)
    description = _describe_job(job, sources, tokenizer)
    folder = PartFolder(job.output_prefix, len(job.json_keys), token_dtype(tokenizer.vocab_size))
    begun = folder.load_job()
    if not job.overwrite and (begun or {}).get("job") != description:
        finished = _finished_before(job, description)
        if finished is not None:
            if folder.path.exists() and begun is None:  # killed while it deleted its parts
                with folder.lock():
                    folder.remove()
            return finished
    with folder.lock():
        try:
            summary = _make_shards(job, sources, tokenizer, folder, description, on_progress, on_notice)
        except BaseException:
            if not folder.holds_parts():
                folder.remove()
            raise
        folder.remove()
    return summary


def _make_shards(
    job: PreprocessJob,
    sources: tuple[InputSource, ...],
    tokenizer: Tokenizer,
    folder: PartFolder,
    description: dict[str, Any],
    on_progress: Callable[[PreprocessProgress], None],
    on_notice: Callable[[str], None],
) -> PreprocessSummary:
    """Make the shards with what parts the folder has, which nobody else uses now."""
    begun = _begin(job, folder, description)
    total_bytes = sum(source.num_bytes for source in sources)
    choice = _choose(job, begun, sources, tokenizer)
    on_notice(f"tokenizing with {choice.encoder.name}: {choice.reason}")
    begun.setdefault("part_bytes", part_bytes_for(total_bytes, choice.encoder.part_bytes))
    folder.save_job(begun)
    units = divide(sources, job.json_keys, begun["part_bytes"])
    settings = WorkSettings(
        sources=sources,
        json_keys=job.json_keys,
        tokenizer=job.tokenizer,
        vocab_size=job.vocab_size,
        encoder=choice.kind,
        append_eod=job.append_eod,
        skip_bad=job.skip_bad,
        output_prefix=job.output_prefix,
    )
    worker = Worker(settings, tokenizer, choice.encoder)
    try:
        with ShardAssembly(units, sources, folder) as assembly:
            _make_parts(worker, units, assembly, job.workers, on_progress)
            if assembly.num_tokens == 0:
                folder.clear()
                skipped = f", {assembly.num_skipped} records were skipped" if assembly.num_skipped else ""
                raise DataError(f"--input holds no text: {len(sources)} files, 0 tokens{skipped}.")
            return _publish(job, tokenizer, description, choice, assembly)
    except EncoderMismatchError as error:
        if job.encoder == GIGATOKEN:
            raise CapabilityError(f"--encoder gigatoken cannot be used: {error}") from error
        folder.clear()
        folder.save_job({"job": description, "refused": f"gigatoken is not used, and all is done again: {error}"})
        return _make_shards(job, sources, tokenizer, folder, description, on_progress, on_notice)


def _describe_job(job: PreprocessJob, sources: Sequence[InputSource], tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything that decides the bytes of the shards, but for what is skipped, as JSON has it."""
    description = {
        "sources": [source.describe() for source in sources],
        "tokenizer": tokenizer.unique_identifiers,
        "json_keys": job.json_keys,
        "append_eod": job.append_eod,
    }
    return json.loads(json.dumps(description))


def _begin(job: PreprocessJob, folder: PartFolder, description: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be known of the job's parts: `job`, its description; `refused`, why gigatoken was given up;
    and `part_bytes`, when there are parts.

    Raises:
        DataError: parts of another job are there, and --overwrite was not given.
    """
    begun = folder.load_job()
    if begun is not None and begun.get("job") == description:
        return begun
    if begun is not None and not job.overwrite:
        found = begun.get("job", {})
        other = [name.replace("_", " ") for name, value in description.items() if found.get(name) != value]
        raise DataError(
            f"{folder.path} holds an unfinished job with other {' and '.join(other)}. Run that again to finish it, "
            "choose another --output-prefix, or --overwrite to drop it."
        )
    folder.clear()
    return {"job": description, "refused": ""}


def _choose(
    job: PreprocessJob, begun: dict[str, Any], sources: Sequence[InputSource], tokenizer: Tokenizer
) -> EncoderChoice:
    if job.encoder == AUTO and begun["refused"]:
        return EncoderChoice(LibraryEncoder(tokenizer), LIBRARY, begun["refused"])
    text_bytes = sum(
        source.num_bytes * (COMPRESSION_FACTOR if source.compression or source.is_table else 1) for source in sources
    )
    if job.encoder == AUTO and text_bytes < SMALL_INPUT_BYTES:
        return EncoderChoice(LibraryEncoder(tokenizer), LIBRARY, "the input is small")
    return choose_encoder(tokenizer, job.encoder, lambda: sample_texts(sources, job.json_keys))


def _make_parts(
    worker: Worker,
    units: Sequence[Unit],
    assembly: ShardAssembly,
    workers: int,
    on_progress: Callable[[PreprocessProgress], None],
) -> None:
    """Make the parts that are not there, and give all of them to the assembly.

    Raises:
        DataError: what `Worker` raises, or a process that died.
    """
    progress = PreprocessProgress(0, sum(source.num_bytes for source in worker.settings.sources))
    missing: list[Unit] = []
    for unit in units:
        record = worker.finished_before(unit.name) if isinstance(unit, InputPart) else None
        if record is None:
            missing.append(unit)
        else:
            assembly.add(unit.name, record)
            progress = progress.plus(record)
    on_progress(progress)
    try:
        for result in run_tasks(worker, tasks_of(missing, workers), workers):
            if isinstance(result, FinishedPart):
                assembly.add(result.name, result.record)
                progress = progress.plus(result.record)
                on_progress(progress)
            else:
                assembly.end_stream(result.stream_name, result.num_parts)
    except WorkerDiedError as error:
        raise DataError(
            f"A tokenizer process died: {error}. The machine may be out of memory; fewer --workers than {workers} take "
            "less. What is done is kept: the same command goes on."
        ) from error


def _publish(
    job: PreprocessJob,
    tokenizer: Tokenizer,
    description: dict[str, Any],
    choice: EncoderChoice,
    assembly: ShardAssembly,
) -> PreprocessSummary:
    """Make the shards appear, each with its manifest last."""
    prefixes = [job.shard_prefix(key) for key in job.json_keys]
    for prefix in prefixes:
        path = manifest_path(prefix)
        path.unlink(missing_ok=True)
        for left in path.parent.glob(f".{escape(path.name)}.*.tmp"):  # by a run that was killed while it wrote it
            left.unlink(missing_ok=True)
    shards = []
    for key, prefix, totals in zip(job.json_keys, prefixes, assembly.publish(job.output_prefix, prefixes), strict=True):
        manifest = ShardManifest(
            tokenizer=description["tokenizer"],
            json_key=key,
            append_eod=job.append_eod,
            dtype=token_dtype(tokenizer.vocab_size).name,
            sources=description["sources"],
            tokenizer_settings=tokenizer_settings(job.tokenizer, job.vocab_size),
            encoder=choice.encoder.name,
            num_skipped=assembly.num_skipped,
            **asdict(totals),
        )
        save_manifest(prefix, manifest)
        shards.append((prefix, manifest))
    return PreprocessSummary(tuple(shards), made=True)


def _finished_before(job: PreprocessJob, description: dict[str, Any]) -> Optional[PreprocessSummary]:
    """Return what is there when it came from the same inputs and settings, None when there is nothing.

    Raises:
        DataError: something else is there and --overwrite was not given.
    """
    shards = []
    for key in job.json_keys:
        prefix = job.shard_prefix(key)
        if not (bin_path(prefix).exists() or idx_path(prefix).exists()):
            continue
        difference = _difference(job, key, description)
        if difference:
            raise DataError(
                f"{prefix} is there already, but {difference}. Choose another --output-prefix, or --overwrite."
            )
        manifest = load_manifest(prefix)
        assert manifest is not None
        shards.append((prefix, manifest))
    # Some keys there and others not: keys were added. All of them are made again.
    return PreprocessSummary(tuple(shards), made=False) if len(shards) == len(job.json_keys) else None


def _difference(job: PreprocessJob, key: str, description: dict[str, Any]) -> str:
    """Say in what the shard of `key` differs from what the job asks for; an empty text when in nothing."""
    prefix = job.shard_prefix(key)
    manifest = load_manifest(prefix)
    if manifest is None:
        return f"without the manifest {manifest_path(prefix)} that says from what"
    if manifest.tokenizer != description["tokenizer"]:
        found = "an unknown one" if manifest.tokenizer is None else describe_tokenizer(manifest.tokenizer)
        return f"with the tokenizer {found}, now asked for is {describe_tokenizer(description['tokenizer'])}"
    if manifest.append_eod != job.append_eod:
        return f"{'with' if manifest.append_eod else 'without'} --append-eod"
    if manifest.num_skipped and not job.skip_bad:
        return f"with {manifest.num_skipped} records skipped (--on-bad-document skip)"
    files = {"tokens": (bin_path(prefix), manifest.bin_bytes), "index": (idx_path(prefix), manifest.idx_bytes)}
    for name, (path, expected) in files.items():
        found_bytes = path.stat().st_size if path.exists() else 0
        if found_bytes != expected:
            return f"its {name} file {path} is {found_bytes} bytes long instead of {expected}"
    if len(manifest.sources) != len(description["sources"]):
        return f"from {len(manifest.sources)} input files, now {len(description['sources'])}"
    for before, now in zip(manifest.sources, description["sources"], strict=True):
        # The folder may have moved; hashes are of manifests that older versions wrote.
        if any(before.get(name) != now.get(name) for name in ("bytes", "mtime_ns", "separator", "fingerprint")):
            return f"from {_describe_source(before)}, now {_describe_source(now)}"
    return ""


def _describe_source(source: dict[str, Any]) -> str:
    written = datetime.fromtimestamp(source["mtime_ns"] / 1e9).isoformat(" ", "milliseconds")
    separator = f", documents separated by {source['separator']!r}" if "separator" in source else ""
    return f"{source['path']} ({source['bytes']} bytes, written {written}{separator})"
