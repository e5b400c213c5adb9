"""The manifest of a checkpoint: what it notices of a change, and that no byte of its own is without meaning."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
from megafp8.errors import CheckpointError
from megafp8.utils.files import file_sha256

FILES = {"__0_0.distcp": b"tensors of rank 0" * 40, "__1_0.distcp": b"tensors of rank 1" * 40, ".metadata": b"places"}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A folder with files and their manifest."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    entries = {name: FileEntry(len(content), file_sha256(tmp_path / name)) for name, content in FILES.items()}
    saved_at = "2026-01-01T00:00:00+00:00"
    manifest = Manifest(step=7, consumed_samples=56, layout=(1, 2, 1), saved_at=saved_at, files=entries)
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    return tmp_path


def test_a_whole_one(whole: Path) -> None:
    manifest = read_manifest(whole)
    assert manifest.num_bytes == sum(map(len, FILES.values()))
    assert find_damage(whole) == []


def test_every_byte_of_the_manifest_counts(whole: Path) -> None:
    path = whole / MANIFEST
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(CheckpointError, match="is damaged"):
            read_manifest(whole)
    for end in range(len(good)):
        path.write_bytes(good[:end])
        with pytest.raises(CheckpointError, match="is damaged"):
            read_manifest(whole)
    path.write_bytes(good + b"\n")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(whole)


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
def test_sizes_tell(change, text: str, whole: Path) -> None:
    change(whole)
    (problem,) = find_damage(whole, with_hashes=False)
    assert text in problem


def test_a_link_is_no_file(whole: Path) -> None:
    (whole / "__1_0.distcp").rename(whole.parent / "elsewhere")
    (whole / "__1_0.distcp").symlink_to(whole.parent / "elsewhere")
    assert find_damage(whole) == ["__1_0.distcp is not a regular file"]


def test_only_the_hash_sees_files_that_changed_places(whole: Path) -> None:
    (whole / "__0_0.distcp").write_bytes(FILES["__1_0.distcp"])
    manifest = read_manifest(whole)
    assert differences(whole, manifest) == []
    assert [problem.split()[0] for problem in changed_files(whole, manifest.files)] == ["__0_0.distcp"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_shares_are_all_of_it_and_even(num_ranks: int) -> None:
    files = {f"file{size}": FileEntry(size, "") for size in (100, 90, 50, 40, 30, 10)}
    shares = [rank_share(files, rank, num_ranks) for rank in range(num_ranks)]
    assert sorted(name for part in shares for name in part) == sorted(files)
    loads = [sum(entry.num_bytes for entry in part.values()) for part in shares]
    assert max(loads) <= max(100, 320 / num_ranks + 50)


def test_each_rank_finds_what_is_in_its_share(whole: Path) -> None:
    for name in ("__0_0.distcp", "__1_0.distcp"):
        (whole / name).write_bytes(b"x" * 680)
    seen = [find_damage(whole, rank=rank, num_ranks=3) for rank in range(3)]
    assert sorted(len(problems) for problems in seen) == [0, 1, 1]
