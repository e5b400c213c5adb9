"""Statistics over seeds: confidence intervals, verdicts on gaps, and curves with bands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from megafp8.analysis.pairing import Pair
from megafp8.analysis.runs import LoadedRun
from megafp8.metrics.records import VALID

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

CONFIDENCE = 0.95
WITHIN, BEYOND, UNDECIDED = "within", "beyond", "not decided"
BLIND = "blind"
"""In place of a verdict, where none of the known-bad controls was found."""
CONTROL = "control"
"""In place of a verdict: the gap between a control and the baseline is noise, which has no bound."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its confidence interval. `low`, `high` and `spread` are None for a single value.

    Attributes:
        spread: standard deviation of the values, with n - 1.
    """

    mean: float
    low: Optional[float] = None
    high: Optional[float] = None
    spread: Optional[float] = None


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Student's t interval of the mean: mean +- t((1 + confidence) / 2, n - 1) s / sqrt(n).

    The values are assumed to be independent draws from a normal distribution. With three of them the half width is
    2.48 s, so few seeds rarely give a verdict.

    Args:
        values: at least one. A non-finite value makes the mean and the interval NaN.
        confidence: probability that the interval contains the true mean; above 0, below 1.
    """
    numbers = np.asarray(values, dtype=np.float64)
    mean = float(numbers.mean())
    if len(numbers) < 2:
        return Interval(mean=mean)
    spread = float(numbers.std(ddof=1)) if np.isfinite(numbers).all() else math.nan
    half = float(student_quantile(confidence, len(numbers) - 1)) * spread / math.sqrt(len(numbers))
    return Interval(mean=mean, low=mean - half, high=mean + half, spread=spread)


def student_quantile(confidence: float, freedom: ArrayLike) -> Any:
    """Half the width of Student's t interval in standard errors: 4.30 for 95% with 2 degrees of freedom."""
    from scipy.special import stdtrit  # scipy.stats, which has it too, takes a second to import

    return stdtrit(freedom, (1 + confidence) / 2)


def welch_p_value(groups: Sequence[Sequence[float]]) -> Optional[float]:
    """Probability that groups with one common mean differ as much as these: Welch's analysis of variance.

    Groups may have different variances. Source: B. L. Welch, Biometrika 38 (1951), 330-336.

    Args:
        groups: finite values of each group.

    Returns:
        None for fewer than two groups, and for a group of fewer than two values.
    """
    from scipy.stats import f_oneway

    if len(groups) < 2 or any(len(group) < 2 for group in groups):
        return None
    if not all(map(np.ptp, groups)):  # no statistic without a variance
        return 1.0 if np.ptp([np.mean(group) for group in groups]) == 0 else 0.0
    return float(f_oneway(*groups, equal_var=False).pvalue)


def gap_verdict(gap: Interval, bound: float) -> str:
    """Whether a gap is within or beyond a bound: its whole interval must lie on one side.

    A single value has no interval, so it is undecided. A non-finite gap, from a diverged run, is beyond.
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
    """A line with a band. All arrays are float64 [points], with NaN for missing values.

    Attributes:
        low, high: the smallest and largest of the seeds, or a confidence interval.
    """

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def smooth(values: np.ndarray, window: int, *, keeps_width: bool = False) -> np.ndarray:
    """Centred running mean of finite values.

    Near the ends the window shrinks on both sides, so that a falling curve has no lag there. With `keeps_width` it
    loses only the side beyond the end, which gives less noise for values without a trend.

    Args:
        values: [n]; NaN and infinity are ignored.
        window: maximum width; an even one counts as the next odd one.

    Returns:
        [n]; NaN where a window has no finite value.
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
    """Window of the running means in reports: a twenty-fifth of the steps."""
    return max(1, round(num_steps * SMOOTHING_FRACTION))


