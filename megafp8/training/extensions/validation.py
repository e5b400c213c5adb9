"""Validation at `--eval-interval`. `pretrain.py` makes the one after the last step, also under `--skip-train`."""

from __future__ import annotations

from megafp8.metrics.timers import VALIDATION
from megafp8.training.evaluation import validate
from megafp8.training.extension import Extension, LoopState, is_multiple
from megafp8.training.step import StepResult


class Validation(Extension):
    """Evaluates on the validation data, and repeats a validation that a signal interrupted before."""

    def open(self, state: LoopState) -> None:
        if not state.is_last and state.run.guard.is_evaluation_due(state.step):
            validate(state.run, state.sinks, state.progress)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        training = state.run.config.training
        is_early = state.step < (training.start_eval_at_iter or 0)
        if is_multiple(state.step, training.eval_interval) and not is_early and state.step < state.total_steps:
            with state.run.timer.span(VALIDATION):
                validate(state.run, state.sinks, state.progress)
