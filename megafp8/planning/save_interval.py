"""The best time between saves: Young's and Daly's formulas, and a search by simulation.

Both formulas assume independent failures with exponential gaps, and saves that stop training for a fixed time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from megafp8.planning.goodput_inputs import GoodputInputs
from megafp8.planning.goodput_simulation import simulate

LONG_RUN_FAILURES = 10_000
LONG_RUN_EVENTS = 50_000
POINTS_PER_OCTAVE, OCTAVES = 2, 2
"""The search covers this many octaves on either side of its center, and moves while the best point is at an end."""
MAX_MOVES = 8
NOISE_FRACTION = 5e-4
"""The interpolated interval is not used if it is worse than a simulated one by more than this."""
FIT_FACTOR = 2.1
"""The optimum is interpolated between points within this factor of the best one."""


def young_interval_s(save_s: float, mtbf_s: float) -> float:
    """Time of training between saves (Young, CACM 17(9), 1974).

    Args:
        save_s: time that a save stops training.
        mtbf_s: mean time between failures.
    """
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Time of training between saves, of higher order (Daly, FGCS 22(3), 2006, equation 37)."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return young_interval_s(save_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def long_run_s(inputs: GoodputInputs) -> float:
    """Duration of a simulated run with enough failures that its effective time has little noise."""
    if not inputs.events_per_s:
        return inputs.duration_s
    by_failures_s = LONG_RUN_FAILURES * inputs.mean_time_between_failures_s
    return min(by_failures_s, LONG_RUN_EVENTS / inputs.events_per_s)


def long_run_fraction(inputs: GoodputInputs, save_interval: Optional[int]) -> float:
    """Effective training time of one long run. All long runs of a seed meet the same failures."""
    return simulate(inputs, save_interval, long_run_s(inputs), f"{inputs.seed}/long").effective_fraction


@dataclass(frozen=True)
class BestInterval:
    """The result of the search.

    Attributes:
        steps: the best interval.
        fractions: effective training time at each interval that was simulated.
    """

    steps: int
    fractions: dict[int, float]


def find_best_interval(inputs: GoodputInputs) -> Optional[BestInterval]:
    """The interval with the most effective training time in long simulated runs; None without failures."""
    if not inputs.failures_per_s:
        return None
    center_s = max(young_interval_s(inputs.stall_s, inputs.mean_time_between_failures_s), inputs.step_s)
    exponents = range(-OCTAVES * POINTS_PER_OCTAVE, OCTAVES * POINTS_PER_OCTAVE + 1)
    fractions: dict[int, float] = {}
    best = 0
    for _ in range(MAX_MOVES):
        intervals = {
            max(1, round(center_s / inputs.step_s * 2 ** (exponent / POINTS_PER_OCTAVE))) for exponent in exponents
        }
        for steps in sorted(intervals - fractions.keys()):
            fractions[steps] = long_run_fraction(inputs, steps)
        best = max(fractions, key=lambda steps: fractions[steps])
        is_inside = min(fractions) < best < max(fractions) or best == 1
        if is_inside or not fractions[best]:
            break
        center_s = best * inputs.step_s
    steps = interpolated_optimum(fractions, best) if fractions[best] else best
    if steps not in fractions:
        fractions[steps] = long_run_fraction(inputs, steps)
    if fractions[steps] < fractions[best] - NOISE_FRACTION:  # the curve has a corner where a save takes the interval
        steps = best
    return BestInterval(steps, dict(sorted(fractions.items())))


def interpolated_optimum(fractions: Mapping[int, float], best: int) -> int:
    """The minimum of a + b x + c / x, fitted to elapsed over useful time around the best interval.

    b x is the work that failures lose, c / x the stall of saves. Without such a minimum, the best interval itself.
    """
    points = [
        (steps / best, 1 / fraction) for steps, fraction in fractions.items()
        if 1 / FIT_FACTOR <= steps / best <= FIT_FACTOR and fraction
    ]  # fmt: skip
    if len(points) < 4:
        return best
    _, lost, stalls = _least_squares(points)
    if lost <= 0 or stalls <= 0:
        return best
    factor = min(max(math.sqrt(stalls / lost), 1 / FIT_FACTOR), FIT_FACTOR)
    return max(1, round(best * factor))


def _least_squares(points: list[tuple[float, float]]) -> list[float]:
    """Coefficients of 1, x and 1 / x that fit y best, by the normal equations."""
    rows = [((1.0, x, 1 / x), y) for x, y in points]
    matrix = [
        [math.fsum(basis[i] * basis[j] for basis, _ in rows) for j in range(3)]
        + [math.fsum(basis[i] * y for basis, y in rows)]
        for i in range(3)
    ]
    for column in range(3):
        pivot = max(range(column, 3), key=lambda row: abs(matrix[row][column]))
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in range(3):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[column], strict=True)]
    return [matrix[row][3] / matrix[row][row] for row in range(3)]
