"""Merging and splitting of shards: concatenates shards, and divides the result into new ones.

Tokens are copied as bytes, 8 MiB at a time, and indices are written one block at a time. Each output is complete or
absent. An output that exists and was made from the same inputs is kept, so that a job that was stopped resumes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.config.derived import split_shares
from megafp8.data.shard_verification import check_structure, content_key, failures, verify_shard
from megafp8.data.shards import (
    ShardIndex,
    ShardManifest,
    bin_path,
    idx_path,
    load_manifest,
    publish_shard,
    read_index,
    save_manifest,
    write_index_file,
)
from megafp8.data.tokenizers.build import describe_tokenizer
from megafp8.errors import ConfigError, DataError
from megafp8.utils.files import HashedStream, path_problem, printable, remove_stale_temporaries, sync, temporary_name

COPY_BYTES = 1 << 23
SPLIT_NAMES = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class MergeJob:
    """What to make of the concatenated shards: one shard, unless an option divides it.

    Attributes:
        inputs: prefixes.
        output_prefix: prefix of the one shard; the shards of a division get `_00000-of-00004` or `_train` behind it.
        num_parts: divide between documents into this many parts with about the same number of tokens.
        documents_per_part: divide after every so many documents.
        split: divide into training, validation and test, by documents, in Megatron's syntax (98,2,0).
        overwrite: make shards again that exist.
        is_verified: read the inputs first, and compare them with their manifests.
        trust_missing_manifests: assume that shards without a manifest have the same tokenizer as the others.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    num_parts: Optional[int] = None
    documents_per_part: Optional[int] = None
    split: Optional[str] = None
    overwrite: bool = False
    is_verified: bool = True
    trust_missing_manifests: bool = False


@dataclass(frozen=True)
class MergeSummary:
    """What a job made: prefix and manifest of each shard, and the prefixes of those that existed already."""

    shards: tuple[tuple[str, ShardManifest], ...]
    unchanged: tuple[str, ...]


@dataclass(frozen=True)
class _InputShard:
    prefix: str
    index: ShardIndex
    manifest: Optional[ShardManifest]
    key: str


@dataclass(frozen=True)
class _OutputShard:
    """A shard to make: documents `first` to `last` - 1 of the concatenated inputs."""

    prefix: str
    first: int
    last: int


def find_shards(names: Sequence[str]) -> tuple[str, ...]:
    """Return the prefixes that names stand for: a folder for all shards in it, sorted; any other name is a prefix.

    Raises:
        DataError: a folder without shards.
    """
    prefixes: list[str] = []
    for name in names:
        if not Path(name).is_dir():
            prefixes.append(name)
            continue
        indices = sorted(Path(name).glob("*.idx"))
        found = [str(path.with_suffix("")) for path in indices if path.with_suffix(".bin").exists()]
        if not found:
            raise DataError(f"--input {name}: the folder has no shards (PREFIX.bin and PREFIX.idx).")
        for prefix in found:
            if problem := path_problem(prefix):
                raise DataError(f"--input {name}: {printable(prefix)} {problem}. Rename its files.")
        prefixes += found
    return tuple(prefixes)


