"""Validation at `--eval-interval`. That after the last step is the run's, not the loop's: `--skip-train` has it too."""

from __future__ import annotations

from megafp8.training.evaluation import validate
from megafp8.training.extension import Extension, LoopState, is_multiple
from megafp8.training.step import StepResult


class Validation(Extension):
    """Evaluates on the validation data, and first repeats a validation that a signal interrupted."""

    def open(self, state: LoopState) -> None:
        if not state.is_last and state.run.guard.is_evaluation_due(state.step):
            validate(state.run, state.sinks, state.progress)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        if is_multiple(state.step, state.run.config.training.eval_interval) and state.step < state.total_steps:
            validate(state.run, state.sinks, state.progress)
