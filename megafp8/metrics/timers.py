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

    CUDA runs asynchronously. `synchronize` is called before the clock is read at both ends of a step, so that the step
    time is that of the device. Around parts it is called only with `synchronize_spans`, since that slows the step down.
    Without it, parts have host times, and queued work counts in a later part.
    """

    def __init__(
        self,
        *,
        synchronize: Optional[Callable[[], None]] = None,
        synchronize_spans: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """
        Args:
            synchronize: waits for the device; None without an asynchronous device.
            clock: monotonic, in seconds.
        """
        self._synchronize = synchronize
        self._synchronize_spans = synchronize_spans
        self._clock = clock
        self._started: Optional[float] = None
        self._spans_ms: dict[str, float] = {}

    def start(self) -> None:
        """Start a step."""
        self._spans_ms = {}
        self._started = self._read(self._synchronize is not None)

    def stop(self) -> float:
        """Stop the step and return its time in milliseconds."""
        assert self._started is not None, "StepTimer.stop without start"
        elapsed_ms = (self._read(self._synchronize is not None) - self._started) * 1000
        self._started = None
        return elapsed_ms

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the block as part `name` of the current step, also if it raises."""
        started = self._read(self._synchronize_spans)
        try:
            yield
        finally:
            elapsed_ms = (self._read(self._synchronize_spans) - started) * 1000
            self._spans_ms[name] = self._spans_ms.get(name, 0.0) + elapsed_ms

    @property
    def spans_ms(self) -> dict[str, float]:
        """Milliseconds of each part of the current or last step, in order of first use."""
        return dict(self._spans_ms)

    def _read(self, synchronize: bool) -> float:
        if synchronize and self._synchronize is not None:
            self._synchronize()
        return self._clock()
