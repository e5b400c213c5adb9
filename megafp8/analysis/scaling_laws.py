"""The cells of a scaling study: the runs of one size, length and recipe, and how recipes lie apart in them.

Where a size and length was trained under several settings (a sweep), the one with the lowest mean loss stands for it,
among those with the most seeds.

The laws of a scaling study: over which axis they can be fitted, what they come to, whether a recipe shifts them.

The law over compute is fitted to the cells on the frontier: those that no cheaper cell of the baseline beats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np

from megafp8.analysis.power_laws import Cells, Estimate, Fits, Law, estimate_of, fit_all
from megafp8.analysis.seed_statistics import CONFIDENCE, student_quantile
from megafp8.analysis.study_points import RECIPE_AXIS, Point


@dataclass(frozen=True, kw_only=True)
class CellRow:
    """Runs that differ in their seeds only.

    Attributes:
        options: on the study's axes besides the recipe's, where all seeds share them.
        spread: standard deviation of the losses over seeds; None for one.
        is_best: whether it stands for its recipe at this size and length.
    """

    recipe: str
    options: Mapping[str, str]
    parameters: int
    tokens: int
    flops: float
    losses: tuple[float, ...]
    seeds: tuple[int, ...]
    mean: float
    spread: Optional[float]
    is_best: bool


@dataclass(frozen=True, kw_only=True)
class GapRow:
    """A recipe against the baseline at one size and length, or at all (`parameters` None), seed by seed.

    Attributes:
        gap: mean of (loss - baseline's) / baseline's over seeds, with Student's t interval.
    """

    recipe: str
    parameters: Optional[int]
    tokens: Optional[int]
    gap: Estimate
    num_pairs: int


def cell_rows(points: Sequence[Point]) -> list[CellRow]:
    """One row for each configuration, by size, length and recipe."""
    groups: dict[tuple, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.seed):
        key = (point.parameters, point.tokens, point.recipe, point.settings, point.world_size)
        groups.setdefault(key, []).append(point)
    means = {key: float(np.mean([point.loss for point in group])) for key, group in groups.items()}
    best: dict[tuple, tuple] = {}
    # The lowest of a few noisy means is low by luck, and one seed has no interval: the most seeds come first.
    for key in sorted(groups, key=lambda key: (-len(groups[key]), means[key])):
        best.setdefault(key[:3], key)
    rows = []
    for key in sorted(groups, key=lambda key: (key[:2], [point.recipe for point in points].index(key[2]), means[key])):
        group = groups[key]
        losses = tuple(point.loss for point in group)
        rows.append(
            CellRow(
                recipe=group[0].recipe,
                options=options_of(group),
                parameters=group[0].parameters,
                tokens=group[0].tokens,
                flops=group[0].flops,
                losses=losses,
                seeds=tuple(point.seed for point in group),
                mean=means[key],
                spread=float(np.std(losses, ddof=1)) if len(losses) > 1 else None,
                is_best=best[key[:3]] == key,
            )  # fmt: skip
        )
    return rows


def passed_over(cells: Sequence[CellRow]) -> list[str]:
    """A note on configurations with a lower mean than the one that stands for their size, and fewer seeds."""
    best = {(cell.recipe, cell.parameters, cell.tokens): cell for cell in cells if cell.is_best}
    found = []
    for cell in cells:
        other = best[cell.recipe, cell.parameters, cell.tokens]
        if cell.mean < other.mean:
            found.append(
                f"{', '.join([cell.recipe, *cell.options.values()])}, {cell.parameters:,} parameters, {cell.tokens:,} "
                f"tokens ({cell.mean:.4f} with {len(cell.seeds)} of {len(other.seeds)} seeds, not {other.mean:.4f})"
            )
    if not found:
        return []
    return [f"passed over, as they have fewer seeds than what stands for their size and length: {'; '.join(found)}"]


def options_of(group: Sequence[Point]) -> dict[str, str]:
    """The options that the runs of a group share, by axis, besides the recipe."""
    first, *rest = (point.choice for point in group)
    return {
        axis: option for axis, option in first.items()
        if axis != RECIPE_AXIS and all(choice.get(axis) == option for choice in rest)
    }  # fmt: skip


def gap_rows(best: Sequence[CellRow], recipes: Sequence[str]) -> list[GapRow]:
    """Gaps to the baseline in each cell, then over all cells; no law has a part in them."""
    rows = []
    bases = {(cell.parameters, cell.tokens): cell for cell in best if cell.recipe == recipes[0]}
    for recipe in recipes[1:]:
        every: list[np.ndarray] = []
        for cell in best:
            base = bases.get((cell.parameters, cell.tokens))
            if cell.recipe != recipe or base is None:
                continue
            theirs = dict(zip(base.seeds, base.losses, strict=True))
            pairs = [(loss, theirs[seed]) for seed, loss in zip(cell.seeds, cell.losses, strict=True) if seed in theirs]
            if pairs:
                every.append(np.array([loss / other - 1 for loss, other in pairs]))
                rows.append(GapRow(recipe=recipe, parameters=cell.parameters, tokens=cell.tokens,
                                   gap=mean_of_means([every[-1]]), num_pairs=len(pairs)))  # fmt: skip
        if every:
            rows.append(GapRow(recipe=recipe, parameters=None, tokens=None, gap=mean_of_means(every),
                               num_pairs=sum(map(len, every))))  # fmt: skip
    return rows


def mean_of_means(groups: Sequence[np.ndarray]) -> Estimate:
    """Mean of the groups' means, with Student's t interval from the variance within groups."""
    value = float(np.mean([group.mean() for group in groups]))
    freedom = sum(len(group) - 1 for group in groups)
    if any(len(group) < 2 for group in groups):
        return Estimate(value)
    variance = sum(group.var(ddof=1) / len(group) for group in groups) / len(groups) ** 2
    half = float(student_quantile(CONFIDENCE, freedom) * np.sqrt(variance))
    return Estimate(value, value - half, value + half)


COMPUTE, PARAMETERS, BOTH = "compute", "parameters", "parameters and tokens"
# Three unknowns and a cell more, five and two more.
LEAST_CELLS, LEAST_CELLS_OF_TWO = 4, 7


@dataclass(frozen=True, kw_only=True)
class LawRow:
    """The law of one recipe. One coefficient and exponent for each term.

    Attributes:
        references: where a coefficient is the loss above the floor.
        worst_residual: largest distance of a cell's mean from the law, as a fraction of it: what noise of seeds, and
            so the intervals, do not cover.
    """

    recipe: str
    floor: Estimate
    coefficients: tuple[Estimate, ...]
    exponents: tuple[Estimate, ...]
    references: tuple[float, ...]
    worst_residual: float
    num_cells: int


@dataclass(frozen=True, kw_only=True)
class ShiftRow:
    """How a recipe's law lies beside the baseline's.

    Attributes:
        x: compute or size.
        gap: loss / baseline's loss - 1 at x, both by their laws.
        effective: x at which the baseline comes to the recipe's loss, over x: 0.9 is as if a tenth were lost.
    """

    recipe: str
    x: float
    gap: Estimate
    effective: Estimate


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The laws over compute, over parameters, or over parameters and tokens.

    Attributes:
        factors: of each recipe but the baseline: what x is worth, with one floor and exponent for all recipes.
        differences: floors and exponents minus the baseline's, by recipe.
    """

    name: str
    recipes: tuple[str, ...]
    laws: tuple[LawRow, ...]
    factors: tuple[tuple[str, Estimate], ...]
    differences: tuple[tuple[str, Estimate, Estimate], ...]
    shifts: tuple[ShiftRow, ...]
    fits: Fits


def fit_axis(
    name: str, best: Sequence[CellRow], recipes: Sequence[str], notes: list[str], replicates: int, seed: int
) -> Optional[Axis]:
    """The laws over an axis; None, and a note, where the grid does not identify them."""
    cells = list(best)
    if name == COMPUTE:
        places = frontier([cell for cell in cells if cell.recipe == recipes[0]])
        cells = [cell for cell in cells if (cell.parameters, cell.tokens) in places]
    x_of = X_OF[name]
    of_recipe = {recipe: [cell for cell in cells if cell.recipe == recipe] for recipe in recipes}
    if reason := why_not(name, of_recipe):
        notes.append(reason)
        return None
    every = [
        Cells(
            x=np.array([x_of(cell) for cell in rows], dtype=float),
            losses=tuple(np.array(cell.losses) for cell in rows),
            seeds=tuple(cell.seeds for cell in rows),
        )
        for rows in of_recipe.values()
    ]
    fits = fit_all(every, replicates=replicates, seed=seed)
    if not all(one.has_spread for one in every):
        notes.append(f"no intervals for the laws over {name}: they come from seeds, and a cell has one only")
    laws = tuple(law_row(recipe, every[number], fits, number) for number, recipe in enumerate(recipes))
    numbers = range(1, len(recipes))
    return Axis(
        name=name, recipes=tuple(recipes), laws=laws,
        factors=tuple((recipes[number], factor_of(fits, number)) for number in numbers if fits.common is not None),
        differences=tuple((recipes[number], *differences_of(fits, number)) for number in numbers),
        shifts=tuple(row for number in numbers for row in shift_rows(recipes[number], every, fits, number)),
        fits=fits,
    )  # fmt: skip


X_OF: dict[str, Callable[[CellRow], list[float]]] = {
    COMPUTE: lambda cell: [cell.flops],
    PARAMETERS: lambda cell: [cell.parameters],
    BOTH: lambda cell: [cell.parameters, cell.tokens],
}


def frontier(cells: Sequence[CellRow]) -> set[tuple[int, int]]:
    """Sizes and lengths that no cell of less compute beats."""
    places, lowest = set(), float("inf")
    for cell in sorted(cells, key=lambda cell: (cell.flops, cell.mean)):
        if cell.mean < lowest:
            lowest = cell.mean
            places.add((cell.parameters, cell.tokens))
    return places


def why_not(name: str, of_recipe: dict[str, list[CellRow]]) -> str:
    """Why the grid does not identify the laws over an axis; empty if it does."""
    for recipe, rows in of_recipe.items():
        sizes, lengths = {row.parameters for row in rows}, {row.tokens for row in rows}
        if name == PARAMETERS and len(rows) > len(sizes):
            return "no law over parameters alone: sizes were trained on several numbers of tokens"
        if name == BOTH:
            x = np.log([X_OF[BOTH](row) for row in rows])
            is_plane = len(rows) and np.linalg.matrix_rank(x - x.mean(0), tol=1e-3) == 2
            if not is_plane or min(len(sizes), len(lengths)) < 3 or len(rows) < LEAST_CELLS_OF_TWO:
                return (
                    "no law of parameters and tokens: it needs at least three sizes and three lengths that do not go "
                    f"together, and {LEAST_CELLS_OF_TWO} cells; {recipe} has {len(sizes)} sizes in {len(rows)} cells"
                )
        elif len(rows) < LEAST_CELLS:
            return f"no law over {name}: it needs {LEAST_CELLS} cells, and {recipe} has {len(rows)}"
    return ""


def law_row(recipe: str, cells: Cells, fits: Fits, number: int) -> LawRow:
    """A law with intervals."""
    law = fits.laws[number]
    replicates = fits.replicates[number]

    def estimate(read: Callable[[Law], float]) -> Estimate:
        return estimate_of(read(law), [read(one) for one in replicates])

    terms = range(len(law.exponents))
    return LawRow(
        recipe=recipe,
        floor=estimate(lambda one: one.floor),
        coefficients=tuple(estimate(lambda one, k=k: float(one.coefficients[k])) for k in terms),
        exponents=tuple(estimate(lambda one, k=k: float(one.exponents[k])) for k in terms),
        references=tuple(float(one) for one in law.references),
        worst_residual=float(np.abs(cells.means / law.loss(cells.x) - 1).max()),
        num_cells=len(cells.losses),
    )


def factor_of(fits: Fits, number: int) -> Estimate:
    """What x is worth under a recipe, by the common law."""
    assert fits.common is not None
    return estimate_of(
        float(fits.common.factors[number]), [float(one.factors[number]) for one in fits.common_replicates]
    )


def differences_of(fits: Fits, number: int) -> tuple[Estimate, Estimate]:
    """Floor and first exponent minus the baseline's."""
    pairs = list(zip(fits.replicates[number], fits.replicates[0], strict=True))
    law, base = fits.laws[number], fits.laws[0]
    return (
        estimate_of(law.floor - base.floor, [one.floor - other.floor for one, other in pairs]),
        estimate_of(
            float(law.exponents[0] - base.exponents[0]),
            [float(one.exponents[0] - other.exponents[0]) for one, other in pairs],
        ),
    )


def shift_rows(recipe: str, every: Sequence[Cells], fits: Fits, number: int) -> list[ShiftRow]:
    """The law beside the baseline's at the smallest, the middle and the largest x; none for two terms."""
    if every[number].x.shape[1] > 1:
        return []
    x = np.sort(every[number].x[:, 0])
    pairs = list(zip(fits.replicates[number], fits.replicates[0], strict=True))
    rows = []
    for place in (x[0], float(np.sqrt(x[0] * x[-1])), x[-1]):
        at = np.array([place])

        def gap(law: Law, base: Law, at: np.ndarray = at) -> float:
            return float(law.loss(at) / base.loss(at) - 1)

        def effective(law: Law, base: Law, at: np.ndarray = at) -> float:
            return float(base.x_for(law.loss(at)) / at[0])

        law, base = fits.laws[number], fits.laws[0]
        rows.append(
            ShiftRow(
                recipe=recipe,
                x=float(place),
                gap=estimate_of(gap(law, base), [gap(*pair) for pair in pairs]),
                effective=estimate_of(effective(law, base), [effective(*pair) for pair in pairs]),
            )  # fmt: skip
        )
    return rows
