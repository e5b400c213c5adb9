"""Scaling laws: least squares on the logarithm of the loss, with bands from a bootstrap over seeds.

    L = E + sum over k of A_k (x_k / r_k)^-alpha_k

One term for compute or size alone, two for parameters and tokens (Hoffmann et al. 2022, arXiv:2203.15556, section 3.3).
E is at least 0; A and alpha are kept above 0 by fitting their logarithms; r is the geometric mean of the points, where
A is the loss above the floor.

What is fitted are the means of cells (one size and length), so the noise is that of seeds. The bootstrap draws seeds
with replacement within each cell. Each draw takes the seed with the lowest of random priorities that all recipes share,
so recipes that have the same seeds get the same draws, and a difference of two laws has the narrower band of a paired
comparison. A resample of n seeds has (n - 1) / n of their variance, and few seeds know it
badly: deviations are multiplied by sqrt(n / (n - 1)) and by the ratio of Student's quantile to the normal one.

A number of a scaling report, with its interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np
from scipy import optimize

from megafp8.analysis.seed_statistics import CONFIDENCE, student_quantile

REPLICATES = 400
# Of the smallest loss, where the search for the floor begins.
FLOOR_STARTS = (0.05, 0.5, 0.9)
# How far the search goes: A in nats and its inverse, exponents, factors between recipes.
SMALLEST = 1e-9
EXPONENTS = (1e-3, 5.0)
FACTORS = (1e-3, 1e3)


@dataclass(frozen=True)
class Law:
    """A fitted law.

    Attributes:
        floor: E, in nats.
        coefficients: A of each term, in nats.
        exponents: alpha of each term.
        references: r of each term.
        factors: multiplies x of each group of points; 1 for the first.
    """

    floor: float
    coefficients: np.ndarray
    exponents: np.ndarray
    references: np.ndarray
    factors: np.ndarray

    def loss(self, x: np.ndarray, group: int = 0) -> np.ndarray:
        """Losses of points. x: [..., terms]. Shape: [...]."""
        scaled = np.asarray(x) * self.factors[group] / self.references
        return self.floor + (self.coefficients * scaled**-self.exponents).sum(-1)

    def x_for(self, loss: np.ndarray) -> np.ndarray:
        """Where a law of one term comes to a loss; infinity where that is below its floor."""
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
        weights: [points], seeds behind each point.
        groups: [points], numbers from 0: one law for all groups, in which x of each group but the first is multiplied
            by a factor that is fitted too. None: no such factors.
        start: a law nearby; without one the search has several beginnings.
    """
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

    def search(floor: float, above_0: Sequence[float]) -> optimize.OptimizeResult:
        begin = np.concatenate([[floor], np.clip(np.log(above_0), bounds[0][1:] + 1e-3, bounds[1][1:] - 1e-3)])
        return optimize.least_squares(residuals, begin, bounds=bounds, x_scale="jac", max_nfev=400)

    smallest, typical = losses.min(), float(np.median(losses))
    low = [0.0, *[math.log(SMALLEST)] * terms, *[math.log(EXPONENTS[0])] * terms, *[math.log(FACTORS[0])] * others]
    high = [np.inf, *[math.log(1 / SMALLEST)] * terms, *[math.log(EXPONENTS[1])] * terms,
            *[math.log(FACTORS[1])] * others]  # fmt: skip
    bounds = np.array(low), np.array(high)
    if start is not None:
        floor = max(start.floor, FLOOR_STARTS[0] * smallest)
        return law_of(search(floor, [*start.coefficients, *start.exponents, *start.factors[1:]]).x)
    found = [
        search(share * smallest, [*[(typical - share * smallest) / terms] * terms, *[0.3] * terms, *[1.0] * others])
        for share in FLOOR_STARTS
    ]  # fmt: skip
    return law_of(min(found, key=lambda one: one.cost).x)


@dataclass(frozen=True)
class Cells:
    """What is fitted for one recipe: a cell is a size and a length.

    Attributes:
        x: [cells, terms].
        losses: of each cell, one a seed.
        seeds: their numbers, in the same order.
    """

    x: np.ndarray
    losses: tuple[np.ndarray, ...]
    seeds: tuple[Sequence[int], ...]

    @property
    def weights(self) -> np.ndarray:
        """Seeds of each cell."""
        return np.array([len(seeds) for seeds in self.losses], dtype=float)

    @property
    def log_means(self) -> np.ndarray:
        """Mean log loss of each cell."""
        return np.array([np.log(seeds).mean() for seeds in self.losses])

    @property
    def means(self) -> np.ndarray:
        """Geometric mean of each cell's losses."""
        return np.exp(self.log_means)

    @property
    def has_spread(self) -> bool:
        """Whether a bootstrap over seeds can be made: two seeds in every cell."""
        return bool((self.weights > 1).all())


def draw_means(every: Sequence[Cells], rng: np.random.Generator) -> list[np.ndarray]:
    """One resample of the means of all recipes' cells; [cells] each. Recipes are paired by the numbers of seeds.

    Every draw gives each seed of a place a random priority, and a cell takes that of its seeds with the lowest: any of
    them as likely as another, and the same one in two cells that both have the lowest of all.
    """
    most = int(max(cells.weights.max() for cells in every))
    priorities: dict[tuple[tuple[float, ...], int], np.ndarray] = {}
    drawn = []
    for cells in every:
        freedom = (cells.weights - 1).sum()
        widening = student_quantile(CONFIDENCE, freedom) / student_quantile(CONFIDENCE, math.inf)
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
    """Laws of all recipes over the same axis, and their replicates.

    Attributes:
        laws: one a recipe.
        common: one law for all, in which a recipe multiplies x by a factor; None for one recipe or two terms.
        replicates: laws of the resamples, a list a recipe; empty when a cell has one seed only.
        common_replicates: of `common`.
    """

    laws: tuple[Law, ...]
    common: Optional[Law]
    replicates: tuple[tuple[Law, ...], ...]
    common_replicates: tuple[Law, ...]


def fit_all(every: Sequence[Cells], *, replicates: int = REPLICATES, seed: int = 0) -> Fits:
    """Fit every recipe alone, and all of them together."""
    is_common = len(every) > 1 and every[0].x.shape[1] == 1
    x, weights = np.concatenate([cells.x for cells in every]), np.concatenate([cells.weights for cells in every])
    groups = np.repeat(np.arange(len(every)), [len(cells.losses) for cells in every])
    laws = tuple(fit_law(cells.x, cells.means, cells.weights) for cells in every)
    together = np.concatenate([cells.means for cells in every])
    common = fit_law(x, together, weights, groups) if is_common else None
    alone: list[list[Law]] = [[] for _ in every]
    joint: list[Law] = []
    rng = np.random.default_rng(seed)
    for _ in range(replicates if all(cells.has_spread for cells in every) else 0):
        drawn = draw_means(every, rng)
        for own, cells, means, law in zip(alone, every, drawn, laws, strict=True):
            own.append(fit_law(cells.x, means, cells.weights, start=law))
        if common is not None:
            joint.append(fit_law(x, np.concatenate(drawn), weights, groups, start=common))
    return Fits(laws, common, tuple(map(tuple, alone)), tuple(joint))


def interval(replicates: Sequence[float] | Sequence[np.ndarray]) -> Optional[tuple[np.ndarray, np.ndarray]]:
    """The ends of the middle 95% of replicates, numbers or curves of shape [points]; None without any."""
    if not len(replicates):
        return None
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.asarray(replicates, dtype=float), [tail, 100 - tail], axis=0)
    return low, high


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
