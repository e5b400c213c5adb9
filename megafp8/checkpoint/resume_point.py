"""Choice of the checkpoint that a run resumes from or rolls back to: the newest intact one.

Damaged checkpoints are reported, and renamed in the run's own folder. Nothing is deleted here. A folder with damaged
checkpoints only is an error: the run does not restart from step 0.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Optional

from megafp8.checkpoint.directory import CORRUPT, RETIRED, checkpoint_path, find_checkpoint, list_steps, set_aside
from megafp8.checkpoint.foreign_folder import foreign_content
from megafp8.checkpoint.manifest import (
    FOLDER_NAME,
    MANIFEST,
    MAX_LISTED_PROBLEMS,
    check_complete,
    find_damage,
    read_manifest,
    summarize,
)
from megafp8.checkpoint.object_copies import object_copies
from megafp8.checkpoint.progress import ROLLBACK, SkipHistory
from megafp8.device.collective_errors import call_on_all_ranks, call_on_rank_0, rank_and_size
from megafp8.device.platform import local_rank, local_world_size
from megafp8.errors import CheckpointError
from megafp8.utils.object_store import url_of
from megafp8.utils.suggestions import did_you_mean


@dataclass(frozen=True)
class ResumePoint:
    """An intact checkpoint.

    Attributes:
        notes: newer checkpoints that are damaged, as text.
    """

    step: int
    path: Path
    notes: tuple[str, ...] = ()


def choose_checkpoint(
    *folders: Path, step: Optional[int] = None, with_hashes: bool = True, is_own: bool = False
) -> Optional[ResumePoint]:
    """Return the checkpoint of `step`, or the newest intact one; None if there is none. All ranks call it.

    A dry run calls it in one process, without a process group.

    Args:
        folders: any of them may hold the newest checkpoint.
        with_hashes: hash all files, divided among the ranks; otherwise those without tensors.
        is_own: the run also saves to these folders: rename damaged checkpoints to `.corrupt`.

    Raises:
        CheckpointError: on all ranks: the checkpoint of `step` is absent or damaged, all checkpoints are damaged, or
            the ranks do not see the same ones.
    """
    found = steps_on_all_ranks(folders)
    if step is not None:
        found = [pair for pair in found if pair[0] == step]
        if not found:
            find_checkpoint(folders[0], step)  # raises
    intact, damaged = first_intact(found[::-1], with_hashes)
    if intact is not None:
        return dataclasses.replace(intact, notes=set_damaged_aside(damaged, is_own))
    if not damaged:
        return None
    lines = "\n".join(f"  {path.name}: {text}" for path, text in damaged)
    where, which = " and ".join(map(str, folders)), f" of step {step}" if step else ""
    raise CheckpointError(f"{where} has no complete checkpoint{which}:\n{lines}")


def find_source(source: Path, step: Optional[int] = None, flag: str = "") -> ResumePoint:
    """Return the checkpoint that a command reads, after a line on standard error for each newer one that is damaged.

    Args:
        source: folder of a run or of one checkpoint.
        step: of the checkpoint; None is the newest intact one.
        flag: the flag that gives the folder and a space after it, for messages; empty without one.

    Raises:
        CheckpointError: there is none, or the one that is asked for is damaged.
    """
    try:
        if (copies := object_copies(source)) is not None:
            copies.download(step, is_own=False, with_hashes=True)
    except OSError as error:
        raise CheckpointError(f"{flag}{error}") from error
    if step is None and (FOLDER_NAME.fullmatch(source.resolve().name) or (source / MANIFEST).is_file()):
        check_complete(source)
        return ResumePoint(read_manifest(source).step, source)
    found = choose_checkpoint(source, step=step)
    if found is None:
        if source.exists():
            reason = foreign_content(source) or "holds no checkpoint; give the folder that a run had as --save"
        else:
            siblings = [path.name for path in source.parent.iterdir()] if source.parent.is_dir() else []
            reason = f"does not exist{did_you_mean(source.name, siblings)}"
        raise CheckpointError(f"{flag}{source} {reason}")
    for note in found.notes:
        print(f"warning: {note}", file=sys.stderr, flush=True)
    return found


def choose_rollback_checkpoint(
    *folders: Path, step: int, history: SkipHistory, with_hashes: bool = True
) -> Optional[ResumePoint]:
    """Return the newest intact checkpoint not newer than `step`, else the oldest intact one, else None.

    All ranks call it. The folders are the run's own.

    Args:
        history: of the run. What an earlier rollback abandoned is left out: it stays where the save of that one failed.

    Raises:
        CheckpointError: on all ranks: they do not see the same checkpoints.
    """
    found = steps_on_all_ranks(folders)
    found = call_on_rank_0(lambda: [(at, folder) for at, folder in found if not is_abandoned(folder, at, history)])
    older = [pair for pair in found if pair[0] <= step]
    newer = [pair for pair in found if pair[0] > step]
    intact, damaged = first_intact(older[::-1] + newer, with_hashes)
    return None if intact is None else dataclasses.replace(intact, notes=set_damaged_aside(damaged, is_own=True))


def first_intact(
    candidates: Sequence[tuple[int, Path]], with_hashes: bool
) -> tuple[Optional[ResumePoint], list[tuple[Path, str]]]:
    """Return the first intact checkpoint, and the damaged ones before it with their problems. All ranks call it."""
    damaged: list[tuple[Path, str]] = []
    for step, folder in candidates:
        path = checkpoint_path(folder, step)
        # Each rank hashes its part of the files; of copies from object storage, which each machine may have, the ranks
        # of a machine do. What one of them finds counts for all, so that all choose the same checkpoint.
        share = rank_and_size() if url_of(folder) is None else (local_rank(), local_world_size())
        by_rank = call_on_all_ranks(partial(find_damage, path, with_hashes, *share))
        problems = list(dict.fromkeys(chain.from_iterable(by_rank)))
        if not problems:
            return ResumePoint(step, path), damaged
        damaged.append((path, summarize(problems)))
    return None, damaged


def set_damaged_aside(damaged: list[tuple[Path, str]], is_own: bool) -> tuple[str, ...]:
    """Return notes on damaged checkpoints, and rename them if `is_own`."""
    notes = []
    for path, text in damaged:
        renamed = ""
        if is_own:
            renamed = f", renamed to {call_on_rank_0(partial(set_aside, path, CORRUPT)).name}"
        notes.append(f"{path} is damaged ({text}){renamed}; using the previous checkpoint")
    return tuple(notes)


def retire_newer(folder: Path, step: int) -> tuple[str, ...]:
    """Rename the checkpoints newer than `step` before a run resumes from it; return notes. All ranks call it."""
    return retire(folder, lambda _, each: f"is newer than step {step}" if each > step else "")


def retire_abandoned(folder: Path, history: SkipHistory) -> tuple[str, ...]:
    """Rename the checkpoints that rollbacks went back behind; return notes. All ranks call it.

    A checkpoint with the history must be complete. Without it, a restart needs those checkpoints to come to the bad
    step again, and the rollback would be lost.
    """

    def reason(folder: Path, step: int) -> str:
        return "was abandoned by a rollback" if is_abandoned(folder, step, history) else ""

    return retire(folder, reason)


def is_abandoned(folder: Path, step: int, history: SkipHistory) -> bool:
    """Return whether a rollback went back behind a checkpoint; false for one without a readable manifest."""
    ranges = [samples for samples in history.skipped if samples.reason == ROLLBACK]
    try:
        consumed = read_manifest(checkpoint_path(folder, step)).consumed_samples if ranges else 0
    except CheckpointError:
        return False  # damaged: it is never loaded
    return any(each.first < consumed < each.end for each in ranges)


def retire(folder: Path, reason: Callable[[Path, int], str]) -> tuple[str, ...]:
    """Rename the checkpoints for which there is a reason, by folder and step; return notes. All ranks call it."""

    def rename() -> list[str]:
        copies, local, notes = object_copies(folder), list_steps(folder), []
        remote = [] if copies is None else copies.complete_steps()
        for step in sorted({*local, *remote}):
            if not (text := reason(folder, step)):
                continue
            if copies is not None:
                copies.retire(step)  # first: a start would download it again
            name = set_aside(checkpoint_path(folder, step), RETIRED).name if step in local else RETIRED
            notes.append(f"{checkpoint_path(folder, step).name} {text}, renamed to {name}")
        return notes

    return tuple(call_on_rank_0(rename))


def steps_on_all_ranks(folders: tuple[Path, ...]) -> list[tuple[int, Path]]:
    """Return (step, folder) of all checkpoints, ascending by step. All ranks call it.

    If machines see different folders, some ranks would resume and others restart. Copies of what is in object storage
    may be in caches of different machines: those count that all have.

    Raises:
        CheckpointError: on all ranks: they do not see the same checkpoints.
    """
    found = []
    for folder in folders:
        by_rank = call_on_all_ranks(partial(list_steps, folder))
        if url_of(folder) is not None:
            by_rank = [sorted(set.intersection(*map(set, by_rank)))]
        other = next((rank for rank, steps in enumerate(by_rank) if steps != by_rank[0]), None)
        if other is not None:
            words = [
                f"rank {rank} finds {', '.join(map(str, by_rank[rank][-MAX_LISTED_PROBLEMS:])) or 'none'}"
                for rank in (0, other)
            ]
            raise CheckpointError(
                f"{folder}: the ranks see different checkpoints ({', '.join(words)}); use a folder shared by all "
                "machines"
            )
        found += [(step, folder) for step in by_rank[0]]
    return sorted(found, key=lambda pair: pair[0])
