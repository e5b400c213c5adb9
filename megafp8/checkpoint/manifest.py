"""The manifest of a checkpoint: every file with its size and SHA-256, written last.

A folder with a manifest is a checkpoint. It is complete if its files match the manifest. The manifest includes a hash
of itself and has one canonical encoding, so any changed byte is detected. Hashes protect against accidents only:
whoever can write to the folder can also replace the manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.errors import CheckpointError, causes
from megafp8.utils.files import LIST_BYTES, UnreadableFile, atomic_write, file_sha256, read_bytes, sync_file
from megafp8.utils.formatting import utc_now
from megafp8.utils.memory import cause
from megafp8.utils.plain_data import from_plain
from megafp8.utils.strict_json import parse_json

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
MAX_LISTED_PROBLEMS = 4
FOLDER_NAME = re.compile(r"iter_([0-9]{7,})")
# All other files (settings, index) are small, and read before any tensor.
TENSOR_SUFFIX = ".distcp"


def folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"iter_{step:07d}"


@dataclass(frozen=True)
class FileEntry:
    """Size and SHA-256 (hexadecimal) of a file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a checkpoint and of the files in its folder.

    Attributes:
        step: optimizer steps done.
        consumed_samples: training samples read.
        layout: sizes of the parallel axes: pipeline, tensor, data x context.
        saved_at: UTC, ISO 8601.
        files: by path relative to the folder.
        merged: what a merged checkpoint was made of (`merge.MergePlan.provenance`); None for others.
    """

    step: int
    consumed_samples: int
    layout: tuple[int, ...]
    saved_at: str
    files: Mapping[str, FileEntry]
    merged: Optional[Mapping[str, Any]] = None

    @property
    def num_bytes(self) -> int:
        """Size of all files except the manifest."""
        return sum(entry.num_bytes for entry in self.files.values())


def build_manifest(
    folder: Path,
    step: int,
    consumed_samples: int,
    layout: tuple[int, ...],
    hashed: Optional[Mapping[str, FileEntry]] = None,
) -> Manifest:
    """Build the manifest of the files in a folder. Those not in `hashed` are synced and hashed here."""
    files = dict(hashed or {})
    for name in relative_files(folder):
        if name not in files:
            sync_file(folder / name)
            files[name] = FileEntry((folder / name).stat().st_size, file_sha256(folder / name))
    return Manifest(step=step, consumed_samples=consumed_samples, layout=layout, saved_at=utc_now(), files=files)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and sync the manifest atomically."""
    with atomic_write(folder / MANIFEST) as stream:
        stream.write(_encode(manifest))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        content = read_bytes(path, LIST_BYTES)
    except UnreadableFile as error:
        if not error.is_missing:
            raise CheckpointError(f"{MANIFEST} cannot be read: {error.reason}") from error
        raise CheckpointError(
            f"{MANIFEST} is missing: the checkpoint is incomplete, or was saved by a version without manifests "
            f"(megafp8 checkpoint seal {folder} creates one from the existing files)"
        ) from error
    try:
        manifest = from_plain(Manifest, parse_json(content), ignores_unknown=True)
    except UnreadableFile as error:
        raise CheckpointError(f"{MANIFEST} is damaged: {error.reason}") from error
    if _encode(manifest) != content:
        raise CheckpointError(f"{MANIFEST} is damaged")
    return manifest


def find_damage(path: Path, with_hashes: bool = True, rank: int = 0, num_ranks: int = 1) -> list[str]:
    """Return the problems of a checkpoint. With several ranks, each hashes its share of the files.

    Args:
        with_hashes: hash all files; otherwise compare the sizes of those with tensors, and hash the others.

    Raises:
        CheckpointError, OSError: there is no memory to read it, which is no damage.
    """
    try:
        manifest = read_manifest(path)
        found = differences(path, manifest)
        if found:
            return found
        hashed = {
            name: entry for name, entry in manifest.files.items() if with_hashes or not name.endswith(TENSOR_SUFFIX)
        }
        return changed_files(path, rank_share(hashed, rank, num_ranks))
    except (CheckpointError, OSError) as error:
        if any(map(cause, causes(error))):
            raise
        return [str(error)]


def check_complete(path: Path) -> None:
    """Verify a checkpoint with hashes, in one process.

    Raises:
        CheckpointError: it is damaged.
    """
    if problems := find_damage(path):
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {summarize(problems)}")


def summarize(problems: list[str]) -> str:
    """Join the first problems in one line."""
    more = f" and {len(problems) - MAX_LISTED_PROBLEMS} more" if len(problems) > MAX_LISTED_PROBLEMS else ""
    return "; ".join(problems[:MAX_LISTED_PROBLEMS]) + more


def differences(folder: Path, manifest: Manifest) -> list[str]:
    """Return how names, types and sizes of a folder's files differ from the manifest."""
    found = []
    if FOLDER_NAME.fullmatch(folder.name) and folder.name != folder_name(manifest.step):
        found.append(f"{MANIFEST} is of step {manifest.step}")
    present = set(relative_files(folder)) - {MANIFEST}
    found += [f"{name} is not in {MANIFEST}" for name in sorted(present - set(manifest.files))]
    for name, entry in sorted(manifest.files.items()):
        path = folder / name
        if name not in present:
            found.append(f"{name} is missing")
        elif path.is_symlink() or not path.is_file():
            found.append(f"{name} is not a regular file")
        elif path.stat().st_size != entry.num_bytes:
            found.append(f"{name} has {path.stat().st_size} bytes instead of {entry.num_bytes}")
    return found


def changed_files(folder: Path, entries: Mapping[str, FileEntry]) -> list[str]:
    """Hash files and return those that differ from the manifest."""
    return [
        f"{name} is damaged: SHA-256 {found[:12]}... instead of {entry.sha256[:12]}..."
        for name, entry in sorted(entries.items())
        if (found := file_sha256(folder / name)) != entry.sha256
    ]


def rank_share(files: Mapping[str, FileEntry], rank: int, num_ranks: int) -> dict[str, FileEntry]:
    """Return the files that a rank hashes: disjoint shares of about equal size."""
    loads = [0] * num_ranks
    share = {}
    for name, entry in sorted(files.items(), key=lambda item: (-item[1].num_bytes, item[0])):
        least_loaded = loads.index(min(loads))
        loads[least_loaded] += entry.num_bytes
        if least_loaded == rank:
            share[name] = entry
    return share


def relative_files(folder: Path) -> Iterable[str]:
    """Return the relative paths of everything in a folder except directories; links are included."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix()


def content_sha256(manifest: Manifest) -> str:
    """Return the SHA-256 of a manifest, which covers all files: it is that in `manifest.json`."""
    return hashlib.sha256(json.dumps(_plain(manifest), sort_keys=True).encode()).hexdigest()


def _plain(manifest: Manifest) -> dict[str, Any]:
    content = {"version": MANIFEST_VERSION} | asdict(manifest)
    if manifest.merged is None:
        del content["merged"]  # the bytes of earlier versions
    return content


def _encode(manifest: Manifest) -> bytes:
    content = _plain(manifest) | {"sha256": content_sha256(manifest)}
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
