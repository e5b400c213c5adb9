"""What a few seeds allow to say about a mean, and the verdict that follows from it.

A recipe's curves over its seeds: the mean, and how far the seeds lie apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np

from megafp8.analysis.pairing import Pair
from megafp8.analysis.runs import LoadedRun

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


SMOOTHING_FRACTION = 1 / 25
MS_PER_S = 1000.0


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line with a band around it. All of shape [points], float64; NaN where nothing is known.

    Attributes:
        low, high: the band: the smallest and largest of the seeds, or a confidence interval.
    """

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def smooth(values: np.ndarray, window: int, *, keeps_width: bool = False) -> np.ndarray:
    """Centred running mean of finite values.

    Towards both ends the window shrinks on both sides, so that a falling curve neither lags nor bends there. With
    `keeps_width` it loses only the side that is cut off: less noise, right for values without a trend.

    Args:
        values: shape [n]; NaN and infinity are left out of the means.
        window: width at the most; an even one counts as the next odd one.

    Returns:
        Shape [n]; NaN where a window holds nothing finite.
    """
    position = np.arange(len(values))
    room_before, room_after = position, position[::-1]
    if not keeps_width:
        room_before = room_after = np.minimum(room_before, room_after)
    first = position - np.minimum(window // 2, room_before)
    end = position + np.minimum(window // 2, room_after) + 1
    is_finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(is_finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(is_finite)))
    count = counts[end] - counts[first]
    return np.where(count > 0, (sums[end] - sums[first]) / np.maximum(count, 1), np.nan)


def smoothing_window(num_steps: int) -> int:
    """Steps of the running means in reports: a twenty-fifth of the run."""
    return max(1, round(num_steps * SMOOTHING_FRACTION))


def relative_gap(base: LoadedRun, run: LoadedRun) -> tuple[np.ndarray, np.ndarray]:
    """How far a run's training loss lies from the baseline's, step by step, at the steps that both made.

    Returns:
        (training tokens of the run, (loss - baseline) / baseline as a fraction), both of shape [common steps].
    """
    _, ours, theirs = np.intersect1d(run.series("step"), base.series("step"), return_indices=True)
    loss, base_loss = run.series("loss")[ours], base.series("loss")[theirs]
    return run.series("consumed_tokens")[ours], (loss - base_loss) / base_loss


def validation_gap(base: LoadedRun, run: LoadedRun) -> tuple[np.ndarray, np.ndarray]:
    """The same for validation losses, at the steps where both were validated."""
    base_losses = {record.step: record.loss for record in base.evals_of("valid")}
    common = [record for record in run.evals_of("valid") if record.step in base_losses]
    gaps = [(record.loss - base_losses[record.step]) / base_losses[record.step] for record in common]
    return np.array([record.consumed_tokens for record in common], dtype=np.float64), np.array(gaps)


def validation_losses(run: LoadedRun) -> tuple[np.ndarray, np.ndarray]:
    """(training tokens, validation loss), both of shape [validations]."""
    records = run.evals_of("valid")
    return (
        np.array([record.consumed_tokens for record in records], dtype=np.float64),
        np.array([record.loss for record in records], dtype=np.float64),
    )


def validation_losses_over_time(run: LoadedRun) -> tuple[np.ndarray, np.ndarray]:
    """The same over seconds of training: the sum of the step times, without validations, saves and the start."""
    steps, seconds = run.series("step"), np.cumsum(np.nan_to_num(run.series("step_ms"))) / MS_PER_S
    records = run.evals_of("valid")
    places = np.searchsorted(steps, [record.step for record in records], side="right")
    return (
        np.concatenate(([0.0], seconds))[places],
        np.array([record.loss for record in records], dtype=np.float64),
    )


def smoothed_field(run: LoadedRun, field: str) -> tuple[np.ndarray, np.ndarray]:
    """(training tokens, running mean of a field of the step records), both of shape [steps]."""
    values = run.series(field)
    return run.series("consumed_tokens"), smooth(values, smoothing_window(len(values)))


def smoothed_gap(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """(training tokens, running mean of the gap of the training loss), both of shape [common steps]."""
    tokens, gap = relative_gap(pair.base, pair.run)
    return tokens, smooth(gap, smoothing_window(len(gap)), keeps_width=True)


def over_seeds(
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
    band: Callable[[np.ndarray], tuple[float, float]] = lambda values: (values.min(), values.max()),
) -> Curve:
    """One curve from those of the seeds, as far as the shortest reaches.

    Args:
        curves: (x, y) of each seed, at the same points in the order; x may differ, and is averaged.
        band: of the seeds' values at a point, shape [seeds], to the ends of the band.
    """
    length = min(len(y) for _, y in curves)
    x = np.array([x[:length] for x, _ in curves])
    y = np.array([y[:length] for _, y in curves])
    ends = [band(y[:, point]) for point in range(length)]
    low, high = np.array(ends, dtype=np.float64).reshape(length, 2).T
    return Curve(x=x.mean(axis=0), mean=y.mean(axis=0), low=low, high=high)


def interval_band(confidence: float) -> Callable[[np.ndarray], tuple[float, float]]:
    """A band for `over_seeds`: the confidence interval of the mean; NaN with one seed."""

    def band(values: np.ndarray) -> tuple[float, float]:
        interval = mean_interval(values.tolist(), confidence)
        return (np.nan, np.nan) if interval.low is None or interval.high is None else (interval.low, interval.high)

    return band
