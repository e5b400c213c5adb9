"""Shards joined, and shards divided: one job, which lays shards end to end and cuts the whole anew.

Tokens are copied as bytes, 8 MiB at a time; indices are written a block at a time. Each output is whole or not there,
and one that is there from the same inputs is kept, so that a job that was stopped goes on where it was.

What a merge is asked for, and which documents go into which output: arithmetic on indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np

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
    write_index,
)
from megafp8.data.tokenizers.build import describe_tokenizer
from megafp8.errors import ConfigError, DataError
from megafp8.utils.files import HashedStream, discard_abandoned, path_fault, shown, sync, temporary_name

COPY_BYTES = 1 << 23


@dataclass(frozen=True)
class MergeSummary:
    """What a job made: prefix and manifest of each shard, and which of them were there already."""

    shards: tuple[tuple[str, ShardManifest], ...]
    kept: tuple[str, ...]


@dataclass(frozen=True)
class _Input:
    prefix: str
    index: ShardIndex
    manifest: Optional[ShardManifest]
    key: str


def merge_shards(job: MergeJob, on_progress: Optional[Callable[[int], None]] = None) -> MergeSummary:
    """Join or divide shards.

    Memory: 8 MiB and 2^20 entries of an index, beside the mapped indices.

    Args:
        job: what to make.
        on_progress: called with the number of bytes that were verified or copied since.

    Raises:
        ConfigError: several ways to cut, or one that cannot be done.
        DataError: inputs that are damaged or do not go together, or other shards under an output's name.
        OSError: an output cannot be written.
    """
    check_job(job)
    inputs = [_open(prefix) for prefix in job.inputs]
    common = _common_manifest(inputs, job.trust_missing_manifests)
    outputs = plan_outputs(job, [each.index for each in inputs])
    if both := {output.prefix for output in outputs} & set(job.inputs):
        raise DataError(f"--output-prefix names an input: {', '.join(sorted(both))}. Choose another.")
    kept = [output for output in outputs if not job.overwrite and _is_there(output, inputs)]
    if job.is_verified and len(kept) < len(outputs):
        for each in inputs:
            _verify(each, on_progress)
    Path(job.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    shards = []
    for output in outputs:
        if output not in kept:
            _write(output, inputs, common, on_progress)
        manifest = load_manifest(output.prefix)
        assert manifest is not None
        shards.append((output.prefix, manifest))
    return MergeSummary(tuple(shards), tuple(output.prefix for output in kept))


def _open(prefix: str) -> _Input:
    index = read_index(prefix)
    check_structure(prefix, index)
    return _Input(prefix, index, load_manifest(prefix), content_key(prefix))


def _verify(shard: _Input, on_progress: Optional[Callable[[int], None]]) -> None:
    """A manifest with new hashes must not be made for tokens that the old one does not vouch for."""
    wrong = failures(verify_shard(shard.prefix, on_progress=on_progress))
    if wrong:
        details = "; ".join(f"{finding.check}: {finding.detail}" for finding in wrong)
        raise DataError(f"Shard {shard.prefix} is damaged: {details}")


def _common_manifest(inputs: Sequence[_Input], trust_missing: bool) -> dict[str, Any]:
    """What the manifests of all outputs say alike.

    Raises:
        DataError: the inputs differ in what one shard has one of.
    """
    first = inputs[0]
    for other in inputs[1:]:
        if other.index.dtype != first.index.dtype:
            raise DataError(
                f"{first.prefix} has ids in {first.index.dtype.name}, {other.prefix} in {other.index.dtype.name}: "
                "they were made for vocabularies of different size. Preprocess the text of one again."
            )
        if (other.index.sequence_modes is None) != (first.index.sequence_modes is None):
            raise DataError(f"One of {first.prefix} and {other.prefix} has sequence modes and the other has none.")
    known = [each for each in inputs if each.manifest is not None and each.manifest.tokenizer is not None]
    unknown = [each.prefix for each in inputs if each.manifest is None or each.manifest.tokenizer is None]
    if not known:
        return {"tokenizer": None, "json_key": None, "append_eod": None, "sources": []}
    if unknown and not trust_missing:
        raise DataError(
            f"{', '.join(unknown)}: no manifest says which tokenizer made it, but {known[0].prefix} has one. "
            "--trust-missing-manifests takes it for the same."
        )
    manifests = [each.manifest for each in known if each.manifest is not None]
    for each, manifest in zip(known, manifests, strict=True):
        if manifest.tokenizer != manifests[0].tokenizer:
            raise DataError(
                f"{known[0].prefix} and {each.prefix} were made with different tokenizers:\n"
                f"  {describe_tokenizer(manifests[0].tokenizer or {})}\n"
                f"  {describe_tokenizer(manifest.tokenizer or {})}"
            )
        if manifest.append_eod != manifests[0].append_eod:
            raise DataError(
                f"Only one of {known[0].prefix} and {each.prefix} ends its documents with a token (--append-eod)."
            )
    sources = {source["path"]: source for manifest in manifests for source in manifest.sources}
    return {
        "tokenizer": manifests[0].tokenizer,
        "json_key": _same([manifest.json_key for manifest in manifests]),
        "append_eod": manifests[0].append_eod,
        "sources": list(sources.values()),
        "encoder": _same([manifest.encoder for manifest in manifests]),
        "tokenizer_settings": manifests[0].tokenizer_settings,
    }


def _same(values: Sequence[Optional[str]]) -> Optional[str]:
    return values[0] if len(set(values)) == 1 else None


def _num_skipped(inputs: Sequence[_Input], output: Output) -> Optional[int]:
    """Records left out of the sources; nobody knows of which part of a shard they would have been."""
    counts = [each.manifest.num_skipped if each.manifest else None for each in inputs]
    is_all = output.last - output.first == sum(each.index.num_documents for each in inputs)
    return sum(count or 0 for count in counts) if is_all and None not in counts else None


def _slices(output: Output, inputs: Sequence[_Input]) -> list[tuple[_Input, int, int]]:
    """The documents of each input that go into an output, as numbers within the input."""
    slices, start = [], 0
    for each in inputs:
        first, last = max(output.first - start, 0), min(output.last - start, each.index.num_documents)
        if first < last:
            slices.append((each, first, last))
        start += each.index.num_documents
    return slices


def _parts(output: Output, inputs: Sequence[_Input]) -> list[dict[str, Any]]:
    return [
        {"prefix": each.prefix, "content_key": each.key, "first_document": first, "num_documents": last - first}
        for each, first, last in _slices(output, inputs)
    ]


def _is_there(output: Output, inputs: Sequence[_Input]) -> bool:
    """Whether an output was made before, whole and from the same. Without its index it is none, see `_write`.

    Raises:
        DataError: something else is there.
    """
    if not idx_path(output.prefix).exists():
        return False
    manifest = load_manifest(output.prefix)
    if manifest is not None and _identity(manifest.parts) == _identity(_parts(output, inputs)):
        sizes = [path.stat().st_size for path in (bin_path(output.prefix), idx_path(output.prefix)) if path.exists()]
        if sizes == [manifest.bin_bytes, manifest.idx_bytes]:
            return True
    raise DataError(
        f"{output.prefix} is there already, but not from these shards, or not whole. Choose another --output-prefix, "
        "or --overwrite."
    )


def _identity(parts: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(part["content_key"], part["first_document"], part["num_documents"]) for part in parts]


def _write(
    output: Output,
    inputs: Sequence[_Input],
    common: dict[str, Any],
    on_progress: Optional[Callable[[int], None]],
) -> None:
    slices = [(each, each.index.documents(first, last)) for each, first, last in _slices(output, inputs)]
    indices = [index for _, index in slices]
    paths = (bin_path(output.prefix), idx_path(output.prefix))
    for path in paths:
        discard_abandoned(path)
    bin_temporary, idx_temporary = map(temporary_name, paths)
    try:
        with open(bin_temporary, "wb") as stream:
            tokens = HashedStream(stream)
            for each, index in slices:
                _copy_tokens(each.prefix, index, tokens, on_progress)
            sync(stream)
        with open(idx_temporary, "wb") as stream:
            written = HashedStream(stream)
            write_index(written, indices)
            sync(stream)
        manifest = ShardManifest(
            **common,
            dtype=indices[0].dtype.name,
            num_documents=sum(index.num_documents for index in indices),
            num_sequences=sum(len(index.sequence_lengths) for index in indices),
            num_tokens=sum(index.num_tokens for index in indices),
            bin_bytes=tokens.num_bytes,
            bin_sha256=tokens.sha256,
            idx_bytes=written.num_bytes,
            idx_sha256=written.sha256,
            num_skipped=_num_skipped(inputs, output),
            parts=_parts(output, inputs),
        )
        # Without its index a shard is none: an old index goes first and the new one comes last, so that a job that is
        # killed in between makes this output again.
        idx_path(output.prefix).unlink(missing_ok=True)
        save_manifest(output.prefix, manifest)
        publish_shard(output.prefix, bin_temporary, idx_temporary)
    finally:
        bin_temporary.unlink(missing_ok=True)
        idx_temporary.unlink(missing_ok=True)


def _copy_tokens(
    prefix: str, index: ShardIndex, output: HashedStream, on_progress: Optional[Callable[[int], None]]
) -> None:
    """Append the tokens of an index's documents."""
    left = index.num_tokens * index.dtype.itemsize
    buffer = memoryview(bytearray(min(COPY_BYTES, left)))
    with open(bin_path(prefix), "rb", buffering=0) as stream:
        stream.seek(int(index.sequence_pointers[0]) if left else 0)
        while left:
            num_bytes = stream.readinto(buffer[:left])
            if not num_bytes:
                raise DataError(f"{bin_path(prefix)} became shorter while it was copied; {left} bytes are missing.")
            output.write(buffer[:num_bytes])
            left -= num_bytes
            if on_progress is not None:
                on_progress(num_bytes)


