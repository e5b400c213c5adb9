"""Heartbeat: reports each step to the watchdog of this rank."""

from __future__ import annotations

from typing import Optional

from megafp8.resilience.watchdog import AFTER_STEP, STEP
from megafp8.training.extension import Extension, LoopState
from megafp8.training.step import StepResult


class Heartbeat(Extension):
    """Reports to the guard when a step starts and when it is complete.

    The automatic time limit of a step follows from recent steps, and grows with the batch size.
    """

    batch_size: Optional[int] = None

    def before_step(self, state: LoopState) -> None:
        before, self.batch_size = self.batch_size, state.run.batch_size_at(state.progress.consumed_samples)
        if before is not None and self.batch_size > before:
            state.run.guard.phases.expect_longer_steps(self.batch_size / before)
        state.run.guard.enter(STEP, state.step + 1)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        state.run.guard.enter(AFTER_STEP, state.step)
        state.run.guard.step_done(state.step)
