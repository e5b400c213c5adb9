"""The laws of a scaling study: over which axis they can be fitted, what they come to, whether a recipe shifts them.

The law over compute is fitted to the cells on the frontier: those that no cheaper cell of the baseline beats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np

from megafp8.reports.estimate import Estimate, estimate_of
from megafp8.reports.laws import Cells, Fits, Law, fit_all
from megafp8.reports.scaling_cells import CellRow

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
            losses=tuple(np.array(cell.losses) for cell in rows), seeds=tuple(cell.seeds for cell in rows),
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
                recipe=recipe, x=float(place), gap=estimate_of(gap(law, base), [gap(*pair) for pair in pairs]),
                effective=estimate_of(effective(law, base), [effective(*pair) for pair in pairs]),
            )  # fmt: skip
        )
    return rows