SPLIT_NAMES = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class MergeJob:
    """What to make of shards laid end to end. Without a way to cut, one shard.

    Attributes:
        inputs: prefixes.
        output_prefix: of the one shard; what is cut gets `_00000-of-00004` or `_train` behind it.
        num_parts: cut between documents into so many parts of about as many tokens.
        documents_per_part: cut after every so many documents.
        split: cut into training, validation and test, by documents, in Megatron's spelling (98,2,0).
        overwrite: make shards again that are there.
        is_verified: read the inputs first and compare them with their manifests.
        trust_missing_manifests: take shards without a manifest for shards of the others' tokenizer.
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
class Output:
    """A shard that a job makes: documents `first` to `last` - 1 of all inputs together."""

    prefix: str
    first: int
    last: int


def find_shards(names: Sequence[str]) -> tuple[str, ...]:
    """Return the prefixes that names stand for: a folder for all shards in it, sorted; anything else for itself.

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
            raise DataError(f"--input {name}: the folder holds no shards (PREFIX.bin and PREFIX.idx).")
        for prefix in found:
            if fault := path_fault(prefix):
                raise DataError(f"--input {name}: {shown(prefix)} {fault}. Rename its files.")
        prefixes += found
    return tuple(prefixes)


def check_job(job: MergeJob) -> None:
    """Check what can be checked without the inputs.

    Raises:
        ConfigError: several ways to cut, or one that cannot be done.
    """
    ways = {
        "--num-parts": job.num_parts, "--documents-per-part": job.documents_per_part, "--split": job.split,
    }  # fmt: skip
    given = [flag for flag, value in ways.items() if value is not None]
    problems = [f"{' and '.join(given)} exclude each other."] if len(given) > 1 else []
    problems += [
        f"{flag} {ways[flag]}: must be at least 1." for flag in given if flag != "--split" and int(ways[flag] or 0) < 1
    ]
    if job.split is not None:
        try:
            split_shares(job.split)
        except ValueError:
            problems.append(f"--split {job.split} should be up to three shares, such as 98,2 or 969,30,1.")
    if len(set(job.inputs)) < len(job.inputs):
        problems.append("--input names a shard twice.")
    if problems:
        raise ConfigError(problems)


