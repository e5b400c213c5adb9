"""Records of the changes of precision by `--fp8-schedule`. `Run.set_precision` makes them."""

from __future__ import annotations

from megafp8.config.precision_schedule import phase_at
from megafp8.config.schema import PrecisionConfig
from megafp8.metrics.records import EventRecord
from megafp8.recipes.base import HIGH_PRECISION
from megafp8.training.extension import Extension, LoopState


class PrecisionSchedule(Extension):
    """Records a change of precision before the first step in it."""

    def before_step(self, state: LoopState) -> None:
        precision, step = state.run.config.precision, state.step + 1
        if changes_at(precision, step):
            phase = phase_at(precision, step)
            assert phase is not None
            now = f"quantized, {phase}" if phase.entries else "quantized" if phase.is_quantized else HIGH_PRECISION
            detail = f"{now}, starting at step {step}"
            state.sinks.write(EventRecord(step=state.step, name="precision", detail=detail))


def changes_at(precision: PrecisionConfig, step: int) -> bool:
    """Whether a step has another precision than the one before it. Steps count from 1."""
    return step > 1 and phase_at(precision, step) != phase_at(precision, step - 1)
