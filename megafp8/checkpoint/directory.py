"""Layout of a checkpoint folder: `FOLDER/iter_0000120/` and a pointer file to the newest, as in Megatron-LM.

A checkpoint is written under another name and renamed when complete. A folder with the final name was therefore
complete when it was renamed. The pointer file is informational: the newest complete folder counts.

| name | content |
|---|---|
| `iter_0000120` | a checkpoint |
| `iter_0000120.unfinished` | being written or deleted; removed when a run starts |
| `iter_0000120.replaced` | the previous checkpoint of this step, while the new one is renamed |
| `iter_0000120.corrupt` | found damaged by a run that resumed; kept, but never read |
| `iter_0000120.retired` | newer than the step that a run went back to (`--ckpt-step`); kept, but never read |
"""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Optional

from megafp8.checkpoint.manifest import FOLDER_NAME, MANIFEST, Manifest, differences, folder_name, write_manifest
from megafp8.errors import CheckpointError
from megafp8.resilience import fault_injection
from megafp8.utils.files import atomic_write, sync_folder

POINTER = "latest_checkpointed_iteration.txt"
# Subfolder of --save, unless --non-persistent-global-ckpt-dir is given.
NON_PERSISTENT = "non_persistent"
UNFINISHED, REPLACED, CORRUPT, RETIRED = ".unfinished", ".replaced", ".corrupt", ".retired"
# Allowance for metadata besides the tensors.
SPARE_BYTES, SPARE_FRACTION = 1 << 20, 0.01
# For changes that all ranks wait for.
NO_LEASE = nullcontext()


