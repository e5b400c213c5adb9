"""Resume: a run starts from the checkpoint that its flags select, or from step 0."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megafp8.checkpoint import compatibility
from megafp8.checkpoint.convert.megatron_folder import refuse_megatron_folder
from megafp8.checkpoint.directory import CORRUPT, clean_up, list_steps, set_aside
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import HIGH_PRECISION, SMOOTHED, MovedLinear, Progress
from megafp8.checkpoint.resume_point import ResumePoint, choose_checkpoint, retire_newer
from megafp8.config import derived, precision_map
from megafp8.config.schema import RunConfig
from megafp8.device.collective_errors import call_on_rank_0
from megafp8.errors import CheckpointError
from megafp8.resilience import fault_injection
from megafp8.training.run import Run, checkpoint_folders

# A checkpoint is set aside after so many consecutive crashes while it was being loaded.
MAX_CRASHED_LOADS = 2
FORMS = {HIGH_PRECISION: "in high precision", SMOOTHED: "smoothed"}


def resume(run: Run) -> tuple[Progress, tuple[str, ...]]:
    """Load the checkpoint that the configuration selects, if any; all ranks call it.

    Returns:
        The progress, and notes for the record.

    Raises:
        CheckpointError: a required checkpoint is missing, or it is of another model.
    """
    checkpoint = run.config.checkpoint
    weights_only, with_hashes = checkpoint.finetune, checkpoint.ckpt_verify == "hash"
    is_own = resumes_own_run(run.config)
    folders = [Path(checkpoint.load)] if checkpoint.load else []
    if is_own:
        folders += checkpoint_folders(run.config)[1:]
    for folder in folders:
        call_on_rank_0(partial(refuse_megatron_folder, folder))  # before anything in it is renamed
        if is_own:
            call_on_rank_0(partial(clean_up, folder))
    chosen = None
    if folders:
        chosen = choose_checkpoint(*folders, step=checkpoint.ckpt_step, with_hashes=with_hashes, is_own=is_own)
        if is_own and chosen is not None and checkpoint.ckpt_step is None:
            chosen = skip_crashing_checkpoint(run, chosen, folders, with_hashes)
    if chosen is None and checkpoint.load and checkpoint.exit_on_missing_checkpoint:
        raise CheckpointError(f"--load {checkpoint.load} has no checkpoint (--exit-on-missing-checkpoint)")
    if chosen is None and checkpoint.pretrained_checkpoint:
        call_on_rank_0(partial(refuse_megatron_folder, Path(checkpoint.pretrained_checkpoint)))
        chosen, weights_only = choose_checkpoint(Path(checkpoint.pretrained_checkpoint), with_hashes=with_hashes), True
        if chosen is None:
            raise CheckpointError(f"--pretrained-checkpoint {checkpoint.pretrained_checkpoint} has no checkpoint")
    if chosen is None:
        # A first start or a wrong folder: the note lets the user tell which.
        return Progress(), (f"no checkpoint in {checkpoint.load}: starting from step 0",) if checkpoint.load else ()
    compatibility.check_vocabulary(chosen.path, run.config, run.vocab_size)
    notes = chosen.notes
    continues_training = not (weights_only or run.config.training.skip_train)
    if continues_training:
        if run.sample_chain is not None:
            notes += compatibility.check_sample_order(chosen.path, run.sample_chain, checkpoint.override_sample_order)
        notes += compatibility.check_number_formats(chosen.path, run.config)
        notes += compatibility.thread_count_notes(chosen.path) if run.platform.kind == "cpu" else ()
    if is_own:
        run.guard.load_started(chosen.step)
        dist.barrier()  # rank 0 has written the run state before any rank may crash
    loaded = load_checkpoint(chosen.path, run.config, run.trainee, weights_only)
    run.guard.load_succeeded()
    fault_injection.point("load.end")
    if is_own and checkpoint.ckpt_step is not None and continues_training:
        for folder in folders:
            notes += retire_newer(folder, chosen.step)
    notes += change_linears(run, chosen.path, loaded.progress.history.moved_linears)
    return loaded.progress, (f"loaded {chosen.path}", *loaded.notes, *notes)


def change_linears(run: Run, path: Path, moved: tuple[MovedLinear, ...]) -> tuple[str, ...]:
    """Change the linears that the run of the checkpoint had changed; returns notes for the record.

    Raises:
        CheckpointError: the layers or the recipe of this run do not support the change.
    """
    precision = run.config.precision
    smoothed = [linear.name for linear in moved if linear.form == SMOOTHED]
    in_high_precision = [linear.name for linear in moved if linear.form != SMOOTHED]
    obstacles = (
        (smoothed, derived.is_stateful(precision), "smoothed", "delayed scaling does not support: use a recipe without "
         "amax history"),
        (smoothed, run.implementation == "local", "smoothed", "megatron-core's own layers do not support: remove "
         "--transformer-impl local"),
        (smoothed, precision.fp8_param_gather, "smoothed", "FP8 weights do not support: remove --fp8-param-gather"),
        (in_high_precision, precision.fp8_param_gather, "in high precision", "FP8 weights do not support: remove "
         "--fp8-param-gather"),
    )  # fmt: skip
    if not precision_map.is_quantized(precision):
        return ()
    for names, is_obstacle, form, reason in obstacles:
        if names and is_obstacle:
            raise CheckpointError(f"{path}: {names[0]} is {form}, which {reason}")
    run.change_linears(moved)
    return tuple(f"{linear.name} stays {FORMS[linear.form]}, since step {linear.step}" for linear in moved)


def skip_crashing_checkpoint(run: Run, chosen: ResumePoint, folders: list[Path], with_hashes: bool) -> ResumePoint:
    """The chosen checkpoint; if loading it crashed the run repeatedly, it is set aside and the one before is chosen."""
    failed, is_only = run.guard.failed_loads(chosen.step), sum(len(list_steps(folder)) for folder in folders) == 1
    if failed < MAX_CRASHED_LOADS or is_only:
        return chosen
    place = call_on_rank_0(lambda: set_aside(chosen.path, CORRUPT))
    before = choose_checkpoint(*folders, with_hashes=with_hashes, is_own=True)
    assert before is not None
    note = (
        f"{chosen.path}: {failed} starts crashed while loading it; renamed to {place.name}, using the previous "
        "checkpoint"
    )
    return dataclasses.replace(before, notes=(note, *before.notes))


def check_no_newer_checkpoint(run: Run, step: int) -> None:
    """Refuse to save into a folder with newer checkpoints, from which the next start would resume; all ranks call it.

    Args:
        step: at which the run starts.

    Raises:
        CheckpointError: on all ranks: the folder has newer checkpoints.
    """
    for folder in checkpoint_folders(run.config):
        steps = call_on_rank_0(partial(list_steps, folder))
        if steps and steps[-1] > step:
            raise CheckpointError(
                f"--save {folder} has a checkpoint of step {steps[-1]}, but this run starts at step {step}, so the "
                f"next start would resume from the wrong checkpoint. Use --load {run.config.checkpoint.save} to resume "
                "from it (with --ckpt-step N from an earlier step), or save to another folder"
            )


def resumes_own_run(config: RunConfig) -> bool:
    """Whether the run loads from the folder that it saves to."""
    save_to, load_from = config.checkpoint.save, config.checkpoint.load
    return bool(save_to and load_from and Path(save_to).resolve() == Path(load_from).resolve())
