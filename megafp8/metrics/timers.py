"""Timers of a training step, its parts, and what happens between steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Optional

RECORDS = "records"
"""The part of a step in which the host makes and writes records."""
DATA_WAIT = "data-wait"
"""The part of a step in which the host waits for a batch."""
BETWEEN_STEPS = (VALIDATION, CHECKPOINTS, REPLICA_CHECK, CALIBRATION, PROFILE, SAMPLES, ROLLBACK) = (
    "validation", "checkpoints", "replica check", "calibration", "profile", "samples", "rollback",
)  # fmt: skip
"""Spans that are in the time of no step."""


class StepTimes(NamedTuple):
    """Where the time since the end of the previous step went, in milliseconds: `step_ms` and `between_ms` are all.

    Attributes:
        step_ms: the step, also what has no name.
        spans_ms: its named parts.
        between_ms: spans of `BETWEEN_STEPS`.
    """

    step_ms: float
    spans_ms: dict[str, float]
    between_ms: dict[str, float]


class StepTimer:
    """Divides the time from the end of one step to the end of the next into the step, its parts, and other spans.

    At every moment one span is timed, the innermost one: its time is not in the spans around it. The times of spans
    with the same name add up.

    All times are of the host: work that is queued on a GPU counts where the host waits for it.

    Args:
        clock: monotonic, in seconds.

    Attributes:
        new_range: a context around each named span, from its name; a profile sets it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self.new_range: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self._current: Optional[str] = None
        self.start()

    def start(self) -> None:
        """Start the first step: what was timed before counts for none."""
        self._spent_ms: dict[Optional[str], float] = {}
        self._counted_until = self._clock()

    def end_step(self) -> StepTimes:
        """End a step and start the next one."""
        self._count()
        spent, self._spent_ms = self._spent_ms, {}
        between = {name: spent.pop(name) for name in BETWEEN_STEPS if name in spent}
        step_ms = sum(spent.values())
        return StepTimes(step_ms, {name: ms for name, ms in spent.items() if name is not None}, between)

    def set_aside(self, name: str) -> None:
        """Count what the current step took so far as a span of `BETWEEN_STEPS`, since the step has to be repeated."""
        times = self.end_step()
        for each, ms in (*times.between_ms.items(), (name, times.step_ms)):
            self._spent_ms[each] = self._spent_ms.get(each, 0.0) + ms

    @contextmanager
    def span(self, name: Optional[str]) -> Iterator[None]:
        """Time the block as `name`, also if it raises; None: as the step."""
        self._count()
        outer, self._current = self._current, name
        try:
            with nullcontext() if name is None else self.new_range(name):
                yield
        finally:
            self._count()
            self._current = outer

    def _count(self) -> None:
        now = self._clock()
        spent_ms = self._spent_ms.get(self._current, 0.0) + (now - self._counted_until) * 1000
        self._spent_ms[self._current], self._counted_until = spent_ms, now
