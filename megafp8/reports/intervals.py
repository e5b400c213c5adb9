"""What a few seeds allow to say about a mean, and the verdict that follows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np

CONFIDENCE = 0.95
WITHIN, BEYOND, UNDECIDED = "within", "beyond", "not decided"
CONTROL = "control"
"""In the place of a verdict: what lies between a control and the baseline is noise, and held to no bound."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its confidence interval. `low`, `high` and `spread` are None for a single value, which has none.

    Attributes:
        spread: standard deviation of the values, with n - 1.
    """

    mean: float
    low: Optional[float] = None
    high: Optional[float] = None
    spread: Optional[float] = None

    @property
    def half_width(self) -> Optional[float]:
        """Half of the interval's width."""
        return None if self.high is None else self.high - self.mean


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Student's t interval of the mean: mean +- t((1 + confidence) / 2, n - 1) s / sqrt(n).

    It takes the values for independent draws from a normal distribution. With three of them it is 2.48 s wide to both
    sides: few seeds decide little, and it says so.

    Args:
        values: at least one. Any that is not finite makes mean and interval NaN.
        confidence: share of such intervals that hold the true mean; above 0, below 1.
    """
    numbers = np.asarray(values, dtype=np.float64)
    mean = float(numbers.mean())
    if len(numbers) < 2:
        return Interval(mean=mean)
    spread = float(numbers.std(ddof=1)) if np.isfinite(numbers).all() else math.nan
    half = student_quantile(confidence, len(numbers) - 1) * spread / math.sqrt(len(numbers))
    return Interval(mean=mean, low=mean - half, high=mean + half, spread=spread)


def student_quantile(confidence: float, freedom: float) -> float:
    """Half the width of Student's t interval in standard errors: 4.30 for 95% with 2 degrees of freedom."""
    from scipy.special import stdtrit  # scipy.stats has it too, and takes seconds to import

    return float(stdtrit(freedom, (1 + confidence) / 2))


def judge(gap: Interval, bound: float) -> str:
    """Whether a gap stays within a bound: the whole interval has to be on one side of it.

    A single value has no interval and decides nothing. A gap that is not finite, a run that diverged, is beyond.
    """
    if not math.isfinite(gap.mean):
        return BEYOND
    if gap.low is None or gap.high is None:
        return UNDECIDED
    if gap.high <= bound:
        return WITHIN
    return BEYOND if gap.low > bound else UNDECIDED
