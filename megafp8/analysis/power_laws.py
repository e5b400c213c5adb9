"""Scaling laws: least squares on the logarithm of the loss, with intervals from a bootstrap over seeds.

    L = E + sum over k of A_k (x_k / r_k)^-alpha_k

One term for compute or size alone, two for parameters and tokens (Hoffmann et al. 2022, arXiv:2203.15556, section 3.3).
E is at least 0. A and alpha are positive, since their logarithms are fitted. r is the geometric mean of the points, so
A is the loss above the floor there.

The laws are fitted to the means of cells (one size and length), so the noise is that of the seeds. The bootstrap draws
seeds with replacement within each cell. Each draw takes the seed with the lowest of random priorities that all recipes
share. Recipes with the same seeds get the same draws, so a difference of two laws has the narrower interval of a paired
comparison. A resample of n seeds has (n - 1) / n of their variance, and the variance of few seeds is uncertain. So
deviations are multiplied by sqrt(n / (n - 1)) and by the ratio of Student's quantile to the normal one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

import numpy as np

from megafp8.analysis.seed_statistics import CONFIDENCE, student_quantile

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from scipy.optimize import OptimizeResult

REPLICATES = 400
# Initial floors, as fractions of the smallest loss.
FLOOR_STARTS = (0.05, 0.5, 0.9)
# Bounds of the fit: A in nats, exponents, factors between recipes.
COEFFICIENT_BOUNDS = (1e-9, 1e9)
EXPONENT_BOUNDS = (1e-3, 5.0)
FACTOR_BOUNDS = (1e-3, 1e3)


@dataclass(frozen=True)
class Law:
    """A fitted law.

    Attributes:
        floor: E, in nats.
        coefficients: A of each term, in nats.
        exponents: alpha of each term.
        references: r of each term.
        factors: multipliers of x for each group of points; 1 for the first.
    """

    floor: float
    coefficients: np.ndarray
    exponents: np.ndarray
    references: np.ndarray
    factors: np.ndarray

    def loss(self, x: ArrayLike, group: int = 0) -> np.ndarray:
        """Losses [...] of points [..., terms]."""
        scaled = np.asarray(x) * self.factors[group] / self.references
        return self.floor + (self.coefficients * scaled**-self.exponents).sum(-1)

    def x_for(self, loss: np.ndarray) -> np.ndarray:
        """x at which a law of one term reaches a loss; infinity for a loss below its floor."""
        above = np.maximum(np.asarray(loss) - self.floor, 0.0)
        with np.errstate(divide="ignore"):
            return self.references[0] * (self.coefficients[0] / above) ** (1 / self.exponents[0])


def fit_law(
    x: np.ndarray, losses: np.ndarray, weights: np.ndarray, groups: Optional[np.ndarray] = None,
    start: Optional[Law] = None,
) -> Law:  # fmt: skip
    """Fit a law to points.

    Args:
        x: [points, terms], above 0.
        losses: [points], nats.
        weights: [points], number of seeds of each point.
        groups: [points], group numbers from 0. All groups have one law, with a fitted factor on the x of each group but
            the first. None: a single group.
        start: initial law; without one the fit starts from several floors.
    """
    from scipy.optimize import least_squares

    groups = np.zeros(len(x), dtype=int) if groups is None else groups
    terms, others = x.shape[1], int(groups.max())
    references = np.exp(np.log(x).mean(0))
    roots, log_losses = np.sqrt(weights), np.log(losses)

    def law_of(unknowns: np.ndarray) -> Law:
        values = np.exp(unknowns[1:])
        factors = np.concatenate([[1.0], values[2 * terms :]])
        return Law(float(unknowns[0]), values[:terms], values[terms : 2 * terms], references, factors)

    def residuals(unknowns: np.ndarray) -> np.ndarray:
        law = law_of(unknowns)
        scaled = x * law.factors[groups][:, None] / references
        predicted = law.floor + (law.coefficients * scaled**-law.exponents).sum(-1)
        return roots * (np.log(predicted) - log_losses)

    def search(floor: float, positive: Sequence[float]) -> OptimizeResult:
        initial = np.concatenate([[floor], np.clip(np.log(positive), low[1:] + 1e-3, high[1:] - 1e-3)])
        return least_squares(residuals, initial, bounds=(low, high), x_scale="jac", max_nfev=400)

    smallest, typical = losses.min(), float(np.median(losses))
    positive_bounds = [COEFFICIENT_BOUNDS] * terms + [EXPONENT_BOUNDS] * terms + [FACTOR_BOUNDS] * others
    low, high = np.array([(0.0, np.inf), *(np.log(each) for each in positive_bounds)]).T
    if start is not None:
        floor = max(start.floor, FLOOR_STARTS[0] * smallest)
        return law_of(search(floor, [*start.coefficients, *start.exponents, *start.factors[1:]]).x)
    results = [
        search(floor, [*[(typical - floor) / terms] * terms, *[0.3] * terms, *[1.0] * others])
        for floor in (fraction * smallest for fraction in FLOOR_STARTS)
    ]
    return law_of(min(results, key=lambda result: result.cost).x)


@dataclass(frozen=True)
class Cells:
    """The points that one recipe's law is fitted to. A cell is one size and length.

    Attributes:
        x: [cells, terms].
        losses: of each cell, one per seed.
        seeds: of each cell, in the same order.
    """

    x: np.ndarray
    losses: tuple[np.ndarray, ...]
    seeds: tuple[Sequence[int], ...]

    @property
    def weights(self) -> np.ndarray:
        """Number of seeds of each cell."""
        return np.array([len(losses) for losses in self.losses], dtype=float)

    @property
    def log_means(self) -> np.ndarray:
        """Mean log loss of each cell."""
        return np.array([np.log(losses).mean() for losses in self.losses])

    @property
    def means(self) -> np.ndarray:
        """Geometric mean of each cell's losses."""
        return np.exp(self.log_means)

    @property
    def has_spread(self) -> bool:
        """Whether every cell has the two seeds that a bootstrap needs."""
        return bool((self.weights > 1).all())