def common_steps(base: LoadedRun, run: LoadedRun) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the common steps in the step records of the run and of the baseline."""
    _, in_run, in_base = np.intersect1d(run.series("step"), base.series("step"), return_indices=True)
    return in_run, in_base


def relative_gap(base: LoadedRun, run: LoadedRun) -> tuple[np.ndarray, np.ndarray]:
    """Gap of a run's training loss to the baseline's at the same step.

    Returns:
        (training tokens of the run, (loss - baseline) / baseline as a fraction), both [common steps].
    """
    in_run, in_base = common_steps(base, run)
    loss, base_loss = run.series("loss")[in_run], base.series("loss")[in_base]
    return run.series("consumed_tokens")[in_run], (loss - base_loss) / base_loss


def validation_gap(base: LoadedRun, run: LoadedRun) -> tuple[np.ndarray, np.ndarray]:
    """`relative_gap` of the validation losses, at the steps where both runs were validated."""
    gaps = validation_gaps(base, run)
    tokens = [record.consumed_tokens for record in run.evals_of(VALID) if record.step in gaps]
    return np.array(tokens, dtype=np.float64), np.array(list(gaps.values()))


def validation_gaps(base: LoadedRun, run: LoadedRun, split: str = VALID) -> dict[int, float]:
    """Gaps of a run's validation losses to the baseline's, by step.

    Args:
        split: of the run's; the baseline's are those of its own precision.
    """
    expected = {record.step: record.loss for record in base.evals_of(VALID)}
    return {
        record.step: (record.loss - expected[record.step]) / expected[record.step]
        for record in run.evals_of(split)
        if record.step in expected
    }


def validation_losses(run: LoadedRun) -> tuple[np.ndarray, np.ndarray]:
    """(training tokens, validation loss), both [validations]."""
    records = [(record.consumed_tokens, record.loss) for record in run.evals_of("valid")]
    tokens, losses = np.array(records, dtype=np.float64).reshape(-1, 2).T
    return tokens, losses


def validation_losses_over_time(run: LoadedRun) -> tuple[np.ndarray, np.ndarray]:
    """(seconds of training, validation loss): sums of the step times, without validations, saves and start-up."""
    seconds = np.cumsum(np.nan_to_num(run.series("step_ms"))) / MS_PER_S
    validated_steps = [record.step for record in run.evals_of("valid")]
    num_done = np.searchsorted(run.series("step"), validated_steps, side="right")
    return np.concatenate(([0.0], seconds))[num_done], validation_losses(run)[1]


def reached_at(x: np.ndarray, losses: np.ndarray, target: float) -> Optional[float]:
    """Where a validation curve first reaches a loss, by linear interpolation between validations.

    Returns:
        None if it never does, or did before the first validation.
    """
    reached = np.flatnonzero(losses <= target)
    if not reached.size or not reached[0]:
        return None
    after = int(reached[0])
    fraction = (losses[after - 1] - target) / (losses[after - 1] - losses[after])
    return float(x[after - 1] + fraction * (x[after] - x[after - 1]))


def equal_loss_ratio(
    pair: Pair, points: Callable[[LoadedRun], tuple[np.ndarray, np.ndarray]] = validation_losses
) -> Optional[float]:
    """Tokens that a run needs over those of its baseline, for the same loss; with other points their x.

    The loss is the baseline's last, or the run's own where that is larger, so that both reach it.

    Args:
        points: (x, validation loss) of a run.

    Returns:
        None if either has fewer than two validations or reached the loss before its first one.
    """
    (own_x, own), (base_x, base) = points(pair.run), points(pair.base)
    if len(own) < 2 or len(base) < 2 or not (np.isfinite(own).all() and np.isfinite(base).all()):
        return None
    target = max(own[-1], base[-1])
    own_at, base_at = reached_at(own_x, own, target), reached_at(base_x, base, target)
    return None if own_at is None or not base_at else own_at / base_at


def ratio_interval(ratios: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Geometric mean of ratios, with Student's t interval of their logarithms. `spread` is that of the logarithms."""
    found = mean_interval([math.log(ratio) for ratio in ratios], confidence)
    if found.low is None or found.high is None:
        return Interval(mean=math.exp(found.mean))
    return Interval(mean=math.exp(found.mean), low=math.exp(found.low), high=math.exp(found.high), spread=found.spread)


def smoothed_field(run: LoadedRun, field: str) -> tuple[np.ndarray, np.ndarray]:
    """(training tokens, running mean of a field of the step records), both [steps].

    They end a quarter of a window before the last step: the means after that are of few steps, and look like a spike.
    """
    values, window = run.series(field), smoothing_window(len(run.steps))
    end = len(values) - window // 4
    return run.series("consumed_tokens")[:end], smooth(values, window)[:end]


def smoothed_gap(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """(training tokens, running mean of the gap of the training loss), both [common steps]."""
    tokens, gap = relative_gap(pair.base, pair.run)
    return tokens, smooth(gap, smoothing_window(len(gap)), keeps_width=True)


def full_range(values: np.ndarray) -> tuple[float, float]:
    """A band for `over_seeds`: the smallest and largest value."""
    return values.min(), values.max()


def over_seeds(
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
    band: Callable[[np.ndarray], tuple[float, float]] = full_range,
) -> Curve:
    """Mean and band of the seeds' curves, up to the end of the shortest.

    Args:
        curves: (x, y) of each seed, with the same points in the same order. x is averaged, too.
        band: from the seeds' values at a point, [seeds], to the ends of the band.
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