def plan_outputs(job: MergeJob, indices: Sequence[ShardIndex]) -> list[Output]:
    """Return the shards that a job makes, in order.

    Raises:
        ConfigError: there are too few documents for them.
    """
    total = sum(index.num_documents for index in indices)
    if job.split is not None:
        shares = split_shares(job.split)
        cuts = [round(sum(shares[:number]) / sum(shares) * total) for number in range(len(shares) + 1)]
        named = zip(SPLIT_NAMES, cuts[:-1], cuts[1:], shares, strict=False)
        outputs = [Output(f"{job.output_prefix}_{name}", first, last) for name, first, last, share in named if share]
    elif job.num_parts is not None:
        cuts = [0, *(_cut_at_tokens(indices, part / job.num_parts) for part in range(1, job.num_parts)), total]
        outputs = _numbered(job.output_prefix, cuts)
    elif job.documents_per_part is not None:
        outputs = _numbered(job.output_prefix, [*range(0, total, job.documents_per_part), total])
    else:
        outputs = [Output(job.output_prefix, 0, total)]
    if empty := [output.prefix for output in outputs if output.first >= output.last]:
        raise ConfigError(f"No document would be in {', '.join(empty)}: {total} documents do not divide so.")
    return outputs


def _numbered(prefix: str, cuts: Sequence[int]) -> list[Output]:
    count = len(cuts) - 1
    return [
        Output(f"{prefix}_{number:05}-of-{count:05}", first, last)
        for number, (first, last) in enumerate(zip(cuts[:-1], cuts[1:], strict=True))
    ]


def _cut_at_tokens(indices: Sequence[ShardIndex], share: float) -> int:
    """The document before which about this share of all tokens lies."""
    target, documents = share * sum(index.num_tokens for index in indices), 0
    for index in indices:
        if target < index.num_tokens:
            sequence = np.searchsorted(index.sequence_pointers, target * index.dtype.itemsize)
            return documents + int(np.searchsorted(index.document_indices[:-1], sequence))
        target -= index.num_tokens
        documents += index.num_documents
    return documents
