"""When a run saves, and what becomes of a save that fails."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Optional

from megafp8 import faults
from megafp8.checkpoint.background import BackgroundSave, BackgroundSaves
from megafp8.checkpoint.save import save_checkpoint
from megafp8.checkpoint.state import Progress
from megafp8.errors import CheckpointError, NumericsError
from megafp8.telemetry.records import EventRecord
from megafp8.telemetry.sinks import Sinks
from megafp8.training.assemble import Run
from megafp8.training.phases import BETWEEN


def is_save_due(run: Run, step: int, total_steps: int, reason: Optional[str]) -> bool:
    """At the interval, at the end, and before stopping."""
    interval = run.config.checkpoint.save_interval
    return reason is not None or step == total_steps or bool(interval and step % interval == 0)


@contextmanager
def saving(run: Run, sinks: Sinks, folder: Optional[Path]) -> Iterator[Saver]:
    """Within, a run saves. At the end, also at one with bad numbers, a save that is under way is waited for.

    Raises:
        CheckpointError: the one that was waited for failed.
    """
    saver = Saver(run, sinks, folder)
    try:
        yield saver
    except NumericsError:  # all ranks have it, so all come here
        saver.finish(is_last=False)
        raise
    saver.finish(is_last=True)


class Saver:
    """Saves a run's checkpoints and records what becomes of them; all ranks call its methods together.

    Args:
        folder: None for a run that saves nothing.

    Attributes:
        saved_step: of the newest checkpoint that is there; None before.
    """

    def __init__(self, run: Run, sinks: Sinks, folder: Optional[Path]):
        self._run, self._sinks, self._folder = run, sinks, folder
        self._num_failed, self._began = 0, 0.0
        self._under_way: Optional[BackgroundSave] = None
        self._in_background: Optional[BackgroundSaves] = None
        self.saved_step: Optional[int] = None
        checkpoint = run.config.checkpoint
        if folder is not None and checkpoint.async_save:
            self._in_background = BackgroundSaves(
                folder, run.config, run.trainee, checkpoint.async_save_timeout, run.platform.device
            )

    def save(self, progress: Progress, is_last: bool) -> None:
        """Write a checkpoint, or begin to.

        A save before that is still under way is waited for: skipping one of the two would lose it.

        Args:
            is_last: the run ends after it, so that it must be there when this returns.

        Raises:
            CheckpointError: it could not be written, and was the last one of the run or one too many.
        """
        if self._folder is None:
            return
        self._finish_late_one(progress.step)
        self._began = time.monotonic()
        run = self._run
        run.guard.enter("save", progress.step)
        samples = None if run.sample_chain is None else run.sample_chain.mark(progress.consumed_samples)
        try:
            if self._in_background is None:
                path = save_checkpoint(self._folder, run.config, run.trainee, progress, samples)
                self._succeeded(progress.step, path)
            else:
                self._under_way = self._in_background.begin(progress, samples)
        except CheckpointError as error:
            self._failed(progress.step, error, is_last)
        faults.point("save.end")
        if is_last:
            self.finish(is_last)
        run.guard.enter(BETWEEN, progress.step)

    def poll(self) -> None:
        """After each step: see whether a save that is under way has ended.

        Raises:
            CheckpointError: it has failed, as one too many.
        """
        if self._under_way is not None:
            self._look(is_waiting=False, is_last=False)

    def finish(self, is_last: bool) -> None:
        """Wait until a save that is under way has ended.

        Raises:
            CheckpointError: it has failed, and was the last one of the run or one too many.
        """
        if self._under_way is not None:
            self._look(is_waiting=True, is_last=is_last)

    def _finish_late_one(self, step: int) -> None:
        if self._under_way is None:
            return
        late, began = self._under_way.progress.step, time.monotonic()
        self.finish(is_last=False)
        waited = f"waited {time.monotonic() - began:.1f} s for the checkpoint of step {late}: save less often"
        self._sinks.write(EventRecord(step=step, name="checkpoint late", detail=waited))

    def _look(self, is_waiting: bool, is_last: bool) -> None:
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
        detail = f"{path} in {time.monotonic() - self._began:.1f} s"
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
