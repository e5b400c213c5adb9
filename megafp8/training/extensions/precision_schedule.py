"""Records the changes of precision that `--fp8-schedule` makes; `precision_at` makes them, in each step."""

from __future__ import annotations

from megafp8.config.precision_options import is_quantized_at
from megafp8.config.schema import PrecisionConfig
from megafp8.metrics.records import EventRecord
from megafp8.training.extension import Extension, LoopState


class PrecisionSchedule(Extension):
    """Records a change of precision before the first step that has it."""

    def before_step(self, state: LoopState) -> None:
        precision, step = state.run.config.precision, state.step + 1
        if changes_at(precision, step):
            now = "quantized" if is_quantized_at(precision, step) else "high"
            detail = f"{now} from step {step} on"
            state.sinks.write(EventRecord(step=state.step, name="precision", detail=detail))


def changes_at(precision: PrecisionConfig, step: int) -> bool:
    """Whether a step is computed in another precision than the one before it; the first is 1."""
    return step > 1 and is_quantized_at(precision, step) != is_quantized_at(precision, step - 1)
