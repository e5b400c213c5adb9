"""The checks of a start before the ranks train."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from megafp8.errors import CheckpointError
from megafp8.training import pretrain


def test_a_run_folder_on_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are written there too."""

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pretrain, "acquire_run_lock", full)
    with pytest.raises(CheckpointError) as raised:
        pretrain.try_lock(tmp_path)
    assert str(raised.value) == (
        f"--save {tmp_path}: run.lock cannot be written: the disk is full; make room or choose another folder"
    )
