"""Memory between steps: garbage collection (`--manual-gc`) and the cache of CUDA's allocator."""

from __future__ import annotations

import gc
from typing import Optional

from megafp8.training.extension import Extension, LoopState, is_multiple
from megafp8.training.step import StepResult


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
