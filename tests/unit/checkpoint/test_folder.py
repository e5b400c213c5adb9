"""Which checkpoint of a folder counts: the newest whole one, whatever else lies there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.checkpoint import folder as folders
from megafp8.errors import CheckpointError


def put(folder: Path, name: str, is_whole: bool = True) -> Path:
    """A checkpoint's folder as a save leaves it, or as a killed one does."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"tensors")
    if is_whole:
        (path / folders.COMPLETE).write_text("{}")
    return path


def test_newest_whole_checkpoint_wins(tmp_path: Path) -> None:
    put(tmp_path, "iter_0000009")
    newest = put(tmp_path, "iter_0000120")
    put(tmp_path, "iter_0000200", is_whole=False)
    put(tmp_path, "iter_0000300.unfinished")
    put(tmp_path, "best_model")
    (tmp_path / "iter_0000400").write_text("a file")
    assert folders.saved_steps(tmp_path) == [9, 120]
    assert folders.find_checkpoint(tmp_path) == (120, newest)


def test_steps_are_numbers_not_text(tmp_path: Path) -> None:
    put(tmp_path, "iter_9999999")
    put(tmp_path, "iter_10000000")
    assert folders.find_checkpoint(tmp_path)[0] == 10_000_000


def test_the_folder_counts_and_not_the_pointer(tmp_path: Path) -> None:
    """A pointer can be older than the folder, when a save is killed between the two."""
    put(tmp_path, "iter_0000005")
    put(tmp_path, "iter_0000010")
    (tmp_path / folders.POINTER).write_text("5\n")
    assert folders.find_checkpoint(tmp_path)[0] == 10


@pytest.mark.parametrize("exists", [True, False])
def test_no_checkpoint(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path if exists else tmp_path / "absent"
    assert folders.saved_steps(folder) == []
    assert folders.find_checkpoint(folder) is None


def test_a_step_that_is_asked_for(tmp_path: Path) -> None:
    for step in (5, 10):
        put(tmp_path, f"iter_{step:07d}")
    assert folders.find_checkpoint(tmp_path, 5) == (5, tmp_path / "iter_0000005")
    with pytest.raises(CheckpointError, match="--ckpt-step 7: .* holds steps: 5, 10"):
        folders.find_checkpoint(tmp_path, 7)
    with pytest.raises(CheckpointError, match="holds steps: none"):
        folders.find_checkpoint(tmp_path / "absent", 7)


def test_a_checkpoint_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folders.make_unfinished(folder, 5)
    put(folder / "iter_0000005.unfinished", "part")
    (folder / "iter_0000005.unfinished" / folders.COMPLETE).write_text("{}")
    assert folders.saved_steps(folder) == [], "not before it is finished"
    path = folders.finish(folder, 5)
    assert path == folder / "iter_0000005"
    assert folders.find_checkpoint(folder) == (5, path)
    assert (folder / folders.POINTER).read_text() == "5\n"
    assert sorted(item.name for item in folder.iterdir()) == ["iter_0000005", folders.POINTER]


def test_what_a_killed_save_left_is_thrown_away(tmp_path: Path) -> None:
    left = put(tmp_path, "iter_0000005.unfinished", is_whole=False)
    folders.make_unfinished(tmp_path, 5)
    assert list(left.iterdir()) == []


def test_a_step_that_was_saved_before_is_replaced(tmp_path: Path) -> None:
    old = put(tmp_path, "iter_0000005")
    (old / "old").write_text("")
    put(tmp_path, "iter_0000005.unfinished")
    folders.finish(tmp_path, 5)
    assert not (old / "old").exists()
    assert folders.saved_steps(tmp_path) == [5]
