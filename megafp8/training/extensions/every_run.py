"""What every run does between its steps: reports to the watchdog, validates, collects garbage, and stops early."""

from __future__ import annotations

import gc
import time
from typing import Optional

from megafp8.metrics.records import EventRecord
from megafp8.metrics.timers import VALIDATION
from megafp8.resilience.watchdog import AFTER_STEP, STEP
from megafp8.training.evaluation import validate
from megafp8.training.extension import Extension, LoopState, is_multiple
from megafp8.training.run import run_folder
from megafp8.training.signals import any_rank, record_stop_signals
from megafp8.training.step import StepResult

# ---- Memory between steps: garbage collection (`--manual-gc`) and the cache of CUDA's allocator ---------------------


class GarbageCollection(Extension):
    """Collects garbage on all ranks at the same step (`--manual-gc`), so that ranks do not wait for each other.

    Also empties the allocator's cache after every step (`--empty-unused-memory-level 2`).
    """

    def open(self, state: LoopState) -> None:
        if state.run.config.training.manual_gc:
            gc.disable()

    def after_step(self, state: LoopState, result: StepResult) -> None:
        training = state.run.config.training
        if training.manual_gc and is_multiple(state.step, training.manual_gc_interval):
            gc.collect()
        if training.empty_unused_memory_level >= 2:
            state.run.platform.free_cache()

    def close(self, state: LoopState, error: Optional[BaseException]) -> None:
        if state.run.config.training.manual_gc:
            gc.enable()


# ---------------------------------------------------------------------------------------------------------------------
# Validation at `--eval-interval`. `pretrain.py` makes the one after the last step, also under `--skip-train`


class Validation(Extension):
    """Evaluates on the validation data, and repeats a validation that a signal interrupted before."""

    def open(self, state: LoopState) -> None:
        if not state.is_last and state.run.watchdog.is_evaluation_due(state.step):
            validate(state.run, state.sinks, state.progress)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        training = state.run.config.training
        is_early = state.step < (training.start_eval_at_iter or 0)
        if is_multiple(state.step, training.eval_interval) and not is_early and state.step < state.total_steps:
            with state.run.timer.span(VALIDATION):
                validate(state.run, state.sinks, state.progress)


# ---- Heartbeat: reports each step to the watchdog of this rank ------------------------------------------------------


class Heartbeat(Extension):
    """Reports to the watchdog when a step starts and when it is complete.

    The automatic time limit of a step follows from recent steps, and grows with the batch size.
    """

    batch_size: Optional[int] = None

    def before_step(self, state: LoopState) -> None:
        before, self.batch_size = self.batch_size, state.run.batch_size_at(state.progress.consumed_samples)
        if before is not None and self.batch_size > before:
            state.run.watchdog.phases.expect_longer_steps(self.batch_size / before)
        state.run.watchdog.enter(STEP, state.step + 1)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        state.run.watchdog.enter(AFTER_STEP, state.step)
        state.run.watchdog.step_done(state.step)


# ----------------------------------------------------------------------------------------------------------------------


class StopConditions(Extension):
    """Stops the loop before the run's last step, and records why."""

    def open(self, state: LoopState) -> None:
        """Stop if a signal interrupted a validation before the first step: the next start repeats that validation."""
        if state.run.watchdog.stop_agreed:
            state.stop_reason = record_stop_signals(state.run.watchdog)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        if state.step < state.total_steps:
            state.stop_reason = reason_to_stop(state)

    def close(self, state: LoopState, error: Optional[BaseException]) -> None:
        """Record the reason. Checkpoints are closed before, so that the saved step is known."""
        if error is not None or state.stop_reason is None:
            return
        saved = "nothing new is saved" if state.saved_step is None else f"saved at step {state.saved_step}"
        outcome = saved if run_folder(state.run.config) else "not saved (no --save)"
        state.sinks.write(EventRecord(step=state.step, name="stopped", detail=f"{state.stop_reason}, {outcome}"))


def reason_to_stop(state: LoopState) -> Optional[str]:
    """Why the run must save and stop now, the same on all ranks; None to continue."""
    run, training, watchdog = state.run, state.run.config.training, state.run.watchdog
    if watchdog.stop_agreed:
        return record_stop_signals(watchdog)
    reason = None
    if training.exit_interval and state.step % training.exit_interval == 0:
        reason = f"--exit-interval {training.exit_interval}"
    elif training.exit_duration_in_mins is not None:
        # Clocks differ between ranks: the first that exceeds the limit stops all.
        is_exceeded = time.monotonic() - state.started > 60 * training.exit_duration_in_mins
        if any_rank(run, is_exceeded):
            reason = f"--exit-duration-in-mins {training.exit_duration_in_mins}"
    if reason is not None:
        watchdog.outcome, watchdog.reason = "stopped", reason
    return reason
