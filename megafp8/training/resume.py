"""Resume: a run starts from the checkpoint that its flags select, or from step 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Optional

import torch.distributed as dist

from megafp8.checkpoint import compatibility
from megafp8.checkpoint.directory import CORRUPT, clean_up, list_steps, set_aside
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.megatron_lm import refuse_megatron_folder
from megafp8.checkpoint.metadata import load_common_state, read_config, skip_history
from megafp8.checkpoint.object_copies import object_copies
from megafp8.checkpoint.progress import HIGH_PRECISION, SMOOTHED, HighPrecisionFallback, Progress
from megafp8.checkpoint.resume_point import ResumePoint, choose_checkpoint, retire_abandoned, retire_newer
from megafp8.config import derived, precision_map, settings
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.schema import PrecisionConfig, RunConfig
from megafp8.device.collective_errors import call_on_all_ranks, call_on_rank_0
from megafp8.errors import CheckpointError
from megafp8.resilience import fault_injection
from megafp8.training.run import Run, checkpoint_folders
from megafp8.training.uploads import download_checkpoints, newest_step
from megafp8.utils.object_store import url_of

# A checkpoint is set aside after so many consecutive crashes while it was being loaded.
MAX_CRASHED_LOADS = 2
START_FROM_0 = "starting from step 0 (--exit-on-missing-checkpoint makes this an error)"
FORMS = {HIGH_PRECISION: "in high precision", SMOOTHED: "smoothed"}


def resume(run: Run) -> tuple[Progress, tuple[str, ...]]:
    """Load the checkpoint that the configuration selects, if any; all ranks call it.

    Returns:
        The progress, and notes for the record.

    Raises:
        CheckpointError: a required checkpoint is missing, or it is of another model.
    """
    checkpoint, is_own = run.config.checkpoint, resumes_own_run(run.config)
    chosen, weights_only = select_checkpoint(run.config, checkpoint.ckpt_verify == "hash", is_own)
    if chosen is None:
        # A first start or a wrong folder: the note lets the user tell which.
        return Progress(), (f"no checkpoint in {checkpoint.load}: {START_FROM_0}",) if checkpoint.load else ()
    folders = load_folders(run.config)
    if is_own and checkpoint.ckpt_step is None and chosen.path.parent in folders:
        chosen = skip_crashing_checkpoint(run, chosen, folders, checkpoint.ckpt_verify == "hash")
    notes = chosen.notes + check_model_and_formats(
        run.config, run.rank_position.world_size, run.vocab_size, chosen.path, weights_only
    )
    continues_training = not (weights_only or run.config.training.skip_train)
    if continues_training:
        if run.sample_chain is not None:
            notes += compatibility.check_sample_order(chosen.path, run.sample_chain, checkpoint.override_sample_order)
        notes += compatibility.thread_count_notes(chosen.path) if run.platform.kind == "cpu" else ()
    if is_own:
        run.watchdog.load_started(chosen.step)
        dist.barrier()  # rank 0 has written the run state before any rank may crash
    loaded = load_checkpoint(chosen.path, run.config, run.training_state, weights_only)
    run.watchdog.load_succeeded()
    fault_injection.point("load.end")
    if is_own and continues_training:
        for folder in folders:
            notes += () if checkpoint.ckpt_step is None else retire_newer(folder, chosen.step)
            notes += retire_abandoned(folder, loaded.progress.history)  # a kill may have come before
    notes += change_linears(run, chosen.path, loaded.progress.history.moved_linears)
    return loaded.progress, (f"loaded {chosen.path}", *loaded.notes, *notes)


def preview(
    config: RunConfig, world_size: int, implementation: LayerBackend, vocab_size: int
) -> tuple[Optional[ResumePoint], bool]:
    """The checkpoint that a start would load, after the checks that need no ranks; renames nothing.

    Not checked are the hashes of files with tensors, the order of samples, the learning-rate schedule and the names of
    tensors.

    Args:
        vocab_size: padded number of rows of the embedding.

    Returns:
        The checkpoint, None to start from step 0, and whether only its weights are loaded.

    Raises:
        CheckpointError: as `resume`, or the run would save into a folder with newer checkpoints.
    """
    chosen, weights_only = select_checkpoint(config, with_hashes=False, is_own=False)
    if chosen is not None:
        notes = chosen.notes + check_model_and_formats(config, world_size, vocab_size, chosen.path, weights_only)
        chosen = dataclasses.replace(chosen, notes=notes)
        common = load_common_state(chosen.path)
        with_optimizer = not (weights_only or config.checkpoint.no_load_optim)
        compatibility.check_settings(chosen.path, settings.from_json(common["config"]), config, with_optimizer)
        if precision_map.is_quantized(config.precision) and not weights_only:
            fallbacks = skip_history(common).moved_linears
            check_fallbacks(config.precision, implementation, chosen.path, fallbacks)
    # A run that continues its own checkpoint first renames newer ones, which are damaged or after --ckpt-step.
    if not (config.training.skip_train or (resumes_own_run(config) and not weights_only)):
        check_no_newer_checkpoint(config, 0 if chosen is None or weights_only else chosen.step)
    return chosen, weights_only


def load_folders(config: RunConfig) -> list[Path]:
    """The folders any of which may have the checkpoint to resume from."""
    folders = [Path(config.checkpoint.load)] if config.checkpoint.load else []
    return folders + (checkpoint_folders(config)[1:] if resumes_own_run(config) else [])


def select_checkpoint(config: RunConfig, with_hashes: bool, is_own: bool) -> tuple[Optional[ResumePoint], bool]:
    """The checkpoint that the flags select, and whether only its weights are loaded; all ranks call it.

    Args:
        with_hashes: hash all files to find damage, otherwise those without tensors.
        is_own: rename damaged checkpoints, and remove what killed saves left.

    Raises:
        CheckpointError: a required checkpoint is missing, or Megatron-LM's.
    """
    checkpoint, folders, chosen = config.checkpoint, load_folders(config), None
    for folder in folders:
        call_on_rank_0(partial(refuse_megatron_folder, folder))  # before anything in it is renamed
        if is_own:
            call_on_rank_0(partial(clean_up, folder))
    if folders:
        choose = partial(choose_checkpoint, step=checkpoint.ckpt_step, with_hashes=with_hashes, is_own=is_own)
        chosen = choose_again(config, partial(choose, *folders), can_download=with_hashes or is_own)
    if chosen is None and checkpoint.load and checkpoint.exit_on_missing_checkpoint:
        raise CheckpointError(f"--load {checkpoint.load} has no checkpoint (--exit-on-missing-checkpoint)")
    if chosen is not None or not checkpoint.pretrained_checkpoint:
        return chosen, checkpoint.finetune
    pretrained = Path(checkpoint.pretrained_checkpoint)
    call_on_rank_0(partial(refuse_megatron_folder, pretrained))
    chosen = choose_checkpoint(pretrained, with_hashes=with_hashes)
    if chosen is None:
        raise CheckpointError(f"--pretrained-checkpoint {pretrained} has no checkpoint: give the --save of a run")
    return chosen, True


def choose_again(
    config: RunConfig, choose: Callable[[], Optional[ResumePoint]], can_download: bool
) -> Optional[ResumePoint]:
    """Choose a checkpoint; if a local copy of one in object storage is damaged, after it is downloaded again."""
    is_copy = config.checkpoint.load is not None and url_of(config.checkpoint.load) is not None
    if not (can_download and is_copy):
        return choose()
    try:
        chosen = choose()
        if chosen is None or not chosen.notes:
            return chosen
        notes = chosen.notes
    except CheckpointError as error:  # all local ones are damaged
        notes = (str(error),)
    call_on_all_ranks(partial(download_checkpoints, config.checkpoint, with_hashes=True))
    chosen = choose()
    return None if chosen is None else dataclasses.replace(chosen, notes=(*notes, *chosen.notes))


def check_model_and_formats(
    config: RunConfig, world_size: int, vocab_size: int, path: Path, weights_only: bool
) -> tuple[str, ...]:
    """Check model and vocabulary, and the number formats if the run continues that of the checkpoint; returns notes.

    Raises:
        CheckpointError: they differ.
    """
    compatibility.check_model(path, read_config(path), config, vocab_size)
    continues_training = not (weights_only or config.training.skip_train)
    sections = config.model, config.precision, config.checkpoint
    notes = compatibility.check_number_formats(path, *sections) if continues_training else ()
    return notes + compatibility.changed_settings(path, config, world_size, not continues_training)


def change_linears(run: Run, path: Path, fallbacks: tuple[HighPrecisionFallback, ...]) -> tuple[str, ...]:
    """Change the linears that the run of the checkpoint had changed; returns notes for the record.

    Raises:
        CheckpointError: the layers or the recipe of this run do not support the change.
    """
    if not precision_map.is_quantized(run.config.precision):
        return ()
    check_fallbacks(run.config.precision, run.implementation, path, fallbacks)
    run.change_linears(fallbacks)
    return tuple(f"{linear.name} stays {FORMS[linear.form]}, since step {linear.step}" for linear in fallbacks)


def check_fallbacks(
    precision: PrecisionConfig, implementation: LayerBackend, path: Path, fallbacks: tuple[HighPrecisionFallback, ...]
) -> None:
    """Check that a run can change the linears that the run of the checkpoint had changed.

    Raises:
        CheckpointError: its layers or recipe do not support the change.
    """
    smoothed = [linear.name for linear in fallbacks if linear.form == SMOOTHED]
    in_high_precision = [linear.name for linear in fallbacks if linear.form != SMOOTHED]
    problems = (
        (smoothed, derived.is_stateful(precision), "smoothed", "delayed scaling does not support: use a recipe without "
         "amax history"),
        (smoothed, not implementation.quantizes, "smoothed", "megatron-core's own layers do not support: remove "
         "--transformer-impl local"),
        (smoothed, precision.fp8_param_gather, "smoothed", "FP8 weights do not support: remove --fp8-param-gather"),
        (in_high_precision, precision.fp8_param_gather, "in high precision", "FP8 weights do not support: remove "
         "--fp8-param-gather"),
    )  # fmt: skip
    for names, is_problem, form, reason in problems:
        if names and is_problem:
            raise CheckpointError(f"{path}: {names[0]} is {form}, which {reason}")


def skip_crashing_checkpoint(run: Run, chosen: ResumePoint, folders: list[Path], with_hashes: bool) -> ResumePoint:
    """The chosen checkpoint; if loading it crashed the run repeatedly, it is set aside and the one before is chosen."""
    failed, is_only = run.watchdog.failed_loads(chosen.step), sum(len(list_steps(folder)) for folder in folders) == 1
    if failed < MAX_CRASHED_LOADS or is_only:
        return chosen
    if (copies := object_copies(chosen.path.parent)) is not None:
        call_on_rank_0(lambda: copies.retire(chosen.step))  # first: a start would download it again
    renamed = call_on_rank_0(lambda: set_aside(chosen.path, CORRUPT))
    before = choose_checkpoint(*folders, with_hashes=with_hashes, is_own=True)
    assert before is not None
    note = (
        f"{chosen.path}: {failed} starts crashed while loading it; renamed to {renamed.name}, using the previous "
        "checkpoint"
    )
    return dataclasses.replace(before, notes=(note, *before.notes))


def check_no_newer_checkpoint(config: RunConfig, step: int) -> None:
    """Refuse to save into a folder with newer checkpoints, from which the next start would resume; all ranks call it.

    Args:
        step: at which the run starts.

    Raises:
        CheckpointError: on all ranks: the folder has newer checkpoints.
    """
    for folder in checkpoint_folders(config):
        newest = call_on_rank_0(lambda: max([*list_steps(folder), newest_step(folder) or 0], default=0))  # noqa: B023
        if newest > step:
            raise CheckpointError(
                f"--save {url_of(folder) or folder} has a checkpoint of step {newest}, but this run starts at step "
                f"{step}, so the next start would resume from the wrong checkpoint. Use --load "
                f"{config.checkpoint.save} to resume from it (with --ckpt-step N from an earlier step), or save to "
                "another folder"
            )


def resumes_own_run(config: RunConfig) -> bool:
    """Whether the run loads from the folder that it saves to."""
    save_to, load_from = config.checkpoint.save, config.checkpoint.load
    return bool(save_to and load_from and Path(save_to).resolve() == Path(load_from).resolve())
