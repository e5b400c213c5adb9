"""Where checkpoints lie: `FOLDER/iter_0000120/`, and a text file that names the newest, as Megatron-LM has it.

A checkpoint is written beside its final name and renamed when whole, so a folder that bears the name was complete when
it got it. The pointer file is a hint for people and for other programs; the newest complete folder wins.

| name | what it is |
|---|---|
| `iter_0000120` | a checkpoint |
| `iter_0000120.unfinished` | being written, or being deleted; swept when a run starts |
| `iter_0000120.replaced` | the one of this step before, for as long as the new one gets its name |
| `iter_0000120.corrupt` | found damaged by a run that resumed; kept for people, never read |
| `iter_0000120.retired` | newer than the one that a run went back to (`--ckpt-step`); kept for people, never read |

Which checkpoint a run goes on from: the newest whole one.

Damaged ones are named, and set aside in a run's own folder. Nothing is deleted here, and a folder in which every
checkpoint is damaged is an error and not a new start.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Optional

import torch.distributed as dist

from megafp8.checkpoint.manifest import (
    MANIFEST,
    NAME,
    SHOWN,
    Manifest,
    damage_seen,
    differences,
    folder_name,
    listed,
    write_manifest,
)
from megafp8.device.collective_errors import call_on_all_ranks, on_rank_0
from megafp8.errors import CheckpointError
from megafp8.resilience import fault_injection
from megafp8.utils.files import atomic_write, sync_folder

POINTER = "latest_checkpointed_iteration.txt"
# In a run's folder, unless --non-persistent-global-ckpt-dir is another.
NON_PERSISTENT = "non_persistent"
# Written after everything else: a folder that has it was whole.
COMPLETE = MANIFEST
UNFINISHED, REPLACED, CORRUPT, RETIRED = ".unfinished", ".replaced", ".corrupt", ".retired"
# Beside tensors a checkpoint has its metadata: names, shapes and places.
SPARE_BYTES, SPARE_SHARE = 1 << 20, 0.01
# The permit of those who change a folder while everybody waits for them.
ALWAYS = nullcontext()


def checkpoint_path(folder: Path, step: int) -> Path:
    """The checkpoint's final place."""
    return folder / folder_name(step)


def unfinished_path(folder: Path, step: int) -> Path:
    """The place where it is being written."""
    return folder / (folder_name(step) + UNFINISHED)


def make_unfinished(folder: Path, step: int, num_bytes: int = 0) -> None:
    """An empty place to write to; what a killed save left there goes away. One rank calls this.

    Args:
        num_bytes: of the tensors that will be written.

    Raises:
        CheckpointError: the disk has no room for them.
    """
    place = unfinished_path(folder, step)
    shutil.rmtree(place, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    check_room(folder, num_bytes)
    place.mkdir()


def check_room(folder: Path, num_bytes: int) -> None:
    """Refuse a checkpoint that the disk has no room for.

    Args:
        num_bytes: of its tensors.

    Raises:
        CheckpointError: with what it takes and what is free.
    """
    needed, free = num_bytes + SPARE_BYTES + int(num_bytes * SPARE_SHARE), shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{folder} has {free / 1e9:.3f} GB free and a checkpoint takes {needed / 1e9:.3f} GB: make room, keep "
            "fewer with --ckpt-keep, or save to another folder"
        )


def probe(folder: Path, num_bytes: int, rank: int = 0) -> None:
    """Do in small what a save does: a run should not find out at its first one that it cannot. Each rank calls this.

    Args:
        num_bytes: that the tensors of a checkpoint have at least.

    Raises:
        CheckpointError: a file cannot be written, synced and renamed there, or a checkpoint has no room.
    """
    path = folder / f".probe-{rank}"
    try:
        with atomic_write(path) as stream:
            stream.write(b"probe")
        path.unlink()
        if rank == 0:
            check_room(folder, num_bytes)
    except OSError as error:
        raise CheckpointError(
            f"--save {folder}: no checkpoint can be written there ({error.strerror}); one takes "
            f"{num_bytes / 1e9:.3f} GB: choose another folder"
        ) from error


