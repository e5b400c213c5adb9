"""Stop conditions: a run stops before its last step because of a flag or a signal."""

from __future__ import annotations

import time
from typing import Optional

from megafp8.metrics.records import EventRecord
from megafp8.training.extension import Extension, LoopState
from megafp8.training.run import run_folder
from megafp8.training.signals import any_rank, record_stop_signals
from megafp8.training.step import StepResult


class StopConditions(Extension):
    """Stops the loop before the run's last step, and records why."""

    def open(self, state: LoopState) -> None:
        """Stop if a signal interrupted a validation before the first step: the next start repeats that validation."""
        if state.run.guard.stop_agreed:
            state.stop_reason = record_stop_signals(state.run.guard)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        if state.step < state.total_steps:
            state.stop_reason = reason_to_stop(state)

    def close(self, state: LoopState, error: Optional[BaseException]) -> None:
        """Record the reason. Checkpoints are closed before, so that the saved step is known."""
        if error is not None or state.stop_reason is None:
            return
        saved = "nothing new is saved" if state.saved_step is None else f"saved at step {state.saved_step}"
        place = saved if run_folder(state.run.config) else "not saved (no --save)"
        state.sinks.write(EventRecord(step=state.step, name="stopped", detail=f"{state.stop_reason}, {place}"))


def reason_to_stop(state: LoopState) -> Optional[str]:
    """Why the run must save and stop now, the same on all ranks; None to continue."""
    run, training, guard = state.run, state.run.config.training, state.run.guard
    if guard.stop_agreed:
        return record_stop_signals(guard)
    reason = None
    if training.exit_interval and state.step % training.exit_interval == 0:
        reason = f"--exit-interval {training.exit_interval}"
    elif training.exit_duration_in_mins is not None:
        # Clocks differ between ranks: the first that exceeds the limit stops all.
        is_exceeded = time.monotonic() - state.started > 60 * training.exit_duration_in_mins
        if any_rank(run, is_exceeded):
            reason = f"--exit-duration-in-mins {training.exit_duration_in_mins}"
    if reason is not None:
        guard.outcome, guard.reason = "stopped", reason
    return reason
