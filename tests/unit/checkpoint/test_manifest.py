"""The manifest of a checkpoint: the changes that it detects. Every byte of the manifest itself matters."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from traceback import StackSummary

import pytest
from torch.distributed.checkpoint import CheckpointException

from megafp8.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    changed_files,
    differences,
    find_damage,
    rank_share,
    read_manifest,
    write_manifest,
)
from megafp8.checkpoint.metadata import load_errors
from megafp8.errors import CheckpointError
from megafp8.utils.files import UnreadableFile, file_sha256

FILES = {"__0_0.distcp": b"tensors of rank 0" * 40, "__1_0.distcp": b"tensors of rank 1" * 40, ".metadata": b"places"}


@pytest.fixture
def complete(tmp_path: Path) -> Path:
    """A folder with files and their manifest."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    entries = {name: FileEntry(len(content), file_sha256(tmp_path / name)) for name, content in FILES.items()}
    saved_at = "2026-01-01T00:00:00+00:00"
    manifest = Manifest(step=7, consumed_samples=56, layout=(1, 2, 1), saved_at=saved_at, files=entries)
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    return tmp_path


def test_a_complete_checkpoint_matches_its_manifest(complete: Path) -> None:
    manifest = read_manifest(complete)
    assert manifest.num_bytes == sum(map(len, FILES.values()))
    assert find_damage(complete) == []


def test_every_byte_of_the_manifest_counts(complete: Path) -> None:
    path = complete / MANIFEST
    good = path.read_bytes()
    for offset in range(len(good)):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        with pytest.raises(CheckpointError, match="is damaged"):
            read_manifest(complete)
    for end in range(len(good)):
        path.write_bytes(good[:end])
        with pytest.raises(CheckpointError, match="is damaged"):
            read_manifest(complete)
    path.write_bytes(good + b"\n")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(complete)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda folder: (folder / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
        (lambda folder: (folder / "__1_0.distcp").write_bytes(b"short"), "has 5 bytes instead of 680"),
        (lambda folder: (folder / "more").touch(), "more is not in manifest.json"),
        (lambda folder: (folder / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda folder: os.truncate(folder / ".metadata", 0), ".metadata has 0 bytes"),
    ],
)
def test_wrong_sizes_are_detected(change, text: str, complete: Path) -> None:
    change(complete)
    (problem,) = find_damage(complete, with_hashes=False)
    assert text in problem


def test_a_link_is_not_a_file(complete: Path) -> None:
    (complete / "__1_0.distcp").rename(complete.parent / "elsewhere")
    (complete / "__1_0.distcp").symlink_to(complete.parent / "elsewhere")
    assert find_damage(complete) == ["__1_0.distcp is not a regular file"]


def test_swapped_files_are_detected_by_hash(complete: Path) -> None:
    (complete / "__0_0.distcp").write_bytes(FILES["__1_0.distcp"])
    manifest = read_manifest(complete)
    assert differences(complete, manifest) == []
    assert [problem.split()[0] for problem in changed_files(complete, manifest.files)] == ["__0_0.distcp"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_shares_are_complete_and_even(num_ranks: int) -> None:
    files = {f"file{size}": FileEntry(size, "") for size in (100, 90, 50, 40, 30, 10)}
    shares = [rank_share(files, rank, num_ranks) for rank in range(num_ranks)]
    assert sorted(name for part in shares for name in part) == sorted(files)
    loads = [sum(entry.num_bytes for entry in part.values()) for part in shares]
    assert max(loads) <= max(100, 320 / num_ranks + 50)


def test_each_rank_verifies_its_share(complete: Path) -> None:
    for name in ("__0_0.distcp", "__1_0.distcp"):
        (complete / name).write_bytes(b"x" * 680)
    seen = [find_damage(complete, rank=rank, num_ranks=3) for rank in range(3)]
    assert sorted(len(problems) for problems in seen) == [0, 1, 1]


@pytest.mark.parametrize("function", ["read_bytes", "file_sha256"])
def test_a_lack_of_memory_is_no_damage(function: str, complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, *_: object) -> bytes:
        reason = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        raise reason if function == "file_sha256" else UnreadableFile("no memory", path) from reason

    monkeypatch.setattr(f"megafp8.checkpoint.manifest.{function}", fail)
    with pytest.raises((CheckpointError, OSError), match="memory"):
        find_damage(complete)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "no memory")])
def test_a_lack_of_memory_is_no_unreadable_checkpoint(error: Exception, tmp_path: Path) -> None:
    wrapped = CheckpointException("read", {0: (error, StackSummary())})
    for raised in (error, wrapped):
        with pytest.raises(type(error)), load_errors(tmp_path, needs_common=False):
            raise raised
