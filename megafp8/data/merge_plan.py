"""What a merge is asked for, and which documents go into which output: arithmetic on indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np

from megafp8.config.derived import split_shares
from megafp8.data.shards import ShardIndex
from megafp8.errors import ConfigError, DataError
from megafp8.utils.paths import path_fault, shown

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
