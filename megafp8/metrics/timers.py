"""Timers of a training step and its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Optional


class StepTimer:
    """Times steps and named parts of a step.

    Each `start` begins a new step and clears the parts. If a part is entered several times in a step, for example once
    per microbatch, its times add up.

    All times are of the host: work that is queued on a GPU counts where the host waits for it.

    Args:
        clock: monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._started: Optional[float] = None
        self._spans_ms: dict[str, float] = {}

    def start(self) -> None:
        """Start a step."""
        self._spans_ms = {}
        self._started = self._clock()

    def stop(self) -> float:
        """Stop the step and return its time in milliseconds."""
        assert self._started is not None, "StepTimer.stop without start"
        elapsed_ms = (self._clock() - self._started) * 1000
        self._started = None
        return elapsed_ms

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the block as part `name` of the current step, also if it raises."""
        started = self._clock()
        try:
            yield
        finally:
            elapsed_ms = (self._clock() - started) * 1000
            self._spans_ms[name] = self._spans_ms.get(name, 0.0) + elapsed_ms

    @property
    def spans_ms(self) -> dict[str, float]:
        """Milliseconds of each part of the current or last step, in order of first use."""
        return dict(self._spans_ms)
