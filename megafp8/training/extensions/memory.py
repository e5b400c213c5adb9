"""Memory between steps: Python's garbage (`--manual-gc`) and the allocator's cache (`--empty-unused-memory-level`)."""

from __future__ import annotations

import gc
from typing import Optional

from megafp8.training.extension import Extension, LoopState, is_multiple
from megafp8.training.step import StepResult


class GarbageCollection(Extension):
    """With `--manual-gc`, collects on all ranks at the same step, so that no rank waits for another's collection."""

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
