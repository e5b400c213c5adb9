"""Rollback to a checkpoint when loss or gradients spike, and past the batches that led there.

As in PaLM's training: restart from a checkpoint well before the spike, and leave out some hundred batches, those before
and during the spike among them. The batches that are left out count as steps without an update, so that the run still
ends at its step, with its data, and its schedule is behind by so many steps.
"""

from __future__ import annotations

import dataclasses
from typing import Optional

from megafp8.checkpoint.directory import choose_to_go_back, retire_newer
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import ROLLBACK, Progress, SkippedSamples
from megafp8.checkpoint.save import sync_parameters
from megafp8.config.schema import RunConfig
from megafp8.data.loader import describe_samples
from megafp8.errors import NumericsError
from megafp8.metrics.records import EventRecord
from megafp8.metrics.sinks import Sinks
from megafp8.training.extension import Extension, LoopState
from megafp8.training.extensions.checkpoints import Checkpoints
from megafp8.training.run import Run, non_persistent_folder, run_folder
from megafp8.training.run_record import run_record


class Rollback(Extension):
    """Returns to a checkpoint after bad numbers where `--spike-policy rollback` asks for it."""

    def __init__(self, checkpoints: Checkpoints):
        self.checkpoints = checkpoints

    def recover(self, state: LoopState, error: NumericsError) -> bool:
        """Roll back, and save at once, so that a run that is stopped now resumes from there.

        Raises:
            NumericsError: there is no checkpoint to return to.
        """
        run, saver = state.run, self.checkpoints.saver
        if not may_roll_back(run, state.progress):
            return False
        saver.finish(is_last=False)
        run.guard.enter("rollback", state.step + 1)
        progress = roll_back(run, state.sinks, state.progress, state.total_steps, error)
        saver.save(progress, is_last=progress.step == state.total_steps, is_due=True)
        state.move_to(progress)
        return True

    def close(self, state: LoopState, error: Optional[BaseException]) -> None:
        """Record the samples that changed no weight, by rollbacks and by skipped updates."""
        if error is None and (summary := state.progress.history.summary()):
            state.sinks.write(EventRecord(step=state.step, name="skipped", detail=summary))


def may_roll_back(run: Run, progress: Progress) -> bool:
    """Whether a run that cannot make its next step may roll back."""
    training = run.config.training
    return training.spike_policy == "rollback" and progress.history.num_rollbacks < training.max_rollbacks


def roll_back(run: Run, sinks: Sinks, progress: Progress, total_steps: int, error: NumericsError) -> Progress:
    """Load a checkpoint into the run and skip batches; all ranks call it.

    Args:
        progress: before the step that failed; no checkpoint is being written.
        error: what was wrong with the step.

    Returns:
        Where the run continues.

    Raises:
        NumericsError: there is no checkpoint to return to.
        CheckpointError: it cannot be loaded.
    """
    training, step = run.config.training, progress.step + 1
    folders = [folder for folder in (run_folder(run.config), non_persistent_folder(run.config)) if folder]
    sync_parameters(run.config, run.trainee)
    with_hashes = run.config.checkpoint.ckpt_verify == "hash"
    chosen = choose_to_go_back(*folders, step=step - training.spike_rollback_steps, with_hashes=with_hashes)
    if chosen is None:
        raise NumericsError(
            f"{error}\n--spike-policy rollback: {folders[0]} holds no whole checkpoint yet; lower --save-interval"
        ) from error
    if run.graph is not None:
        run.graph.forget()
    loaded = load_checkpoint(chosen.path, loading_all(run.config), run.trainee).progress
    notes = (*chosen.notes, *(note for folder in folders for note in retire_newer(folder, chosen.step)))
    num_batches = min(max(training.spike_skip_batches, step - chosen.step), total_steps - chosen.step)
    first = loaded.consumed_samples
    end = first + num_batches * run.global_batch_size
    history = dataclasses.replace(
        loaded.history,
        skipped=(*loaded.history.skipped, SkippedSamples(first, end, step, ROLLBACK)),
        num_in_row=0,
        num_rollbacks=progress.history.num_rollbacks + 1,
    )
    sinks.write(run_record(run, chosen.step))
    cause = str(error).splitlines()[0].rstrip(":")
    past = f"past {num_batches} batches ({describe_samples(range(first, end))})"
    detail = f"to {chosen.path}, {past}, because of {cause}"
    sinks.write(EventRecord(step=chosen.step, name="rolled back", detail=detail))
    for note in notes:
        sinks.write(EventRecord(step=chosen.step, name="checkpoint", detail=note))
    if run.traffic is not None:
        run.traffic.take()  # none of it is the next step's
    return Progress(chosen.step + num_batches, end, history)


def loading_all(config: RunConfig) -> RunConfig:
    """The settings under which everything of the run's own checkpoint is loaded, whatever it first started from."""
    checkpoint = dataclasses.replace(config.checkpoint, no_load_optim=False, no_load_rng=False)
    return dataclasses.replace(config, checkpoint=checkpoint)
