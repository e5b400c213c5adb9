"""Shards joined, and shards divided: one job, which lays shards end to end and cuts the whole anew.

Tokens are copied as bytes, 8 MiB at a time; indices are written a block at a time. Each output is whole or not there,
and one that is there from the same inputs is kept, so that a job that was stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.data.atomic import HashedStream, discard_abandoned, sync, temporary_name
from megafp8.data.manifest import ShardManifest, load_manifest, save_manifest
from megafp8.data.merge_plan import MergeJob, Output, check_job, plan_outputs
from megafp8.data.shard_checks import check_structure, content_key
from megafp8.data.shard_verify import failures, verify_shard
from megafp8.data.shards import ShardIndex, bin_path, idx_path, publish_shard, read_index, write_index
from megafp8.data.tokenizer import describe_tokenizer
from megafp8.errors import DataError

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
