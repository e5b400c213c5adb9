"""A number of a scaling report, with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from megafp8.reports.laws import interval


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; None without one."""

    value: float
    low: Optional[float] = None
    high: Optional[float] = None

    def text(self, pattern: str = "{:.3g}") -> str:
        """The number, and the interval in brackets."""
        if self.low is None or self.high is None:
            return pattern.format(self.value)
        return f"{pattern.format(self.value)} ({pattern.format(self.low)} to {pattern.format(self.high)})"


def estimate_of(value: float, replicates: Sequence[float]) -> Estimate:
    """A value with the interval of its replicates."""
    return Estimate(value, *map(float, interval(replicates) or ()))
