"""Where a run starts: from a checkpoint that its flags select, or from step 0."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch.distributed as dist

from megafp8.checkpoint.compatibility import (
    check_same_formats,
    check_same_samples,
    check_same_vocabulary,
    notes_on_threads,
)
from megafp8.checkpoint.directory import (
    CORRUPT,
    ResumePoint,
    choose_checkpoint,
    named_steps,
    retire_newer,
    set_aside,
    sweep,
)
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.config.schema import RunConfig
from megafp8.device.collective_errors import on_rank_0
from megafp8.errors import CheckpointError
from megafp8.resilience import fault_injection
from megafp8.training.run import Run, non_persistent_folder, run_folder

# Crashes in a row while a checkpoint is loaded, after which it is set aside.
DEADLY_LOADS = 2


def resume(run: Run) -> tuple[Progress, tuple[str, ...]]:
    """Load the checkpoint that the configuration selects, if any: the progress, and notes for the record.

    Raises:
        CheckpointError: a checkpoint that must be there is not, or is of another model.
    """
    checkpoint = run.config.checkpoint
    weights_only, with_hashes = checkpoint.finetune, checkpoint.ckpt_verify == "hash"
    is_own = saves_where_it_loads(run.config)
    second = non_persistent_folder(run.config) if is_own else None
    folders = [Path(checkpoint.load), *([second] if second else [])] if checkpoint.load else []
    for folder in folders if is_own else ():
        on_rank_0(lambda folder=folder: sweep(folder))  # type: ignore[misc]
    chosen = None
    if folders:
        chosen = choose_checkpoint(*folders, step=checkpoint.ckpt_step, with_hashes=with_hashes, is_own=is_own)
        if is_own and chosen is not None and checkpoint.ckpt_step is None:
            chosen = without_deadly(run, chosen, folders, with_hashes)
    if chosen is None and checkpoint.load and checkpoint.exit_on_missing_checkpoint:
        raise CheckpointError(f"--load {checkpoint.load} holds no checkpoint (--exit-on-missing-checkpoint)")
    if chosen is None and checkpoint.pretrained_checkpoint:
        chosen, weights_only = choose_checkpoint(Path(checkpoint.pretrained_checkpoint), with_hashes=with_hashes), True
        if chosen is None:
            raise CheckpointError(f"--pretrained-checkpoint {checkpoint.pretrained_checkpoint} holds no checkpoint")
    if chosen is None:
        # A first start, or a wrong folder: only the user can tell.
        return Progress(), (f"{checkpoint.load} holds none: starts anew",) if checkpoint.load else ()
    check_same_vocabulary(chosen.path, run.config, run.vocab_size)
    notes = chosen.notes
    if not (weights_only or run.config.training.skip_train) and run.sample_chain is not None:
        notes += check_same_samples(chosen.path, run.sample_chain, checkpoint.override_sample_order)
    if not (weights_only or run.config.training.skip_train):
        notes += check_same_formats(chosen.path, run.config)
        notes += notes_on_threads(chosen.path) if run.platform.kind == "cpu" else ()
    if is_own:
        run.guard.loads(chosen.step)
        dist.barrier()  # rank 0 has it on the disk before any rank may crash
    loaded = load_checkpoint(chosen.path, run.config, run.trainee, weights_only)
    run.guard.loaded()
    fault_injection.point("load.end")
    if is_own and checkpoint.ckpt_step is not None and not (weights_only or run.config.training.skip_train):
        for folder in folders:
            notes += retire_newer(folder, chosen.step)
    return loaded.progress, (f"loaded {chosen.path}", *loaded.notes, *notes)


def without_deadly(run: Run, chosen: ResumePoint, folders: list[Path], with_hashes: bool) -> ResumePoint:
    """The choice, or the one before when loading it has crashed the run several times; that is then set aside."""
    failed, is_only = run.guard.failed_loads(chosen.step), sum(len(named_steps(folder)) for folder in folders) == 1
    if failed < DEADLY_LOADS or is_only:
        return chosen
    place = on_rank_0(lambda: set_aside(chosen.path, CORRUPT))
    before = choose_checkpoint(*folders, with_hashes=with_hashes, is_own=True)
    assert before is not None
    note = f"{chosen.path}: {failed} starts crashed while they loaded it, now {place.name}: the one before is used"
    return dataclasses.replace(before, notes=(note, *before.notes))


def check_nothing_newer(run: Run, step: int) -> None:
    """Refuse to write checkpoints beside newer ones: the next start would resume from those. All ranks call it.

    Args:
        step: at which the run starts.

    Raises:
        CheckpointError: on all ranks: there are newer ones where the run saves.
    """
    for folder in (run_folder(run.config), non_persistent_folder(run.config)):
        newer = [] if folder is None else on_rank_0(lambda folder=folder: named_steps(folder))  # type: ignore[misc]
        if newer and newer[-1] > step:
            raise CheckpointError(
                f"--save {folder} holds a checkpoint of step {newer[-1]}, and this run begins at step {step}: the next "
                f"start would go on from that one. Give --load {run.config.checkpoint.save} to go on from it, with "
                "--ckpt-step N to go back in it, or save to another folder"
            )


def saves_where_it_loads(config: RunConfig) -> bool:
    """Whether the folder to resume from is this run's own."""
    save_to, load_from = config.checkpoint.save, config.checkpoint.load
    return bool(save_to and load_from and Path(save_to).resolve() == Path(load_from).resolve())
