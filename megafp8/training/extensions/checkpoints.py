"""Checkpoints: when a run saves, asynchronous saves, and failed saves."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Optional

from megafp8.checkpoint.async_save import AsyncSave, AsyncSaver
from megafp8.checkpoint.directory import Retention, check_writable
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config.checkpoint_size import min_checkpoint_bytes
from megafp8.config.schema import CheckpointConfig, RunConfig
from megafp8.device.collective_errors import call_on_all_ranks, call_on_rank_0, lacks_memory
from megafp8.errors import CheckpointError, NumericsError
from megafp8.metrics.records import EventRecord
from megafp8.metrics.sinks import Sinks
from megafp8.metrics.timers import CHECKPOINTS
from megafp8.resilience import fault_injection
from megafp8.resilience.watchdog import AFTER_STEP
from megafp8.training.extension import Extension, LoopState, is_multiple
from megafp8.training.run import Run, checkpoint_folders, non_persistent_folder, run_folder
from megafp8.training.signals import is_stop_requested, record_stop_signals
from megafp8.training.step import StepResult
from megafp8.training.uploads import CheckpointUploads

# Shorter waits for an asynchronous save are not recorded.
MIN_REPORTED_WAIT_S = 0.1


def folder_due(config: RunConfig, step: int, is_last: bool) -> Optional[tuple[Path, Optional[Retention]]]:
    """Where a run saves after a step, if it does, and which checkpoints are kept there (None: all).

    At `--save-interval` and after the last step that is the folder of persistent checkpoints.
    """
    checkpoint = config.checkpoint
    folder, non_persistent = run_folder(config), non_persistent_folder(config)
    if folder is not None and (is_last or is_multiple(step, checkpoint.save_interval)):
        return folder, retention(checkpoint)
    if non_persistent is not None and is_multiple(step, checkpoint.non_persistent_save_interval):
        return non_persistent, Retention(1)
    return None


def retention(checkpoint: CheckpointConfig) -> Optional[Retention]:
    """The persistent checkpoints that are kept; None: all. --save-retain-interval keeps one newest by default."""
    if checkpoint.ckpt_keep is None and checkpoint.save_retain_interval is None:
        return None
    return Retention(checkpoint.ckpt_keep or 1, checkpoint.save_retain_interval)


def check_checkpoint_folders(run: Run) -> None:
    """Check before the first step that checkpoints can be written; all ranks call it.

    Raises:
        CheckpointError: on all ranks: they cannot.
    """
    num_bytes = min_checkpoint_bytes(run.config, run.vocab_size)
    for folder in checkpoint_folders(run.config):
        call_on_all_ranks(partial(check_writable, folder, num_bytes, run.rank_position.rank))


class Checkpoints(Extension):
    """Saves at the save intervals and before the run ends."""

    saver: CheckpointSaver

    def open(self, state: LoopState) -> None:
        self.saver = CheckpointSaver(state.run, state.sinks)
        self.saver.uploads.begin_pending(retention(state.run.config.checkpoint))

    def after_step(self, state: LoopState, result: StepResult) -> None:
        is_saved = self.saver.save(state.with_extensions(state.progress), state.is_last)
        if is_saved and not state.is_last and is_stop_requested(state.run):
            state.stop_reason = record_stop_signals(state.run.watchdog)  # no second save of this step is needed

    def close(self, state: LoopState, error: Optional[BaseException]) -> None:
        """Wait for an asynchronous save and for an upload, but not after an error that other ranks may not have.

        Raises:
            CheckpointError: the save failed.
        """
        if isinstance(error, NumericsError):  # raised on all ranks
            with suppress(CheckpointError):  # recorded, but not the error that ends the run
                self.saver.finish(is_last=False)
        elif error is None:
            self.saver.finish(is_last=True)
        state.saved_step = self.saver.saved_step


class AsyncSaves(Extension):
    """Polls an asynchronous save and an upload after each step."""

    def __init__(self, checkpoints: Checkpoints):
        self.checkpoints = checkpoints

    def after_step(self, state: LoopState, result: StepResult) -> None:
        self.checkpoints.saver.poll()


class CheckpointSaver:
    """Saves the checkpoints of a run and records the results; all ranks call its methods together.

    Attributes:
        saved_step: step of the newest complete checkpoint; None before the first.
    """

    def __init__(self, run: Run, sinks: Sinks):
        self._run, self._sinks = run, sinks
        self._num_failed, self._started = 0, 0.0
        self._under_way: Optional[AsyncSave] = None
        self._in_background: Optional[AsyncSaver] = None
        self.saved_step: Optional[int] = None
        self.uploads = CheckpointUploads(run, sinks)
        # Of the save that is under way. The folder is another one on each machine, where they share none.
        self._folder: Optional[Path] = None
        self._keep: Optional[Retention] = None
        self._incomplete: Optional[int] = None  # the step that is complete once all machines have uploaded their parts
        checkpoint = run.config.checkpoint
        if checkpoint.async_save:
            self._in_background = AsyncSaver(
                run.config, run.training_state, checkpoint.async_save_timeout, run.platform.device
            )

    def save(self, progress: Progress, is_last: bool, is_due: bool = False) -> bool:
        """Write a checkpoint if one is due, or start an asynchronous save after waiting for the one before.

        Args:
            is_last: the run ends after this step: also wait for the asynchronous save.
            is_due: write a persistent checkpoint, whatever the interval, and delete no older one.

        Returns:
            Whether this step is saved or being saved.

        Raises:
            CheckpointError: the save failed, and it was the run's last or exceeded `--ckpt-max-failures`.
            MemoryError: the same, for lack of memory.
        """
        due = folder_due(self._run.config, progress.step, is_last or is_due)
        if due is None:
            return False
        folder, keep = due
        with self._run.timer.span(CHECKPOINTS):
            self._save_to(folder, None if is_due else keep, progress, is_last)
        started = self._under_way and self._under_way.progress.step
        return progress.step in (self.saved_step, self._incomplete, started)

    def _save_to(self, folder: Path, keep: Optional[Retention], progress: Progress, is_last: bool) -> None:
        run = self._run
        self._wait_for_previous(progress.step, with_upload=folder == run_folder(run.config))
        self._sinks.flush()  # a run that resumes from here does not repeat the step
        run.watchdog.enter("save", progress.step)
        self._folder, self._keep, self._started = folder, keep, time.monotonic()
        chain = run.sample_chain
        samples = None if chain is None else call_on_rank_0(lambda: chain.record(progress.consumed_samples))
        is_divided = self.uploads.is_divided and folder == run_folder(run.config)
        try:
            if self._in_background is None:
                path = save_checkpoint(
                    folder, run.config, run.training_state, progress, samples, keep=keep, is_divided=is_divided
                )
                self._succeeded(progress.step, path)
            else:
                self._under_way = self._in_background.begin(folder, progress, samples, keep=keep, is_divided=is_divided)
        except CheckpointError as error:
            self._failed(progress.step, error, is_last)
        fault_injection.point("save.end")
        if is_last:
            self.finish(is_last)
        run.watchdog.enter(AFTER_STEP, progress.step)

    def poll(self) -> None:
        """Check after each step whether an asynchronous save has ended.

        Raises:
            CheckpointError: it failed and exceeded `--ckpt-max-failures`.
        """
        if self._under_way is not None:
            with self._run.timer.span(CHECKPOINTS):
                self._check(is_waiting=False, is_last=False)
        self.uploads.poll()

    def finish(self, is_last: bool, next_step: Optional[int] = None, with_upload: bool = True) -> None:
        """Wait for an asynchronous save, and for the upload of a checkpoint.

        Args:
            next_step: the step that is to be saved next, if any.
            with_upload: also wait for the upload; a non-persistent checkpoint needs not.

        Raises:
            CheckpointError: one failed, and it was the run's last or exceeded `--ckpt-max-failures`.
        """
        if self._under_way is not None:
            self._run.watchdog.enter("save", self._under_way.progress.step)
            self._check(is_waiting=True, is_last=is_last)
        if not with_upload or (uploaded := self.uploads.wait(next_step)) is None:
            return
        step, error = uploaded
        if error is None:
            self._num_failed = 0
            if self._incomplete is not None:
                self._complete(step)
        else:
            self._incomplete = None
            self._failed(step, CheckpointError(f"step {step} cannot be uploaded: {error}"), is_last)

    def _wait_for_previous(self, step: int, with_upload: bool) -> None:
        if self._under_way is None:
            self.finish(is_last=False, next_step=step, with_upload=with_upload)
            return
        previous_step, started = self._under_way.progress.step, time.monotonic()
        self.finish(is_last=False, next_step=step, with_upload=with_upload)
        waited_s = time.monotonic() - started
        if waited_s >= MIN_REPORTED_WAIT_S:
            detail = (
                f"waited {waited_s:.1f} s for the checkpoint of step {previous_step} to be written; increase "
                "--save-interval"
            )
            self._sinks.write(EventRecord(step=step, name="checkpoint late", detail=detail))

    def _check(self, is_waiting: bool, is_last: bool) -> None:
        assert self._under_way is not None
        step = self._under_way.progress.step
        try:
            path = self._under_way.poll(is_waiting)
        except CheckpointError as error:
            self._under_way = None
            assert self._in_background is not None
            self._in_background.forget()
            self._failed(step, error, is_last)
            return
        if path is not None:
            self._under_way = None
            self._succeeded(step, path)

    def _complete(self, step: int) -> None:
        """A checkpoint from which the run could resume is there."""
        self.saved_step, self._incomplete = step, None
        self._run.watchdog.saved(step)

    def _succeeded(self, step: int, path: Path) -> None:
        if not self.uploads.is_used:
            self._num_failed = 0
        seconds = f"{time.monotonic() - self._started:.1f} s"
        if self.uploads.is_divided and self._folder == run_folder(self._run.config):
            self._incomplete = step
            event = EventRecord(step=step, name="checkpoint written", detail=f"the parts of all machines, in {seconds}")
        else:
            self._complete(step)
            event = EventRecord(step=step, name="checkpoint saved", detail=f"{path} in {seconds}")
        self._sinks.write(event)
        self.uploads.begin(step, self._folder, self._keep)

    def _failed(self, step: int, error: CheckpointError, is_last: bool) -> None:
        self._num_failed += 1
        self._sinks.write(EventRecord(step=step, name="checkpoint failed", detail=str(error)))
        most = self._run.config.checkpoint.ckpt_max_failures
        if is_last or (most and self._num_failed >= most):
            count = "" if is_last else f"; {self._num_failed} consecutive saves failed (--ckpt-max-failures {most})"
            kind = MemoryError if lacks_memory(error.__cause__) else CheckpointError
            raise kind(f"{error}{count}") from error
        if self._run.rank_position.rank == 0:
            print(f"megafp8: {error}; training continues without this checkpoint", file=sys.stderr, flush=True)