def finish(folder: Path, step: int, manifest: Manifest, permit: AbstractContextManager[Any] = ALWAYS) -> Path:
    """Give a wholly written checkpoint its manifest and its name, and point to it. One rank calls this.

    A checkpoint of the same step that is already there is replaced; at every moment one of the two is whole.

    Args:
        permit: for each change that others see.

    Raises:
        CheckpointError: a file that some rank wrote is not in this folder, or the permit is revoked.
    """
    written, final = unfinished_path(folder, step), checkpoint_path(folder, step)
    if missing := differences(written, manifest):
        raise CheckpointError(
            f"{written} lacks what the ranks wrote ({missing[0]}): give a folder that all machines share"
        )
    fault_injection.point("save.before_manifest", step=step)
    write_manifest(written, manifest)
    fault_injection.point("save.before_rename", step=step)
    replaced = final.with_name(final.name + REPLACED)
    with permit:
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
            fault_injection.point("save.between_renames", step=step)
        written.rename(final)
    fault_injection.point("save.after_rename", step=step)
    sync_folder(folder)
    fault_injection.point("save.before_pointer", step=step)
    with permit, atomic_write(folder / POINTER) as stream:
        stream.write(f"{step}\n".encode())
    fault_injection.point("save.after_pointer", step=step)
    with permit:
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def sweep(folder: Path) -> None:
    """Clear away what killed saves left, and give a checkpoint back its name that lost it on being replaced.

    For the start of the only run that writes to the folder. One rank calls this.
    """
    for path in folder.glob(f"iter_*{REPLACED}"):
        final = path.with_name(path.name.removesuffix(REPLACED))
        if not final.exists():
            path.rename(final)
    for suffix in (UNFINISHED, REPLACED):
        for path in folder.glob(f"iter_*{suffix}"):
            shutil.rmtree(path, ignore_errors=True)


def prune(
    folder: Path, keep: int, never: Optional[int] = None, permit: AbstractContextManager[Any] = ALWAYS
) -> list[int]:
    """Delete all but the newest `keep` checkpoints, whole by name; what was set aside stays. One rank calls this.

    Args:
        never: a step that stays in any case.
        permit: for each deletion.

    Returns:
        The steps that were deleted.
    """
    steps = [step for step in saved_steps(folder)[:-keep] if step != never]
    for step in steps:
        with permit:
            delete(folder, step)
    return steps


def delete(folder: Path, step: int) -> None:
    """Delete a checkpoint. It loses its name first, so that no half of it is ever found."""
    doomed = unfinished_path(folder, step)
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint_path(folder, step).rename(doomed)
    fault_injection.point("save.in_prune")
    shutil.rmtree(doomed, ignore_errors=True)


def set_aside(path: Path, suffix: str) -> Path:
    """Rename a checkpoint so that no run takes it: `.corrupt`, `.retired`, with a number where the name is taken."""
    names = (path.with_name(path.name + suffix + (f"-{number}" if number else "")) for number in count())
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    return aside


def named_steps(folder: Path) -> list[int]:
    """Steps of all folders that bear a checkpoint's name, ascending; none for a folder that is not there."""
    if not folder.is_dir():
        return []
    named = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted(int(match[1]) for match, path in named if match and path.is_dir())