def draw_means(every: Sequence[Cells], rng: np.random.Generator) -> list[np.ndarray]:
    """One resample of the cell means, [cells] for each recipe. Recipes are paired by their seeds.

    Every draw gives each seed of a place a random priority, and a cell takes its seed with the lowest one. So each seed
    of a cell is equally likely, and two recipes with the same seeds take the same one.
    """
    most = int(max(cells.weights.max() for cells in every))
    priorities: dict[tuple[tuple[float, ...], int], np.ndarray] = {}
    drawn = []
    for cells in every:
        degrees = (cells.weights - 1).sum()
        widening = student_quantile(CONFIDENCE, degrees) / student_quantile(CONFIDENCE, math.inf)
        means = []
        for place, losses, seeds, center in zip(
            map(tuple, cells.x), cells.losses, cells.seeds, cells.log_means, strict=True
        ):
            count = len(losses)
            own = [priorities.setdefault((place, seed), rng.random(most))[:count] for seed in seeds]
            resampled = np.log(losses)[np.argmin(own, axis=0)].mean()
            means.append(center + (resampled - center) * widening * np.sqrt(count / (count - 1)))
        drawn.append(np.exp(means))
    return drawn


@dataclass(frozen=True)
class Fits:
    """Laws of all recipes over the same axis, and their bootstrap replicates.

    Attributes:
        laws: one per recipe.
        common: one law for all recipes, with a factor on x for each; None for one recipe or two terms.
        replicates: laws of the resamples for each recipe; empty if a cell has only one seed.
        common_replicates: the same for `common`.
    """

    laws: tuple[Law, ...]
    common: Optional[Law]
    replicates: tuple[tuple[Law, ...], ...]
    common_replicates: tuple[Law, ...]

    def pairs(self, number: int) -> list[tuple[Law, Law]]:
        """(recipe's law, baseline's law), followed by their replicates."""
        recipe, base = ((self.laws[each], *self.replicates[each]) for each in (number, 0))
        return list(zip(recipe, base, strict=True))


def fit_all(every: Sequence[Cells], *, replicates: int = REPLICATES, seed: int = 0) -> Fits:
    """Fit each recipe by itself, and all of them together."""
    is_common = len(every) > 1 and every[0].x.shape[1] == 1
    x, weights = np.concatenate([cells.x for cells in every]), np.concatenate([cells.weights for cells in every])
    groups = np.repeat(np.arange(len(every)), [len(cells.losses) for cells in every])
    laws = tuple(fit_law(cells.x, cells.means, cells.weights) for cells in every)
    common = fit_law(x, np.concatenate([cells.means for cells in every]), weights, groups) if is_common else None
    separate: list[list[Law]] = [[] for _ in every]
    joint: list[Law] = []
    rng = np.random.default_rng(seed)
    for _ in range(replicates if all(cells.has_spread for cells in every) else 0):
        drawn = draw_means(every, rng)
        for own, cells, means, law in zip(separate, every, drawn, laws, strict=True):
            own.append(fit_law(cells.x, means, cells.weights, start=law))
        if common is not None:
            joint.append(fit_law(x, np.concatenate(drawn), weights, groups, start=common))
    return Fits(laws, common, tuple(map(tuple, separate)), tuple(joint))


def interval(replicates: Sequence[float] | Sequence[np.ndarray]) -> Optional[tuple[np.ndarray, np.ndarray]]:
    """The ends of the middle 95% of replicates, which are numbers or curves [points]; None without replicates."""
    if not len(replicates):
        return None
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.asarray(replicates, dtype=float), [tail, 100 - tail], axis=0)
    return low, high


@dataclass(frozen=True)
class Estimate:
    """A number, and its interval if there is one."""

    value: float
    low: Optional[float] = None
    high: Optional[float] = None

    def text(self, pattern: str = "{:.3g}") -> str:
        """The number, followed by its interval in parentheses."""
        if self.low is None or self.high is None:
            return pattern.format(self.value)
        return f"{pattern.format(self.value)} ({pattern.format(self.low)} to {pattern.format(self.high)})"


def estimate_of(values: Iterable[float]) -> Estimate:
    """A value, the first one, with the interval of its replicates, the others."""
    value, *replicates = map(float, values)
    return Estimate(value, *map(float, interval(replicates) or ()))
