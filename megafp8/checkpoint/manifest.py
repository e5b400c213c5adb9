"""The manifest of a checkpoint: every file with its size and SHA-256, written last.

A folder is a checkpoint if it has a manifest, and whole if its files are those of the manifest. The manifest has a hash
of itself, and is written in one form only, so that no byte of it can change unnoticed either. Hashes stop accidents:
whoever may write to the folder can also write another manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megafp8.errors import CheckpointError
from megafp8.utils.files import LIST_BYTES, UnreadableFile, atomic_write, file_sha256, read_bytes
from megafp8.utils.strict_json import parse_json

MANIFEST = "manifest.json"
VERSION = 1
SHOWN = 4
NAME = re.compile(r"iter_(\d{7,})")


def folder_name(step: int) -> str:
    """What a checkpoint's folder is called."""
    return f"iter_{step:07d}"


@dataclass(frozen=True)
class FileEntry:
    """A file as it was written: its size, and its SHA-256 in hexadecimal."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is and what lies in its folder.

    Attributes:
        step: optimizer steps done.
        consumed_samples: training sequences read.
        layout: sizes of the parallel axes: pipeline, tensor, data x context.
        saved_at: UTC, ISO 8601.
        files: by path relative to the folder.
    """

    step: int
    consumed_samples: int
    layout: tuple[int, ...]
    saved_at: str
    files: Mapping[str, FileEntry]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, the manifest itself left out."""
        return sum(entry.num_bytes for entry in self.files.values())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it into the checkpoint's folder, whole or not at all, and wait until it is on the disk."""
    with atomic_write(folder / MANIFEST) as stream:
        stream.write(_encode(manifest))


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a checkpoint's folder.

    Raises:
        CheckpointError: there is none, or it is not what was written.
    """
    path = folder / MANIFEST
    try:
        content = read_bytes(path, LIST_BYTES)
    except UnreadableFile as error:
        if not error.is_missing:
            raise CheckpointError(f"{MANIFEST} cannot be read: {error.reason}") from error
        raise CheckpointError(
            f"{MANIFEST} is missing: the checkpoint is cut off, or older than manifests (tools/checkpoint.py seal "
            f"{folder} makes one from the files as they are)"
        ) from error
    try:
        manifest = _decode(parse_json(content))
        is_as_written = _encode(manifest) == content
    except (ValueError, TypeError, KeyError, AttributeError):
        is_as_written = False
    if not is_as_written:
        raise CheckpointError(f"{MANIFEST} is damaged")
    return manifest


def damage_seen(path: Path, with_hashes: bool = True, rank: int = 0, num_ranks: int = 1) -> list[str]:
    """What one of some ranks finds wrong with a checkpoint: all look at the sizes, and each reads its share."""
    try:
        manifest = read_manifest(path)
        found = differences(path, manifest)
        if found or not with_hashes:
            return found
        return changed(path, share(manifest.files, rank, num_ranks))
    except (CheckpointError, OSError) as error:
        return [str(error)]


def check_complete(path: Path) -> None:
    """Read all of a checkpoint, in one process.

    Raises:
        CheckpointError: it is damaged.
    """
    if problems := damage_seen(path):
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {listed(problems)}")


def listed(problems: list[str]) -> str:
    """The first problems in one line."""
    more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return "; ".join(problems[:SHOWN]) + more


def differences(folder: Path, manifest: Manifest) -> list[str]:
    """How folder and files differ from the manifest by name, kind and size; empty if they do not."""
    found = []
    if NAME.fullmatch(folder.name) and folder.name != folder_name(manifest.step):
        found.append(f"{MANIFEST} is of step {manifest.step}")
    there = set(relative_files(folder)) - {MANIFEST}
    for name in sorted(there - set(manifest.files)):
        found.append(f"{name} is not in {MANIFEST}")
    for name, entry in sorted(manifest.files.items()):
        path = folder / name
        if name not in there:
            found.append(f"{name} is missing")
        elif path.is_symlink() or not path.is_file():
            found.append(f"{name} is not a plain file")
        elif path.stat().st_size != entry.num_bytes:
            found.append(f"{name} has {path.stat().st_size} bytes instead of {entry.num_bytes}")
    return found


def changed(folder: Path, entries: Mapping[str, FileEntry]) -> list[str]:
    """Which of these files have other bytes than were written: reads all of them."""
    return [
        f"{name} is damaged: SHA-256 {found[:12]}... instead of {entry.sha256[:12]}..."
        for name, entry in sorted(entries.items())
        if (found := file_sha256(folder / name)) != entry.sha256
    ]


def share(files: Mapping[str, FileEntry], rank: int, num_ranks: int) -> dict[str, FileEntry]:
    """The files that a rank reads when the ranks divide them: shares are disjoint and of about equal size."""
    loads = [0] * num_ranks
    mine = {}
    for name, entry in sorted(files.items(), key=lambda item: (-item[1].num_bytes, item[0])):
        taker = loads.index(min(loads))
        loads[taker] += entry.num_bytes
        if taker == rank:
            mine[name] = entry
    return mine


def relative_files(folder: Path) -> Iterable[str]:
    """Everything in a folder that is not a folder, links included, by relative path."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix()


def _encode(manifest: Manifest) -> bytes:
    content = {"version": VERSION} | asdict(manifest)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps(content | {"sha256": digest}, indent=1, sort_keys=True) + "\n").encode()


def _decode(content: dict[str, Any]) -> Manifest:
    return Manifest(
        step=content["step"],
        consumed_samples=content["consumed_samples"],
        layout=tuple(content["layout"]),
        saved_at=content["saved_at"],
        files={name: FileEntry(**entry) for name, entry in content["files"].items()},
    )
