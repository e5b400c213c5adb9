"""The progress of a run after a step or a rollback, with what was skipped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Optional

from megafp8.checkpoint.progress import ROLLBACK, Progress, SkippedSamples
from megafp8.nonfinite.policy import BadStep
from megafp8.training.run import Run


def progress_after_step(
    run: Run,
    progress: Progress,
    bad_step: Optional[BadStep],
    values: Optional[tuple[float, float]],
    changed: Mapping[str, Any] = MappingProxyType({}),
) -> Progress:
    """The progress after a step.

    Args:
        bad_step: why its update was skipped, if it was.
        values: loss and gradient norm of a step that updated the weights; None where the loss scale overflowed.
        changed: further fields that the step changes.
    """
    step, history = progress.step + 1, progress.history
    consumed = progress.consumed_samples + run.batch_size_at(progress.consumed_samples)
    if bad_step is not None:
        history = history.after_skip(SkippedSamples(progress.consumed_samples, consumed, step, bad_step.reason))
        history = history.after_fallback(bad_step.fallbacks)
    elif values is not None:
        history = history.after_update(run.bad_steps.policy.spikes.after_update(history.window, *values))
    else:
        history = history.after_overflow()
    return dataclasses.replace(progress, step=step, consumed_samples=consumed, history=history, **changed)


def progress_after_rollback(run: Run, failed: Progress, loaded: Progress, num_batches: int) -> Progress:
    """The progress after a rollback past some global batches, which count as steps without an update.

    Args:
        failed: before the step that failed.
        loaded: that of the checkpoint.
    """
    end = run.batch_schedule.advance(num_batches, loaded.consumed_samples)
    skipped = SkippedSamples(loaded.consumed_samples, end, failed.step + 1, ROLLBACK)
    history = dataclasses.replace(
        loaded.history,
        skipped=(*loaded.history.skipped, skipped),
        num_in_row=0,
        num_rollbacks=failed.history.num_rollbacks + 1,
        moved_linears=failed.history.moved_linears,  # they stay in high precision
    )
    return dataclasses.replace(loaded, step=loaded.step + num_batches, consumed_samples=end, history=history)