@dataclass(frozen=True)
class Retention:
    """The checkpoints that are kept.

    Attributes:
        newest: number of newest checkpoints.
        interval: checkpoints of steps that are multiples of this are also kept; None: no others.
    """

    newest: int
    interval: Optional[int] = None

    def outdated(self, steps: list[int]) -> list[int]:
        """Return the steps that are not kept.

        Args:
            steps: ascending.
        """
        return [step for step in steps[: -self.newest] if self.interval is None or step % self.interval]


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the final path of a checkpoint."""
    return folder / folder_name(step)


def unfinished_path(folder: Path, step: int) -> Path:
    """Return the path of a checkpoint while it is being written."""
    return folder / (folder_name(step) + UNFINISHED)


def make_unfinished_folder(folder: Path, step: int, num_bytes: int = 0) -> None:
    """Make an empty folder to write to, and remove what a killed save left there. One rank calls it.

    Args:
        num_bytes: size of the tensors to write.

    Raises:
        CheckpointError: the disk has not enough free space.
    """
    unfinished = unfinished_path(folder, step)
    shutil.rmtree(unfinished, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    check_free_space(folder, num_bytes)
    unfinished.mkdir()


def check_free_space(folder: Path, num_bytes: int) -> None:
    """Raise if the disk has not enough free space for a checkpoint.

    Args:
        num_bytes: size of its tensors.

    Raises:
        CheckpointError: with the required and the free space.
    """
    needed, free = num_bytes + SPARE_BYTES + int(num_bytes * SPARE_FRACTION), shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{folder} has {free / 1e9:.3f} GB of free space, but a checkpoint needs {needed / 1e9:.3f} GB: free disk "
            "space, keep fewer checkpoints (--ckpt-keep), or save to another folder"
        )


def check_writable(folder: Path, num_bytes: int, rank: int = 0) -> None:
    """Write, sync and rename a small file, so that a run fails at its start and not at its first save.

    Each rank calls it.

    Args:
        num_bytes: minimum size of a checkpoint's tensors.

    Raises:
        CheckpointError: the folder is not writable, or has not enough free space.
    """
    path = folder / f".probe-{rank}"
    try:
        with atomic_write(path) as stream:
            stream.write(b"probe")
        path.unlink()
        if rank == 0:
            check_free_space(folder, num_bytes)
    except OSError as error:
        raise CheckpointError(
            f"--save {folder}: cannot write a checkpoint of {num_bytes / 1e9:.3f} GB ({error.strerror}): choose "
            "another folder"
        ) from error


def publish(folder: Path, step: int, manifest: Manifest, lease: AbstractContextManager[Any] = NO_LEASE) -> Path:
    """Write the manifest of a complete checkpoint, rename it to its final name and update the pointer file.

    One rank calls it. A checkpoint of the same step is replaced. At every moment one of the two is complete.

    Args:
        lease: held during each visible change.

    Raises:
        CheckpointError: a file that some rank wrote is not in this folder, or the lease is revoked.
    """
    written, final = unfinished_path(folder, step), checkpoint_path(folder, step)
    if missing := differences(written, manifest):
        raise CheckpointError(
            f"{written} lacks files of other ranks ({missing[0]}): use a folder shared by all machines"
        )
    fault_injection.point("save.before_manifest", step=step)
    write_manifest(written, manifest)
    fault_injection.point("save.before_rename", step=step)
    replaced = final.with_name(final.name + REPLACED)
    with lease:
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
            fault_injection.point("save.between_renames", step=step)
        written.rename(final)
    fault_injection.point("save.after_rename", step=step)
    sync_folder(folder)
    fault_injection.point("save.before_pointer", step=step)
    with lease, atomic_write(folder / POINTER) as stream:
        stream.write(f"{step}\n".encode())
    fault_injection.point("save.after_pointer", step=step)
    with lease:
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def clean_up(folder: Path) -> None:
    """Remove what killed saves left, and restore a checkpoint whose replacement was not completed.

    Only for the start of the single run that writes to the folder. One rank calls it.
    """
    for path in folder.glob(f"iter_*{REPLACED}"):
        final = path.with_name(path.name.removesuffix(REPLACED))
        if not final.exists():
            path.rename(final)
    for suffix in (UNFINISHED, REPLACED):
        for path in folder.glob(f"iter_*{suffix}"):
            shutil.rmtree(path, ignore_errors=True)


def prune(
    folder: Path, keep: Retention, protected_step: Optional[int] = None, lease: AbstractContextManager[Any] = NO_LEASE
) -> list[int]:
    """Delete the complete checkpoints that are not kept. Those set aside stay. One rank calls it.

    Args:
        protected_step: a step that is never deleted.
        lease: held during each deletion.

    Returns:
        The deleted steps.
    """
    steps = [step for step in keep.outdated(complete_steps(folder)) if step != protected_step]
    for step in steps:
        with lease:
            delete(folder, step)
    return steps


def delete(folder: Path, step: int) -> None:
    """Delete a checkpoint. It is renamed first, so that a partially deleted one is never found."""
    unfinished = unfinished_path(folder, step)
    shutil.rmtree(unfinished, ignore_errors=True)
    checkpoint_path(folder, step).rename(unfinished)
    fault_injection.point("save.in_prune")
    shutil.rmtree(unfinished, ignore_errors=True)


def set_aside(path: Path, suffix: str) -> Path:
    """Rename a checkpoint with a suffix so that no run loads it; a number is appended if the name is taken."""
    names = (path.with_name(path.name + suffix + (f"-{number}" if number else "")) for number in count())
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    return aside


def list_steps(folder: Path) -> list[int]:
    """Return the steps of all folders with a checkpoint's name, ascending; empty if the folder is absent."""
    if not folder.is_dir():
        return []
    named = [(FOLDER_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted(int(match[1]) for match, path in named if match and path.is_dir())


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints with a manifest, ascending; empty if the folder is absent."""
    return [step for step in list_steps(folder) if (checkpoint_path(folder, step) / MANIFEST).is_file()]


def find_checkpoint(folder: Path, step: Optional[int] = None) -> Optional[tuple[int, Path]]:
    """Return the checkpoint of `step`, or the newest; None if the folder has none.

    Raises:
        CheckpointError: `step` is given and absent.
    """
    steps = complete_steps(folder)
    if step is not None and step not in steps:
        have = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"--ckpt-step {step}: no such checkpoint; {folder} has steps: {have}")
    if not steps:
        return None
    chosen = steps[-1] if step is None else step
    return chosen, checkpoint_path(folder, chosen)
