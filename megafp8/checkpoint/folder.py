"""Where checkpoints lie: `FOLDER/iter_0000120/`, and a text file that names the newest, as Megatron-LM has it.

A checkpoint is written beside its final name and renamed when whole, so a folder that bears the name is complete. The
pointer file is a hint for people and for other programs; the newest complete folder wins.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Optional

from megafp8.errors import CheckpointError

POINTER = "latest_checkpointed_iteration.txt"
# Written by megatron-core after everything else: a folder that has it is whole.
COMPLETE = "metadata.json"
NAME = re.compile(r"iter_(\d{7,})")


def checkpoint_path(folder: Path, step: int) -> Path:
    """The checkpoint's final place."""
    return folder / f"iter_{step:07d}"


def unfinished_path(folder: Path, step: int) -> Path:
    """The place where it is being written."""
    return folder / f"iter_{step:07d}.unfinished"


def make_unfinished(folder: Path, step: int) -> None:
    """An empty place to write to; what a killed save left there goes away. One rank calls this."""
    place = unfinished_path(folder, step)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)


def finish(folder: Path, step: int) -> Path:
    """Give a wholly written checkpoint its name, and point to it. One rank calls this.

    A checkpoint of the same step that is already there is replaced.
    """
    written, final = unfinished_path(folder, step), checkpoint_path(folder, step)
    if final.exists():
        shutil.rmtree(final)
    written.rename(final)
    pointer = folder / (POINTER + ".unfinished")
    pointer.write_text(f"{step}\n", encoding="utf-8")
    os.replace(pointer, folder / POINTER)
    return final


def saved_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending; empty for a folder that is not there."""
    if not folder.is_dir():
        return []
    named = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted(int(match[1]) for match, path in named if match and (path / COMPLETE).is_file())


def find_checkpoint(folder: Path, step: Optional[int] = None) -> Optional[tuple[int, Path]]:
    """The checkpoint of `step`, or the newest; None when the folder holds none.

    Raises:
        CheckpointError: a step was asked for and is not there.
    """
    steps = saved_steps(folder)
    if step is not None and step not in steps:
        have = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"--ckpt-step {step}: {folder} holds steps: {have}")
    if not steps:
        return None
    chosen = steps[-1] if step is None else step
    return chosen, checkpoint_path(folder, chosen)