def merge_shards(job: MergeJob, on_progress: Callable[[int], None] = lambda _: None) -> MergeSummary:
    """Merge or divide shards.

    Memory: 8 MiB and 2^20 index entries, in addition to the mapped indices.

    Args:
        job: what to make.
        on_progress: called with the number of bytes verified or copied since the last call.

    Raises:
        ConfigError: several ways to divide, or one that is not possible.
        DataError: inputs that are damaged or incompatible, or other shards under the name of an output.
        OSError: an output cannot be written.
    """
    _check_job(job)
    inputs = [_open_input(prefix) for prefix in job.inputs]
    common = _common_manifest(inputs, job.trust_missing_manifests)
    outputs = _plan_outputs(job, [shard.index for shard in inputs])
    if both := {output.prefix for output in outputs} & set(job.inputs):
        raise DataError(f"--output-prefix is also an input: {', '.join(sorted(both))}. Choose another.")
    unchanged = [output for output in outputs if not job.overwrite and _is_up_to_date(output, inputs)]
    if job.is_verified and len(unchanged) < len(outputs):
        for shard in inputs:
            _verify_input(shard, on_progress)
    Path(job.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    shards = []
    for output in outputs:
        if output not in unchanged:
            _write_output(output, inputs, common, on_progress)
        manifest = load_manifest(output.prefix)
        assert manifest is not None
        shards.append((output.prefix, manifest))
    return MergeSummary(tuple(shards), tuple(output.prefix for output in unchanged))


def _check_job(job: MergeJob) -> None:
    """Check what can be checked without the inputs."""
    counts = {"--num-parts": job.num_parts, "--documents-per-part": job.documents_per_part}
    given = [flag for flag, value in (*counts.items(), ("--split", job.split)) if value is not None]
    problems = [f"{' and '.join(given)} exclude each other."] if len(given) > 1 else []
    problems += [f"{flag} {n}: must be at least 1." for flag, n in counts.items() if n is not None and n < 1]
    if job.split is not None:
        try:
            split_shares(job.split)
        except ValueError:
            problems.append(f"--split {job.split} must be up to three proportions, such as 98,2 or 969,30,1.")
    if len(set(job.inputs)) < len(job.inputs):
        problems.append("--input contains a shard twice.")
    if problems:
        raise ConfigError(problems)


def _open_input(prefix: str) -> _InputShard:
    index = read_index(prefix)
    check_structure(prefix, index)
    return _InputShard(prefix, index, load_manifest(prefix), content_key(prefix))


def _verify_input(shard: _InputShard, on_progress: Callable[[int], None]) -> None:
    """Verify an input, so that tokens which do not match its manifest do not get a new one with their hashes."""
    wrong = failures(verify_shard(shard.prefix, on_progress=on_progress))
    if wrong:
        details = "; ".join(f"{result.check}: {result.detail}" for result in wrong)
        raise DataError(f"Shard {shard.prefix} is damaged: {details}")


def _common_manifest(inputs: Sequence[_InputShard], trust_missing: bool) -> dict[str, Any]:
    """The fields that the manifests of all outputs have in common.

    Raises:
        DataError: the inputs differ in a field of which a shard has only one value.
    """
    first = inputs[0]
    for other in inputs[1:]:
        if other.index.dtype != first.index.dtype:
            raise DataError(
                f"{first.prefix} has {first.index.dtype.name} token ids, {other.prefix} has {other.index.dtype.name}: "
                "they were created for different vocabulary sizes. Preprocess the text of one again."
            )
        if (other.index.sequence_modes is None) != (first.index.sequence_modes is None):
            raise DataError(f"One of {first.prefix} and {other.prefix} has sequence modes and the other has none.")
    known = {
        shard.prefix: shard.manifest
        for shard in inputs
        if shard.manifest is not None and shard.manifest.tokenizer is not None
    }
    unknown = [shard.prefix for shard in inputs if shard.prefix not in known]
    if not known:
        return {"tokenizer": None, "json_key": None, "append_eod": None, "sources": []}
    first_prefix, first_manifest = next(iter(known.items()))
    if unknown and not trust_missing:
        raise DataError(
            f"{', '.join(unknown)}: no manifest with the tokenizer, but {first_prefix} has one. "
            "--trust-missing-manifests assumes the same tokenizer."
        )
    for prefix, manifest in known.items():
        if manifest.tokenizer != first_manifest.tokenizer:
            raise DataError(
                f"{first_prefix} and {prefix} were created with different tokenizers:\n  "
                f"{describe_tokenizer(first_manifest.tokenizer or {})}\n  "
                f"{describe_tokenizer(manifest.tokenizer or {})}"
            )
        if manifest.append_eod != first_manifest.append_eod:
            raise DataError(f"Only one of {first_prefix} and {prefix} ends its documents with a token (--append-eod).")
    json_keys = {manifest.json_key for manifest in known.values()}
    encoders = {manifest.encoder for manifest in known.values()}
    sources = {source["path"]: source for manifest in known.values() for source in manifest.sources}
    return {
        "tokenizer": first_manifest.tokenizer,
        "json_key": first_manifest.json_key if len(json_keys) == 1 else None,
        "append_eod": first_manifest.append_eod,
        "sources": list(sources.values()),
        "encoder": first_manifest.encoder if len(encoders) == 1 else None,
        "tokenizer_settings": first_manifest.tokenizer_settings,
    }


def _plan_outputs(job: MergeJob, indices: Sequence[ShardIndex]) -> list[_OutputShard]:
    """The shards to make, in order.

    Raises:
        ConfigError: there are too few documents for them.
    """
    prefix, total = job.output_prefix, sum(index.num_documents for index in indices)
    if job.split is not None:
        shares = split_shares(job.split)
        cuts = [round(sum(shares[:number]) / sum(shares) * total) for number in range(len(shares) + 1)]
        named = zip(SPLIT_NAMES, cuts[:-1], cuts[1:], shares, strict=False)
        outputs = [_OutputShard(f"{prefix}_{name}", first, last) for name, first, last, share in named if share]
    elif job.num_parts is not None:
        cuts = [0, *_cuts_at_tokens(indices, job.num_parts), total]
        outputs = _number_outputs(prefix, cuts)
    elif job.documents_per_part is not None:
        outputs = _number_outputs(prefix, [*range(0, total, job.documents_per_part), total])
    else:
        outputs = [_OutputShard(prefix, 0, total)]
    if empty := [output.prefix for output in outputs if output.first >= output.last]:
        raise ConfigError(f"No document would be in {', '.join(empty)}: there are only {total} documents.")
    return outputs


def _number_outputs(prefix: str, cuts: Sequence[int]) -> list[_OutputShard]:
    count = len(cuts) - 1
    names = (f"{prefix}_{number:05}-of-{count:05}" for number in range(count))
    return [_OutputShard(*fields) for fields in zip(names, cuts[:-1], cuts[1:], strict=True)]


def _cuts_at_tokens(indices: Sequence[ShardIndex], num_parts: int) -> list[int]:
    """The numbers of the documents before which there are about 1/N, 2/N, ... of all tokens, for N parts."""
    shard_tokens, cuts = [index.num_tokens for index in indices], []
    for part in range(1, num_parts):
        target, num_documents = -(-part * sum(shard_tokens) // num_parts), 0
        for index, num_tokens in zip(indices, shard_tokens, strict=True):
            if target < num_tokens:
                # numpy.searchsorted would copy each array, because the entries of a mapped index are not aligned.
                sequence = bisect_left(index.sequence_pointers, target * index.dtype.itemsize)
                num_documents += bisect_left(index.document_indices, sequence, hi=index.num_documents)
                break
            target -= num_tokens
            num_documents += index.num_documents
        cuts.append(num_documents)
    return cuts


def _slices(output: _OutputShard, inputs: Sequence[_InputShard]) -> list[tuple[_InputShard, int, int]]:
    """The documents of each input that go into an output, as first and last + 1 number within the input."""
    slices, start = [], 0
    for shard in inputs:
        first, last = max(output.first - start, 0), min(output.last - start, shard.index.num_documents)
        if first < last:
            slices.append((shard, first, last))
        start += shard.index.num_documents
    return slices


def _parts(output: _OutputShard, inputs: Sequence[_InputShard]) -> list[dict[str, Any]]:
    """The `parts` of the manifest of an output."""
    return [
        {"prefix": shard.prefix, "content_key": shard.key, "first_document": first, "num_documents": last - first}
        for shard, first, last in _slices(output, inputs)
    ]


def _is_up_to_date(output: _OutputShard, inputs: Sequence[_InputShard]) -> bool:
    """Whether a complete output from the same inputs exists. Without an index there is none, see `_write_output`.

    Raises:
        DataError: another shard exists.
    """
    if not idx_path(output.prefix).exists():
        return False

    def identity(parts: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return [(part["content_key"], part["first_document"], part["num_documents"]) for part in parts]

    manifest = load_manifest(output.prefix)
    if manifest is not None and identity(manifest.parts) == identity(_parts(output, inputs)):
        sizes = [path.stat().st_size for path in (bin_path(output.prefix), idx_path(output.prefix)) if path.exists()]
        if sizes == [manifest.bin_bytes, manifest.idx_bytes]:
            return True
    raise DataError(
        f"{output.prefix} already exists, but is incomplete or from different shards. Choose another --output-prefix, "
        "or use --overwrite."
    )


def _write_output(
    output: _OutputShard, inputs: Sequence[_InputShard], common: dict[str, Any], on_progress: Callable[[int], None]
) -> None:
    slices = [(shard.prefix, shard.index.documents(first, last)) for shard, first, last in _slices(output, inputs)]
    indices = [index for _, index in slices]
    paths = (bin_path(output.prefix), idx_path(output.prefix))
    for path in paths:
        remove_stale_temporaries(path)
    bin_temporary, idx_temporary = map(temporary_name, paths)
    try:
        with open(bin_temporary, "wb") as stream:
            tokens = HashedStream(stream)
            for prefix, index in slices:
                _copy_tokens(prefix, index, tokens, on_progress)
            sync(stream)
        totals = write_index_file(idx_temporary, indices, bin_bytes=tokens.num_bytes, bin_sha256=tokens.sha256)
        manifest = ShardManifest(
            **common,
            **asdict(totals),
            dtype=indices[0].dtype.name,
            num_skipped=_num_skipped(output, inputs),
            parts=_parts(output, inputs),
        )
        # An old index is deleted first and the new one renamed last. A shard without an index does not count, so that a
        # job that is killed in between makes this output again.
        idx_path(output.prefix).unlink(missing_ok=True)
        save_manifest(output.prefix, manifest)
        publish_shard(output.prefix, bin_temporary, idx_temporary)
    finally:
        bin_temporary.unlink(missing_ok=True)
        idx_temporary.unlink(missing_ok=True)


def _num_skipped(output: _OutputShard, inputs: Sequence[_InputShard]) -> Optional[int]:
    """Number of records skipped in the sources; unknown for a part of the documents."""
    counts = [shard.manifest.num_skipped if shard.manifest else None for shard in inputs]
    is_all = output.last - output.first == sum(shard.index.num_documents for shard in inputs)
    return sum(count or 0 for count in counts) if is_all and None not in counts else None


def _copy_tokens(prefix: str, index: ShardIndex, output: HashedStream, on_progress: Callable[[int], None]) -> None:
    """Append the tokens of an index's documents."""
    left = index.num_tokens * index.dtype.itemsize
    buffer = memoryview(bytearray(min(COPY_BYTES, left)))
    with open(bin_path(prefix), "rb", buffering=0) as stream:
        stream.seek(int(index.sequence_pointers[0]) if left else 0)
        while left:
            num_bytes = stream.readinto(buffer[:left])
            if not num_bytes:
                raise DataError(f"{bin_path(prefix)} was truncated while it was copied; {left} bytes are missing.")
            output.write(buffer[:num_bytes])
            left -= num_bytes
            on_progress(num_bytes)
