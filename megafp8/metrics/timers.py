"""How long a step and its parts take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Optional


class StepTimer:
    """A clock for one step after another, with named parts.

    Each `start` begins a new step and forgets the parts of the one before. A part that is entered several times in
    a step (once a microbatch, say) adds up.

    CUDA runs behind the host. `synchronize` is called before the clock is read at the ends of a step, so that the
    step's time is the device's; around parts only with `synchronize_spans`, since waiting there slows the step.
    Without it a part's time is the host's, and work still queued shows up in a later part.
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
            synchronize: waits for the device; None where there is nothing to wait for.
            clock: seconds, never going back.
        """
        self._synchronize = synchronize
        self._synchronize_spans = synchronize_spans
        self._clock = clock
        self._started: Optional[float] = None
        self._spans_ms: dict[str, float] = {}

    def start(self) -> None:
        """Begin a step."""
        self._spans_ms = {}
        self._started = self._read(self._synchronize is not None)

    def stop(self) -> float:
        """End the step that `start` began. Returns its milliseconds."""
        assert self._started is not None, "StepTimer.stop without start"
        elapsed_ms = (self._read(self._synchronize is not None) - self._started) * 1000
        self._started = None
        return elapsed_ms

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the block as part `name` of the present step; an exception passes through and counts as its end."""
        started = self._read(self._synchronize_spans)
        try:
            yield
        finally:
            elapsed_ms = (self._read(self._synchronize_spans) - started) * 1000
            self._spans_ms[name] = self._spans_ms.get(name, 0.0) + elapsed_ms

    @property
    def spans_ms(self) -> dict[str, float]:
        """Milliseconds of each part of the present or last step, in order of first use."""
        return dict(self._spans_ms)

    def _read(self, synchronize: bool) -> float:
        if synchronize and self._synchronize is not None:
            self._synchronize()
        return self._clock()
