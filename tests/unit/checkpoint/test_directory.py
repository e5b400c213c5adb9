"""Which checkpoint of a folder is used: the newest complete one, regardless of other files."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.checkpoint import directory
from megafp8.checkpoint.manifest import FileEntry, Manifest
from megafp8.errors import CheckpointError
from megafp8.utils.files import file_sha256


def put(folder: Path, name: str, is_whole: bool = True) -> Path:
    """A checkpoint's folder as a save leaves it, or as a killed one does."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"tensors")
    if is_whole:
        (path / directory.MANIFEST).write_text("{}")
    return path


def manifest_of(unfinished: Path, step: int) -> Manifest:
    """The record that a save has of its files."""
    files = {path.name: FileEntry(path.stat().st_size, file_sha256(path)) for path in unfinished.iterdir()}
    return Manifest(step=step, consumed_samples=8 * step, layout=(1, 1, 1), saved_at="", files=files)


def write(folder: Path, step: int) -> Manifest:
    """A checkpoint without manifest and final name."""
    directory.make_unfinished_folder(folder, step)
    unfinished = directory.unfinished_path(folder, step)
    (unfinished / "__0_0.distcp").write_bytes(b"new tensors")
    return manifest_of(unfinished, step)


def test_newest_complete_checkpoint_is_used(tmp_path: Path) -> None:
    put(tmp_path, "iter_0000009")
    newest = put(tmp_path, "iter_0000120")
    put(tmp_path, "iter_0000200", is_whole=False)
    put(tmp_path, "iter_0000300.unfinished")
    put(tmp_path, "best_model")
    (tmp_path / "iter_0000400").write_text("a file")
    assert directory.complete_steps(tmp_path) == [9, 120]
    assert directory.find_checkpoint(tmp_path) == (120, newest)


def test_steps_are_compared_as_numbers(tmp_path: Path) -> None:
    put(tmp_path, "iter_9999999")
    put(tmp_path, "iter_10000000")
    assert directory.find_checkpoint(tmp_path)[0] == 10_000_000


def test_the_folder_decides_not_the_pointer(tmp_path: Path) -> None:
    """A pointer can be older than the folder, if a save is killed between the two."""
    put(tmp_path, "iter_0000005")
    put(tmp_path, "iter_0000010")
    (tmp_path / directory.POINTER).write_text("5\n")
    assert directory.find_checkpoint(tmp_path)[0] == 10


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_without_a_checkpoint(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path if exists else tmp_path / "absent"
    assert directory.complete_steps(folder) == []
    assert directory.find_checkpoint(folder) is None


def test_a_requested_step(tmp_path: Path) -> None:
    for step in (5, 10):
        put(tmp_path, f"iter_{step:07d}")
    assert directory.find_checkpoint(tmp_path, 5) == (5, tmp_path / "iter_0000005")
    with pytest.raises(CheckpointError, match="--ckpt-step 7: .* has steps: 5, 10"):
        directory.find_checkpoint(tmp_path, 7)
    with pytest.raises(CheckpointError, match="has steps: none"):
        directory.find_checkpoint(tmp_path / "absent", 7)


def test_a_checkpoint_gets_its_name_when_complete(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    manifest = write(folder, 5)
    assert directory.complete_steps(folder) == [], "not before it is finished"
    path = directory.publish(folder, 5, manifest)
    assert path == folder / "iter_0000005"
    assert directory.find_checkpoint(folder) == (5, path)
    assert (folder / directory.POINTER).read_text() == "5\n"
    assert sorted(item.name for item in folder.iterdir()) == ["iter_0000005", directory.POINTER]


def test_files_of_all_ranks_must_exist_before_publishing(tmp_path: Path) -> None:
    manifest = write(tmp_path, 5)
    (directory.unfinished_path(tmp_path, 5) / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="__0_0.distcp is missing.*shared by all machines"):
        directory.publish(tmp_path, 5, manifest)
    assert directory.complete_steps(tmp_path) == []


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    left = put(tmp_path, "iter_0000005.unfinished", is_whole=False)
    directory.make_unfinished_folder(tmp_path, 5)
    assert list(left.iterdir()) == []


def test_a_step_saved_before_is_replaced(tmp_path: Path) -> None:
    old = put(tmp_path, "iter_0000005")
    (old / "old").write_text("")
    directory.publish(tmp_path, 5, write(tmp_path, 5))
    assert not (old / "old").exists()
    assert directory.complete_steps(tmp_path) == [5]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["iter_0000005", directory.POINTER]


def test_a_full_disk_is_detected_before_any_write(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"GB of free space, but a checkpoint needs 1010000\.001 GB: .*--ckpt-keep"
    ):
        directory.make_unfinished_folder(tmp_path, 5, num_bytes=10**15)
    assert list(tmp_path.iterdir()) == []


def test_a_probe_leaves_nothing(tmp_path: Path) -> None:
    directory.check_writable(tmp_path / "run", 1000)
    directory.check_writable(tmp_path / "run", 10**15, rank=1)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_without_room_is_found_before_training(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"run has .* GB of free space, but a checkpoint needs 1010000\.001 GB"):
        directory.check_writable(tmp_path / "run", 10**15)


def test_a_folder_below_a_file_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match=r"--save .*/file/run: cannot write a checkpoint of 1\.000 GB .*Not a directory"
    ):
        directory.check_writable(tmp_path / "file" / "run", 10**9)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_loses_files_is_detected(call: str, tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(f"megafp8.utils.files.os.{call}", fail)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        directory.check_writable(tmp_path, 10**9)


def test_cleanup_removes_only_incomplete_checkpoints(tmp_path: Path) -> None:
    remaining = ["iter_0000001", "iter_0000002.corrupt", "iter_0000003.retired", "iter_0000004"]
    for name in (*remaining[:-1], "iter_0000001.replaced", "iter_0000004.replaced", "iter_0000005.unfinished", "other"):
        put(tmp_path, name)
    directory.clean_up(tmp_path)
    assert sorted(item.name for item in tmp_path.iterdir()) == [*remaining, "other"], "4 was being replaced"


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        put(tmp_path, f"iter_{step:07d}")
    put(tmp_path, "iter_0000005.corrupt")
    assert directory.prune(tmp_path, directory.Retention(2), protected_step=10) == [20]
    assert directory.complete_steps(tmp_path) == [10, 30, 40]
    assert directory.prune(tmp_path, directory.Retention(5)) == []
    assert sorted(item.name for item in tmp_path.iterdir())[0] == "iter_0000005.corrupt"


def test_multiples_of_an_interval_are_retained() -> None:
    steps = [10, 20, 30, 40, 50]
    assert directory.Retention(1, 20).outdated(steps) == [10, 30]
    assert directory.Retention(3, 20).outdated(steps) == [10]
    assert directory.Retention(1, 7).outdated(steps) == [10, 20, 30, 40]


def test_names_of_set_aside_checkpoints_are_unique(tmp_path: Path) -> None:
    for expected in ("iter_0000005.corrupt", "iter_0000005.corrupt-1", "iter_0000005.corrupt-2"):
        assert directory.set_aside(put(tmp_path, "iter_0000005"), directory.CORRUPT).name == expected
    assert directory.list_steps(tmp_path) == []
