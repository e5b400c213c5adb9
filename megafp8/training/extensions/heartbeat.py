"""Heartbeat: reports each step to the watchdog of this rank."""

from __future__ import annotations

from megafp8.resilience.watchdog import AFTER_STEP, STEP
from megafp8.training.extension import Extension, LoopState
from megafp8.training.step import StepResult


class Heartbeat(Extension):
    """Reports to the guard when a step starts and when it is complete."""

    def before_step(self, state: LoopState) -> None:
        state.run.guard.enter(STEP, state.step + 1)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        state.run.guard.enter(AFTER_STEP, state.step)
        state.run.guard.step_done(state.step)
