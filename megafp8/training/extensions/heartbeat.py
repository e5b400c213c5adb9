"""Heartbeat: the guard of this rank watches the time of each step, and records which steps are done."""

from __future__ import annotations

from megafp8.resilience.watchdog import BETWEEN, STEP
from megafp8.training.extension import Extension, LoopState
from megafp8.training.step import StepResult


class Heartbeat(Extension):
    """Reports to the guard when a step starts and when it is done."""

    def before_step(self, state: LoopState) -> None:
        state.run.guard.enter(STEP, state.step + 1)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        state.run.guard.enter(BETWEEN, state.step)
        state.run.guard.step_done(state.step)
