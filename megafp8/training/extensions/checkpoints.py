"""Checkpoints: when a run saves, asynchronous saves, and what happens when a save fails."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megafp8.checkpoint.async_save import BackgroundSave, BackgroundSaves
from megafp8.checkpoint.directory import probe
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config import derived, model_shapes
from megafp8.config.schema import RunConfig
from megafp8.device.collective_errors import call_on_all_ranks
from megafp8.errors import CheckpointError, NumericsError
from megafp8.metrics.records import EventRecord
from megafp8.metrics.sinks import Sinks
from megafp8.resilience import fault_injection
from megafp8.resilience.watchdog import BETWEEN
from megafp8.training.extension import Extension, LoopState, is_multiple
from megafp8.training.run import Run, non_persistent_folder, run_folder
from megafp8.training.signals import is_asked_to_stop, stopped_by_signals
from megafp8.training.step import StepResult

# Shorter waits for a save that is under way are not recorded.
REPORTED_S = 0.1


@dataclass(frozen=True)
class Series:
    """A series of checkpoints: their folder, and how many of the newest are kept (None: all)."""

    folder: Path
    keep: Optional[int]


def series_due(config: RunConfig, step: int, is_last: bool) -> Optional[Series]:
    """Which checkpoint a run writes after a step: one to keep at the interval and before it ends, or a second kind."""
    checkpoint = config.checkpoint
    folder, second = run_folder(config), non_persistent_folder(config)
    if folder is not None and (is_last or is_multiple(step, checkpoint.save_interval)):
        return Series(folder, checkpoint.ckpt_keep)
    if second is not None and is_multiple(step, checkpoint.non_persistent_save_interval):
        return Series(second, 1)
    return None


def check_folders(run: Run) -> None:
    """Find out before the first step whether checkpoints can be written; all ranks call it.

    Raises:
        CheckpointError: on all ranks.
    """
    num_bytes = least_bytes(run)
    for folder in (run_folder(run.config), non_persistent_folder(run.config)):
        if folder is not None:
            call_on_all_ranks(lambda folder=folder: probe(folder, num_bytes, run.place.rank))  # type: ignore[misc]


def least_bytes(run: Run) -> int:
    """Bytes that the weights, master weights and moments in a checkpoint have at least."""
    config, settings = run.config, run.config.optimizer
    weight = 4 if derived.params_dtype(config.precision) == "fp32" else 2
    if not config.checkpoint.no_save_optim:
        weight += 8 if settings.optimizer == "adam" else 0
        weight += 4 if derived.params_dtype(config.precision) != "fp32" else 0
    return weight * model_shapes.count_parameters(config.model, run.vocab_size).total


class Checkpoints(Extension):
    """Saves at `--save-interval` and before the run ends."""

    saver: Saver

    def open(self, state: LoopState) -> None:
        self.saver = Saver(state.run, state.sinks)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        is_saved = self.saver.save(state.progress, state.is_last)
        if is_saved and not state.is_last and is_asked_to_stop(state.run):
            state.stop_reason = stopped_by_signals(state.run.guard)  # what is saved need not be saved again

    def close(self, state: LoopState, error: Optional[BaseException]) -> None:
        """Wait for a save that is under way; not after errors that other ranks may not have.

        Raises:
            CheckpointError: it failed.
        """
        if isinstance(error, NumericsError):  # all ranks have it
            with suppress(CheckpointError):  # it is recorded, and not why the run ends
                self.saver.finish(is_last=False)
        elif error is None:
            self.saver.finish(is_last=True)
        state.saved_step = self.saver.saved_step


class AsyncSaves(Extension):
    """Asks once a step whether an asynchronous save is done."""

    def __init__(self, checkpoints: Checkpoints):
        self.checkpoints = checkpoints

    def after_step(self, state: LoopState, result: StepResult) -> None:
        self.checkpoints.saver.poll()


class Saver:
    """Saves a run's checkpoints and records whether they succeed; all ranks call its methods together.

    Attributes:
        saved_step: of the newest checkpoint that is there; None before.
    """

    def __init__(self, run: Run, sinks: Sinks):
        self._run, self._sinks = run, sinks
        self._num_failed, self._started = 0, 0.0
        self._under_way: Optional[BackgroundSave] = None
        self._in_background: Optional[BackgroundSaves] = None
        self.saved_step: Optional[int] = None
        checkpoint = run.config.checkpoint
        if checkpoint.async_save:
            self._in_background = BackgroundSaves(
                run.config, run.trainee, checkpoint.async_save_timeout, run.platform.device
            )

    def save(self, progress: Progress, is_last: bool, is_due: bool = False) -> bool:
        """Write a checkpoint if one is due, or start an asynchronous save.

        A save before that is still under way is waited for: skipping one of the two would lose it.

        Args:
            is_last: the run ends after it, so that it must be there when this returns.
            is_due: write one to keep, whatever the interval.

        Returns:
            Whether this step is saved, or being saved.

        Raises:
            CheckpointError: it could not be written, and was the last one of the run or one too many.
        """
        series = series_due(self._run.config, progress.step, is_last or is_due)
        if series is None:
            return False
        run = self._run
        self._finish_late_one(progress.step)
        run.guard.enter("save", progress.step)
        self._started = time.monotonic()
        samples = None if run.sample_chain is None else run.sample_chain.mark(progress.consumed_samples)
        try:
            if self._in_background is None:
                path = save_checkpoint(series.folder, run.config, run.trainee, progress, samples, keep=series.keep)
                self._succeeded(progress.step, path)
            else:
                self._under_way = self._in_background.begin(series.folder, progress, samples, keep=series.keep)
        except CheckpointError as error:
            self._failed(progress.step, error, is_last)
        fault_injection.point("save.end")
        if is_last:
            self.finish(is_last)
        run.guard.enter(BETWEEN, progress.step)
        return progress.step in (self.saved_step, self._under_way and self._under_way.progress.step)

    def poll(self) -> None:
        """After each step: see whether a save that is under way has ended.

        Raises:
            CheckpointError: it has failed, as one too many.
        """
        if self._under_way is not None:
            self._check(is_waiting=False, is_last=False)

    def finish(self, is_last: bool) -> None:
        """Wait until a save that is under way has ended.

        Raises:
            CheckpointError: it has failed, and was the last one of the run or one too many.
        """
        if self._under_way is not None:
            self._run.guard.enter("save", self._under_way.progress.step)
            self._check(is_waiting=True, is_last=is_last)

    def _finish_late_one(self, step: int) -> None:
        if self._under_way is None:
            return
        late, started = self._under_way.progress.step, time.monotonic()
        self.finish(is_last=False)
        waited_s = time.monotonic() - started
        if waited_s >= REPORTED_S:
            detail = f"waited {waited_s:.1f} s for the checkpoint of step {late}: save less often"
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

    def _succeeded(self, step: int, path: Path) -> None:
        self._num_failed, self.saved_step = 0, step
        self._run.guard.saved(step)
        detail = f"{path} in {time.monotonic() - self._started:.1f} s"
        self._sinks.write(EventRecord(step=step, name="checkpoint saved", detail=detail))

    def _failed(self, step: int, error: CheckpointError, is_last: bool) -> None:
        self._num_failed += 1
        self._sinks.write(EventRecord(step=step, name="checkpoint failed", detail=str(error)))
        if is_last:
            raise error
        most = self._run.config.checkpoint.ckpt_max_failures
        if most and self._num_failed >= most:
            raise CheckpointError(f"{error}; {self._num_failed} saves in a row failed (--ckpt-max-failures {most})")
        if self._run.place.rank == 0:
            print(f"megafp8: {error}; training goes on without it", file=sys.stderr, flush=True)