def saved_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending; empty for a folder that is not there."""
    return [step for step in named_steps(folder) if (checkpoint_path(folder, step) / COMPLETE).is_file()]


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


@dataclass(frozen=True)
class ResumePoint:
    """A whole checkpoint.

    Attributes:
        step: its step.
        path: its folder.
        notes: what is wrong with newer ones, in words.
    """

    step: int
    path: Path
    notes: tuple[str, ...] = ()


def choose_checkpoint(
    *folders: Path, step: Optional[int] = None, with_hashes: bool = True, is_own: bool = False
) -> Optional[ResumePoint]:
    """The checkpoint of `step`, or the newest whole one; None when there is none at all. All ranks call it.

    Args:
        folders: of which each may hold the newest.
        with_hashes: read every byte, each rank its share; else compare sizes only.
        is_own: the run also saves here: damaged ones that are passed over get the name `.corrupt`.

    Raises:
        CheckpointError: on all ranks: the step that was asked for is absent or damaged, every checkpoint is damaged,
            or the ranks do not see the same ones.
    """
    seen = seen_by_all(folders)
    if step is not None:
        seen = [(each, folder) for each, folder in seen if each == step]
        if not seen:
            find_checkpoint(folders[0], step)  # the error of its absence
    whole, damaged = first_complete(seen[::-1], with_hashes)
    if whole is not None:
        return dataclasses.replace(whole, notes=passed_over(damaged, is_own))
    if not damaged:
        return None
    lines = "\n".join(f"  {path.name}: {text}" for path, text in damaged)
    where, which = " and ".join(map(str, folders)), f" of step {step}" if step else ""
    raise CheckpointError(f"{where} holds no whole checkpoint{which}:\n{lines}")


def choose_to_go_back(*folders: Path, step: int, with_hashes: bool = True) -> Optional[ResumePoint]:
    """The newest whole checkpoint of the run's own folders that is not newer than `step`, else the oldest whole one;
    None when there is none. All ranks call it.

    Raises:
        CheckpointError: on all ranks: they do not see the same checkpoints.
    """
    seen = seen_by_all(folders)
    old, young = ([pair for pair in seen if is_old == (pair[0] <= step)] for is_old in (True, False))
    whole, damaged = first_complete(old[::-1] + young, with_hashes)
    return None if whole is None else dataclasses.replace(whole, notes=passed_over(damaged, is_own=True))


def first_complete(
    seen: Sequence[tuple[int, Path]], with_hashes: bool
) -> tuple[Optional[ResumePoint], list[tuple[Path, str]]]:
    """The first whole checkpoint of some steps and folders, and the damaged ones before it with what is wrong."""
    damaged: list[tuple[Path, str]] = []
    for step, folder in seen:
        path = checkpoint_path(folder, step)
        problems = damage(path, with_hashes)
        if not problems:
            return ResumePoint(step, path), damaged
        damaged.append((path, listed(problems)))
    return None, damaged


def damage(path: Path, with_hashes: bool = True) -> list[str]:
    """What is wrong with a checkpoint, the same on all ranks; empty if it is whole. All ranks call it."""
    seen = call_on_all_ranks(lambda: damage_seen(path, with_hashes, dist.get_rank(), dist.get_world_size()))
    return list(dict.fromkeys(problem for problems in seen for problem in problems))


def passed_over(damaged: list[tuple[Path, str]], is_own: bool) -> tuple[str, ...]:
    """Words on damaged checkpoints, which get another name where that is allowed."""
    notes = []
    for path, text in damaged:
        place = on_rank_0(lambda path=path: set_aside(path, CORRUPT)) if is_own else None  # type: ignore[misc]
        renamed = f", now {place.name}" if place else ""
        notes.append(f"{path} is damaged ({text}){renamed}: the one before is used")
    return tuple(notes)


def retire_newer(folder: Path, step: int) -> tuple[str, ...]:
    """Rename the checkpoints after `step`, for a run that goes back to it; words on them. All ranks call it."""

    def retire() -> list[str]:
        newer = [checkpoint_path(folder, each) for each in named_steps(folder) if each > step]
        return [f"{path.name} is newer than step {step}, now {set_aside(path, RETIRED).name}" for path in newer]

    return tuple(on_rank_0(retire))


def seen_by_all(folders: tuple[Path, ...]) -> list[tuple[int, Path]]:
    """The steps in the folders, ascending, each with its folder.

    They must be the same on every machine: else some ranks would go on and others start anew.

    Raises:
        CheckpointError: on all ranks.
    """
    found = []
    for folder in folders:
        seen = call_on_all_ranks(lambda folder=folder: named_steps(folder))  # type: ignore[misc]
        other = next((rank for rank, steps in enumerate(seen) if steps != seen[0]), None)
        if other is not None:
            words = [f"rank {rank} finds {', '.join(map(str, seen[rank][-SHOWN:])) or 'none'}" for rank in (0, other)]
            raise CheckpointError(
                f"{folder}: the ranks do not see the same checkpoints ({', '.join(words)}); "
                "give a folder that all machines share"
            )
        found += [(step, folder) for step in seen[0]]
    return sorted(found, key=lambda pair: pair[0])
