"""Scaling laws: least squares on the logarithm of the loss, with intervals from a jackknife over seeds.

    L = E + sum over k of A_k (x_k / r_k)^-alpha_k

One term for compute or size alone, two for parameters and tokens (Hoffmann et al. 2022, arXiv:2203.15556, section 3.3).
E is at least 0. A and alpha are positive, since their logarithms are fitted. r is the geometric mean of the points, so
A is the loss above the floor there.

The laws are fitted to the means of cells (one size and length), so the noise is that of the seeds. Every law is fitted
again without one seed of one size and length at a time, in all recipes that have the seed: the noise that they share
cancels in their difference. A size and length is a stratum of n seeds, those of the recipes that a result is of. Its
part of the variance of the result is (n - 1) / n times the sum of squares of the n results about their mean, with n - 1
degrees of freedom. The interval is Student's, with the degrees of freedom of the sum of the parts (F. E. Satterthwaite,
Biometrics Bulletin 2 (1946), 110-114).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

import numpy as np

from megafp8.analysis.seed_statistics import CONFIDENCE, student_quantile

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from scipy.optimize import OptimizeResult

# Initial floors, as fractions of the smallest loss.
FLOOR_STARTS = (0.05, 0.5, 0.9)
# Bounds of the fit: A in nats, exponents, factors between recipes.
COEFFICIENT_BOUNDS = (1e-9, 1e9)
EXPONENT_BOUNDS = (1e-3, 5.0)
FACTOR_BOUNDS = (1e-3, 1e3)
SMALLEST_SPREAD = 1e-9  # of replicates; the search for a bound ends within 1e-11 of it


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

    def jacobian(unknowns: np.ndarray) -> np.ndarray:
        law = law_of(unknowns)
        logs = np.log(x * law.factors[groups][:, None] / references)
        parts = law.coefficients * np.exp(-law.exponents * logs)
        slopes = -(law.exponents * parts).sum(-1)  # per unit of a factor's logarithm
        members = groups[:, None] == np.arange(1, others + 1)
        columns = [np.ones((len(x), 1)), parts, -law.exponents * logs * parts, slopes[:, None] * members]
        return np.hstack(columns) * (roots / (law.floor + parts.sum(-1)))[:, None]

    def search(floor: float, positive: Sequence[float]) -> OptimizeResult:
        initial = np.concatenate([[floor], np.clip(np.log(positive), low[1:] + 1e-3, high[1:] - 1e-3)])
        return least_squares(residuals, initial, jacobian, bounds=(low, high), x_scale="jac", max_nfev=400)

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
        """Whether every cell has the two seeds that an interval needs."""
        return bool((self.weights > 1).all())


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


@dataclass
class Stratum:
    """Cells of the same coordinates whose runs share their noise, as they have seeds in common.

    Attributes:
        members: number of the recipe, and of its cell.
    """

    coordinates: tuple[float, ...]
    seeds: set[int]
    members: list[tuple[int, int]]


def strata_of(every: Sequence[Cells]) -> list[Stratum]:
    """The strata of all recipes."""
    found: list[Stratum] = []
    for recipe, cells in enumerate(every):
        for number, (row, seeds) in enumerate(zip(cells.x, cells.seeds, strict=True)):
            merged = Stratum(tuple(row), set(seeds), [(recipe, number)])
            for other in [
                each for each in found if each.coordinates == merged.coordinates and each.seeds & merged.seeds
            ]:
                found.remove(other)
                merged = Stratum(merged.coordinates, merged.seeds | other.seeds, [*other.members, *merged.members])
            found.append(merged)
    return found


def left_out_means(every: Sequence[Cells], stratum: Stratum) -> Iterator[list[np.ndarray]]:
    """Means [cells] for each recipe, without each seed of a stratum in turn."""
    for seed in sorted(stratum.seeds):
        means = [cells.means for cells in every]
        for recipe, number in stratum.members:
            remaining = np.array([each != seed for each in every[recipe].seeds[number]])
            means[recipe][number] = np.exp(np.log(every[recipe].losses[number][remaining]).mean())
        yield means


@dataclass(frozen=True)
class Fits:
    """Laws of all recipes over the same axis, and their jackknife replicates: the same without one seed.

    Attributes:
        every: cells of each recipe.
        laws: one per recipe.
        common: one law for all recipes, with a factor on x for each; None for one recipe or two terms.
        replicates: laws without each seed for each recipe; empty if a cell has only one seed.
        common_replicates: the same for `common`.
        left_out: coordinates and seed that each replicate is without.
    """

    every: tuple[Cells, ...]
    laws: tuple[Law, ...]
    common: Optional[Law]
    replicates: tuple[tuple[Law, ...], ...]
    common_replicates: tuple[Law, ...]
    left_out: tuple[tuple[tuple[float, ...], int], ...]

    def pairs(self, number: int) -> list[tuple[Law, Law]]:
        """(recipe's law, baseline's law), followed by their replicates."""
        recipe, base = ((self.laws[each], *self.replicates[each]) for each in (number, 0))
        return list(zip(recipe, base, strict=True))

    def interval(
        self, values: Iterable[ArrayLike], recipes: Optional[Sequence[int]] = None
    ) -> Optional[tuple[np.ndarray, np.ndarray]]:
        """The ends of the 95% interval of a number or curve; None without replicates.

        Args:
            values: [...] from the laws, followed by those from each replicate. NaN, infinities and replicates that
                are all the same give ends of NaN.
            recipes: numbers of those whose laws the values are of; None for all. Only replicates without one of their
                seeds count: others do not vary, but would raise the degrees of freedom.
        """
        if not self.left_out:
            return None
        estimate, *replicates = (np.asarray(value, dtype=float) for value in values)
        by_left_out = dict(zip(self.left_out, replicates, strict=True))
        every = self.every if recipes is None else [self.every[number] for number in recipes]
        total, squares = np.zeros_like(estimate), np.zeros_like(estimate)
        with np.errstate(invalid="ignore", divide="ignore"):
            for stratum in strata_of(every):
                own = np.stack([by_left_out[stratum.coordinates, seed] for seed in sorted(stratum.seeds)])
                part = (len(own) - 1) / len(own) * np.square(own - own.mean(0)).sum(0)
                total, squares = total + part, squares + part**2 / (len(own) - 1)
            half = student_quantile(CONFIDENCE, total**2 / squares) * np.sqrt(total)
        return estimate - half, estimate + half

    def estimate(
        self, values: Iterable[float], recipes: Optional[Sequence[int]] = None, least: float = -np.inf
    ) -> Estimate:
        """A number, the first one, with the interval that its replicates, the others, give it.

        Floors that are at their bound in all fits have no interval: they do not show how far the truth may be from it.

        Args:
            recipes: as in `interval`.
            least: the least that the number can be, for the lower end.
        """
        numbers = [float(value) for value in values]
        ends = self.interval(numbers, recipes)
        if ends is None or not np.isfinite(ends).all() or np.ptp(numbers) < SMALLEST_SPREAD:
            return Estimate(numbers[0])
        return Estimate(numbers[0], max(least, float(ends[0])), float(ends[1]))


def fit_all(every: Sequence[Cells]) -> Fits:
    """Fit each recipe by itself, and all of them together."""
    is_common = len(every) > 1 and every[0].x.shape[1] == 1
    x, weights = np.concatenate([cells.x for cells in every]), np.concatenate([cells.weights for cells in every])
    groups = np.repeat(np.arange(len(every)), [len(cells.losses) for cells in every])
    laws = tuple(fit_law(cells.x, cells.means, cells.weights) for cells in every)
    common = fit_law(x, np.concatenate([cells.means for cells in every]), weights, groups) if is_common else None
    separate: list[list[Law]] = [[] for _ in every]
    joint: list[Law] = []
    strata = strata_of(every) if all(cells.has_spread for cells in every) else []
    for stratum in strata:
        for left_out in left_out_means(every, stratum):
            for own, cells, means, law in zip(separate, every, left_out, laws, strict=True):
                own.append(fit_law(cells.x, means, cells.weights, start=law))
            if common is not None:
                joint.append(fit_law(x, np.concatenate(left_out), weights, groups, start=common))
    without = tuple((stratum.coordinates, seed) for stratum in strata for seed in sorted(stratum.seeds))
    return Fits(tuple(every), laws, common, tuple(map(tuple, separate)), tuple(joint), without)
