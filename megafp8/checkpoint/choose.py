"""Which checkpoint a run goes on from: the newest whole one.

Damaged ones are named, and set aside in a run's own folder. Nothing is deleted here, and a folder in which every
checkpoint is damaged is an error and not a new start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch.distributed as dist

from megafp8.checkpoint.folder import CORRUPT, RETIRED, checkpoint_path, find_checkpoint, named_steps, set_aside
from megafp8.checkpoint.manifest import SHOWN, damage_seen, listed
from megafp8.checkpoint.together import on_rank_0, together
from megafp8.errors import CheckpointError


@dataclass(frozen=True)
class Choice:
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
) -> Optional[Choice]:
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
    whole, damaged = first_whole(seen[::-1], with_hashes)
    if whole is not None:
        return dataclasses.replace(whole, notes=passed_over(damaged, is_own))
    if not damaged:
        return None
    lines = "\n".join(f"  {path.name}: {text}" for path, text in damaged)
    where, which = " and ".join(map(str, folders)), f" of step {step}" if step else ""
    raise CheckpointError(f"{where} holds no whole checkpoint{which}:\n{lines}")


def choose_to_go_back(*folders: Path, step: int, with_hashes: bool = True) -> Optional[Choice]:
    """The newest whole checkpoint of the run's own folders that is not newer than `step`, else the oldest whole one;
    None when there is none. All ranks call it.

    Raises:
        CheckpointError: on all ranks: they do not see the same checkpoints.
    """
    seen = seen_by_all(folders)
    old, young = ([pair for pair in seen if is_old == (pair[0] <= step)] for is_old in (True, False))
    whole, damaged = first_whole(old[::-1] + young, with_hashes)
    return None if whole is None else dataclasses.replace(whole, notes=passed_over(damaged, is_own=True))


def first_whole(
    seen: Sequence[tuple[int, Path]], with_hashes: bool
) -> tuple[Optional[Choice], list[tuple[Path, str]]]:
    """The first whole checkpoint of some steps and folders, and the damaged ones before it with what is wrong."""
    damaged: list[tuple[Path, str]] = []
    for step, folder in seen:
        path = checkpoint_path(folder, step)
        problems = damage(path, with_hashes)
        if not problems:
            return Choice(step, path), damaged
        damaged.append((path, listed(problems)))
    return None, damaged


def damage(path: Path, with_hashes: bool = True) -> list[str]:
    """What is wrong with a checkpoint, the same on all ranks; empty if it is whole. All ranks call it."""
    seen = together(lambda: damage_seen(path, with_hashes, dist.get_rank(), dist.get_world_size()))
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
        seen = together(lambda folder=folder: named_steps(folder))  # type: ignore[misc]
        other = next((rank for rank, steps in enumerate(seen) if steps != seen[0]), None)
        if other is not None:
            words = [f"rank {rank} finds {', '.join(map(str, seen[rank][-SHOWN:])) or 'none'}" for rank in (0, other)]
            raise CheckpointError(
                f"{folder}: the ranks do not see the same checkpoints ({', '.join(words)}); "
                "give a folder that all machines share"
            )
        found += [(step, folder) for step in seen[0]]
    return sorted(found, key=lambda pair: pair[0])
