"""Rollback to an earlier checkpoint after a bad step (`--spike-policy rollback`).

The run restarts from a checkpoint well before the spike and skips the batches before and during it, as PaLM's training
did (Chowdhery et al., arXiv:2204.02311, section 5.1). Skipped batches count as steps without an update: the run ends at
the same step with the same data, and its learning-rate schedule lags by the number of skipped steps.
`nonfinite/policy.py` decides whether a rollback is allowed.
"""

from __future__ import annotations

import dataclasses
from typing import Optional

from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.resume_point import choose_rollback_checkpoint, retire_abandoned
from megafp8.checkpoint.save import finish_param_gather
from megafp8.data.loader import describe_samples
from megafp8.errors import NumericsError
from megafp8.metrics.records import EventRecord
from megafp8.metrics.sinks import Sinks
from megafp8.training.extension import Extension, LoopState
from megafp8.training.extensions.checkpoints import Checkpoints
from megafp8.training.run import Run, checkpoint_folders
from megafp8.training.run_record import run_record
from megafp8.training.step import StepResult, progress_after_rollback


class Rollback(Extension):
    """Rolls back after a bad step, and records at the end which samples updated no weights."""

    def __init__(self, checkpoints: Checkpoints):
        self.checkpoints = checkpoints
        self.unsaved_step: Optional[int] = None  # to which a rollback went, until a checkpoint has it

    def recover(self, state: LoopState, error: NumericsError) -> bool:
        """Roll back, and save at once, so that a restart resumes from the new position.

        The rollback counts from the moment when this checkpoint is complete. Until then the checkpoints behind which it
        goes back stay: a restart resumes from the newest, comes to the bad step again, and rolls back.

        Raises:
            NumericsError: there is no checkpoint to return to.
        """
        run, saver = state.run, self.checkpoints.saver
        if not run.bad_steps.policy.is_rollback_allowed(state.progress.history):
            return False
        saver.finish(is_last=False)
        run.watchdog.enter("rollback", state.step + 1)
        progress = roll_back(run, state.sinks, state.progress, error)
        state.load_extensions(progress)
        is_last = progress.step == run.last_step(progress)
        saver.save(state.with_extensions(progress), is_last, is_due=True)
        saver.finish(is_last=False)
        state.move_to(progress)
        self.unsaved_step = progress.step
        self.retire_abandoned(state)
        return True

    def after_step(self, state: LoopState, result: StepResult) -> None:
        """Retire abandoned checkpoints after a later save, if that of the rollback failed."""
        self.retire_abandoned(state)

    def retire_abandoned(self, state: LoopState) -> None:
        """Retire the checkpoints behind which a rollback went back, once a newer one is complete."""
        if self.unsaved_step is None or (self.checkpoints.saver.saved_step or 0) < self.unsaved_step:
            return
        self.unsaved_step = None
        for folder in checkpoint_folders(state.run.config):
            for note in retire_abandoned(folder, state.progress.history):
                state.sinks.write(EventRecord(step=state.step, name="checkpoint", detail=note))

    def close(self, state: LoopState, error: Optional[BaseException]) -> None:
        """Record the samples skipped by rollbacks and by skipped updates."""
        if error is None and (summary := state.progress.history.summary()):
            state.sinks.write(EventRecord(step=state.step, name="skipped", detail=summary))


def roll_back(run: Run, sinks: Sinks, progress: Progress, error: NumericsError) -> Progress:
    """Load an earlier checkpoint into the run and skip batches; all ranks call it, while no save is under way.

    Args:
        progress: before the step that failed.
        error: of that step.

    Returns:
        The progress from which the run continues.

    Raises:
        NumericsError: there is no checkpoint to return to.
        CheckpointError: it cannot be loaded.
    """
    training, step = run.config.training, progress.step + 1
    folders = checkpoint_folders(run.config)
    finish_param_gather(run.config.parallel, run.training_state)
    with_hashes = run.config.checkpoint.ckpt_verify == "hash"
    chosen = choose_rollback_checkpoint(
        *folders, step=step - training.spike_rollback_steps, history=progress.history, with_hashes=with_hashes
    )
    if chosen is None:
        raise NumericsError(
            f"{error}\n--spike-policy rollback: {folders[0]} has no complete checkpoint yet; lower --save-interval"
        ) from error
    run.graph.reset()
    # The run's own checkpoint is loaded completely, whatever flags the run started with.
    checkpoint = dataclasses.replace(run.config.checkpoint, no_load_optim=False, no_load_rng=False)
    config = dataclasses.replace(run.config, checkpoint=checkpoint)
    loaded = load_checkpoint(chosen.path, config, run.training_state).progress
    num_batches = min(max(training.spike_skip_batches, step - chosen.step), run.last_step(loaded) - chosen.step)
    resumed = progress_after_rollback(run, progress, loaded, num_batches)
    sinks.write(run_record(run, chosen.step))
    cause = str(error).splitlines()[0].rstrip(":")
    past = (
        f"skipping {num_batches} batches ({describe_samples(range(loaded.consumed_samples, resumed.consumed_samples))})"
    )
    detail = f"to {chosen.path}, {past}, because of {cause}"
    sinks.write(EventRecord(step=chosen.step, name="rolled back", detail=detail))
    for note in chosen.notes:
        sinks.write(EventRecord(step=chosen.step, name="checkpoint", detail=note))
    for part in run.parts:
        part.after_load()
    return resumed
