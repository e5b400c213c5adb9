"""What a rank is doing and since when, and how long that may take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Optional

# Before the first step: an index over a large corpus may take hours, and meeting the other ranks has its own timeout.
START = "start"
STEP, EVALUATION, BETWEEN = "step", "evaluation batch", "what follows step"
# The first of a kind compiles kernels and connects ranks.
FIRST_S, FIRST_FACTOR = 1800.0, 5.0
# Without a limit that was asked for: so many times the slowest of the last, and never less than so long.
AUTO_FACTOR, AUTO_LEAST_S, REMEMBERED = 5.0, 120.0, 50


class Phase(NamedTuple):
    """What is being done.

    Attributes:
        name: `step`, `evaluation batch`, or anything else.
        step: the training step that it belongs to.
        began: by the clock.
    """

    name: str
    step: Optional[int]
    began: float


class Phases:
    """The clock of one rank. The training thread enters phases, another thread reads.

    Args:
        step_limit_s: of a step and of a batch of an evaluation; None: from those before; 0: none.
        other_limit_s: of anything else but the start, such as a save; 0: none.
        clock: seconds, never going back.
    """

    def __init__(
        self, step_limit_s: Optional[float], other_limit_s: float, clock: Callable[[], float] = time.monotonic
    ):
        self.step_limit_s, self.other_limit_s, self.clock = step_limit_s, other_limit_s, clock
        self.present = Phase(START, None, clock())
        self.excused_s = 0.0
        self.recent = {name: deque[float](maxlen=REMEMBERED) for name in (STEP, EVALUATION)}

    def enter(self, name: str, step: Optional[int] = None) -> None:
        """Begin something, which ends what was before."""
        before, now = self.present, self.clock()
        if before.name in self.recent:
            self.recent[before.name].append(now - before.began)
        self.present, self.excused_s = Phase(name, step, now), 0.0

    def excuse(self, seconds: float) -> None:
        """Do not count time in which the whole process was stopped."""
        self.excused_s += seconds

    def limit_s(self, name: str) -> Optional[float]:
        """How long something may take; None without a limit."""
        recent = self.recent.get(name)
        if name == START:
            return None
        if recent is None:
            return self.other_limit_s or None
        if self.step_limit_s is not None:
            return self.step_limit_s * (1.0 if recent else FIRST_FACTOR) or None
        return max(AUTO_LEAST_S, AUTO_FACTOR * max(recent)) if recent else FIRST_S

    def left_s(self) -> Optional[float]:
        """Seconds until the present phase has taken too long; None without a limit."""
        present = self.present
        limit_s = self.limit_s(present.name)
        return None if limit_s is None else present.began + self.excused_s + limit_s - self.clock()

    def __str__(self) -> str:
        name, step, began = self.present
        where = name if step is None else f"{name} {step}" if name in (STEP, BETWEEN) else f"{name} at step {step}"
        return f"{where}, for {self.clock() - began:.1f} s"
