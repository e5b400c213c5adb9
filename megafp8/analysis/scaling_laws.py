"""Cells and laws of a scaling study, and the shift of each recipe's law against the baseline's.

A cell has the runs of one size, length and recipe. If it was trained with several settings (a sweep), the setting with
the lowest mean loss represents it, among those with the most seeds. Gaps take for each seed the setting that the other
seeds chose (`selected_losses`).

The law over compute is fitted to the cells on the frontier: those that no cheaper cell of the baseline beats.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

from megafp8.analysis.power_laws import Cells, Estimate, Fits, Law, fit_all
from megafp8.analysis.seed_statistics import CONFIDENCE, student_quantile, welch_p_value
from megafp8.analysis.study_points import RECIPE_AXIS, Point
from megafp8.metrics.records import TaskScores


@dataclass(frozen=True, kw_only=True)
class CellRow:
    """Runs that differ only in their seeds.

    Attributes:
        options: on the study's axes other than the recipe, if all seeds share them.
        spread: standard deviation of the losses over seeds; None for a single seed.
        is_best: whether it represents its recipe at this size and length.
        tasks: mean scores of the questions that all seeds have.
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
    tasks: Mapping[str, TaskScores] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GapRow:
    """Gap of a recipe to the baseline at one size and length, or over all of them (`parameters` is None).

    Attributes:
        gap: mean over seeds of (loss - baseline's loss) / baseline's loss, with Student's t interval.
    """

    recipe: str
    parameters: Optional[int]
    tokens: Optional[int]
    gap: Estimate
    num_pairs: int


@dataclass(frozen=True, kw_only=True)
class SizeAgreement:
    """Whether the gaps of a recipe agree over sizes and lengths, so that they may be pooled.

    Attributes:
        num_sizes: sizes and lengths with a pair.
        num_tested: those with at least two pairs. Only these are tested and pooled: a single pair has no variance.
        p_value: of `welch_p_value` over the tested ones; None for fewer than two.
    """

    recipe: str
    num_sizes: int
    num_tested: int
    p_value: Optional[float]

    @property
    def may_pool(self) -> bool:
        """Whether there is a single size, or the tested ones show no disagreement. Without a test nothing is pooled."""
        return self.num_sizes == 1 or (self.p_value is not None and self.p_value >= 1 - CONFIDENCE)


def cell_rows(points: Sequence[Point]) -> list[CellRow]:
    """One row for each configuration, ordered by size, length and recipe."""
    groups: dict[tuple[Any, ...], list[Point]] = {}
    for point in sorted(points, key=lambda point: point.seed):
        key = (point.parameters, point.tokens, point.recipe, point.settings, point.world_size)
        groups.setdefault(key, []).append(point)
    means = {key: float(np.mean([point.loss for point in group])) for key, group in groups.items()}
    best: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    # Prefer the most seeds: the lowest of several noisy means is low by chance, and one seed has no interval.
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
                tasks=mean_scores(group),
            )  # fmt: skip
        )
    return rows


def mean_scores(points: Sequence[Point]) -> dict[str, TaskScores]:
    """Means of the scores of the tasks that all points have, with as many questions."""

    def mean(values: Sequence[Optional[float]]) -> Optional[float]:
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if len(known) == len(values) else None

    found = {}
    for name, first in points[0].tasks.items():
        scores = [point.tasks[name] for point in points if name in point.tasks]
        if len(scores) == len(points) and {each.num_questions for each in scores} == {first.num_questions}:
            found[name] = dataclasses.replace(
                first,
                bits_per_byte=float(np.mean([each.bits_per_byte for each in scores])),
                accuracy=mean([each.accuracy for each in scores]),
                normalized_accuracy=mean([each.normalized_accuracy for each in scores]),
            )
    return found


def skipped_cells_note(cells: Sequence[CellRow]) -> list[str]:
    """A note on configurations with fewer seeds but a lower mean than the best of their size; empty without any."""
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
    return [f"Left out, because another configuration of their size and length has more seeds: {'; '.join(found)}"]


def options_of(group: Sequence[Point]) -> dict[str, str]:
    """The options that the runs of a group share, by axis, without the recipe."""
    first, *rest = (point.choice for point in group)
    return {
        axis: option for axis, option in first.items()
        if axis != RECIPE_AXIS and all(choice.get(axis) == option for choice in rest)
    }  # fmt: skip


def selected_losses(cells: Sequence[CellRow], best: CellRow) -> dict[int, float]:
    """The losses of a recipe at one size and length by seed, each in the setting with the lowest mean of other seeds.

    The lowest of several noisy means is low by chance, and lower with more settings, which would favour the recipe that
    has more. A loss had no part in the choice of its own setting. With a single seed nothing else can choose: then it
    is that of the best setting.
    """
    rivals = [
        dict(zip(cell.seeds, cell.losses, strict=True))
        for cell in cells
        if (cell.recipe, cell.parameters, cell.tokens) == (best.recipe, best.parameters, best.tokens)
        and set(cell.seeds) == set(best.seeds)
    ]
    if len(best.seeds) == 1:
        return dict(zip(best.seeds, best.losses, strict=True))

    def loss_of(seed: int) -> float:
        def mean_of_others(losses: Mapping[int, float]) -> float:
            return float(np.mean([loss for other, loss in losses.items() if other != seed]))

        return min(rivals, key=mean_of_others)[seed]

    return {seed: loss_of(seed) for seed in best.seeds}


def selection_note(cells: Sequence[CellRow], recipes: Sequence[str]) -> list[str]:
    """A note on recipes with more settings than the baseline and a single seed; empty without any."""
    counts = Counter((cell.recipe, cell.parameters, cell.tokens) for cell in cells)
    found = {
        cell.recipe
        for cell in cells
        if cell.is_best
        and len(cell.seeds) == 1
        and counts[cell.recipe, cell.parameters, cell.tokens] > counts[recipes[0], cell.parameters, cell.tokens] > 0
    }
    if not found:
        return []
    return [
        f"{', '.join(sorted(found))}: the best of more settings than those of {recipes[0]}, with one seed; the gap "
        "favours it"
    ]


def gap_rows(cells: Sequence[CellRow], recipes: Sequence[str]) -> tuple[list[GapRow], list[SizeAgreement]]:
    """Gaps to the baseline at each size and length, independent of the laws; then over all where these agree."""
    rows, agreements = [], []
    best = [cell for cell in cells if cell.is_best]
    bases = {(cell.parameters, cell.tokens): cell for cell in best if cell.recipe == recipes[0]}
    for recipe in recipes[1:]:
        all_gaps: list[np.ndarray] = []
        for cell in best:
            base = bases.get((cell.parameters, cell.tokens))
            if cell.recipe != recipe or base is None:
                continue
            base_losses, losses = selected_losses(cells, base), selected_losses(cells, cell)
            gaps = np.array([loss / base_losses[seed] - 1 for seed, loss in losses.items() if seed in base_losses])
            if len(gaps):
                all_gaps.append(gaps)
                rows.append(GapRow(recipe=recipe, parameters=cell.parameters, tokens=cell.tokens,
                                   gap=mean_of_means([gaps]), num_pairs=len(gaps)))  # fmt: skip
        tested = [gaps for gaps in all_gaps if len(gaps) > 1]
        p_value = welch_p_value([gaps.tolist() for gaps in tested])
        agreement = SizeAgreement(recipe=recipe, num_sizes=len(all_gaps), num_tested=len(tested), p_value=p_value)
        if all_gaps:
            agreements.append(agreement)
        if all_gaps and agreement.may_pool:
            pooled = tested or all_gaps
            rows.append(GapRow(recipe=recipe, parameters=None, tokens=None, gap=mean_of_means(pooled),
                               num_pairs=sum(map(len, pooled))))  # fmt: skip
    return rows, agreements


def mean_of_means(groups: Sequence[np.ndarray]) -> Estimate:
    """Mean of the groups' means, with Student's t interval from the variance within groups.

    Variances may differ by group: the degrees of freedom are Welch's and Satterthwaite's. By simulation the interval
    covers 93% or more with three pairs a group, and 89% where a group of two pairs has five times the deviation of the
    others. No interval with a group of a single value.
    """
    value = float(np.mean([group.mean() for group in groups]))
    if any(len(group) < 2 for group in groups):
        return Estimate(value)
    variances = np.array([group.var(ddof=1) / len(group) for group in groups])
    total = float(variances.sum())
    if not total:
        return Estimate(value, value, value)
    degrees = total**2 / float((variances**2 / [len(group) - 1 for group in groups]).sum())
    half = float(student_quantile(CONFIDENCE, degrees)) * total**0.5 / len(groups)
    return Estimate(value, value - half, value + half)


COMPUTE, PARAMETERS, BOTH = "compute", "parameters", "parameters and tokens"
# More than the unknowns of a law, which are 3 with one term and 5 with two.
MIN_CELLS, MIN_CELLS_TWO_TERMS = 4, 7


@dataclass(frozen=True, kw_only=True)
class LawRow:
    """The law of one recipe, with one coefficient and exponent per term.

    Attributes:
        references: x at which a coefficient is the loss above the floor.
        worst_residual: largest distance of a cell's mean from the law, as a fraction of the law. The intervals do not
            cover it, since they come from the noise of seeds.
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
    """A recipe's law compared with the baseline's.

    Attributes:
        x: compute or size.
        gap: loss / baseline's loss - 1 at x, by the laws.
        effective: x at which the baseline reaches the recipe's loss, divided by x; 0.9 means that a tenth is lost.
    """

    recipe: str
    x: float
    gap: Estimate
    effective: Estimate


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The laws over compute, over parameters, or over parameters and tokens.

    Attributes:
        factors: on x, for each recipe but the baseline, in the law with a common floor and exponent.
        differences: floor and exponent of each recipe minus the baseline's.
    """

    name: str
    recipes: tuple[str, ...]
    laws: tuple[LawRow, ...]
    factors: tuple[tuple[str, Estimate], ...]
    differences: tuple[tuple[str, Estimate, Estimate], ...]
    shifts: tuple[ShiftRow, ...]
    fits: Fits


def fit_axis(name: str, best: Sequence[CellRow], recipes: Sequence[str], notes: list[str]) -> Optional[Axis]:
    """The laws over an axis; None, with a note, if the cells do not identify them."""
    cells = list(best)
    if name == COMPUTE:
        on_frontier = frontier([cell for cell in cells if cell.recipe == recipes[0]])
        cells = [cell for cell in cells if (cell.parameters, cell.tokens) in on_frontier]
    by_recipe = {recipe: [cell for cell in cells if cell.recipe == recipe] for recipe in recipes}
    if reason := unidentified_reason(name, by_recipe):
        notes.append(reason)
        return None
    every = [
        Cells(
            x=np.array([X_OF[name](cell) for cell in rows], dtype=float),
            losses=tuple(np.array(cell.losses) for cell in rows),
            seeds=tuple(cell.seeds for cell in rows),
        )
        for rows in by_recipe.values()
    ]
    fits = fit_all(every)
    if not all(cells_of_recipe.has_spread for cells_of_recipe in every):
        notes.append(f"The laws over {name} have no intervals: these come from seeds, and a cell has only one.")
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
    found, lowest = set(), float("inf")
    for cell in sorted(cells, key=lambda cell: (cell.flops, cell.mean)):
        if cell.mean < lowest:
            lowest = cell.mean
            found.add((cell.parameters, cell.tokens))
    return found


def unidentified_reason(name: str, by_recipe: Mapping[str, list[CellRow]]) -> str:
    """Why the cells do not identify the laws over an axis; empty if they do."""
    for recipe, rows in by_recipe.items():
        sizes, lengths = {row.parameters for row in rows}, {row.tokens for row in rows}
        if name == PARAMETERS and len(rows) > len(sizes):
            return "Not fitted: the law in N alone. Sizes were trained on several numbers of tokens."
        if name == BOTH:
            x = np.log([X_OF[BOTH](row) for row in rows])
            is_plane = len(rows) and np.linalg.matrix_rank(x - x.mean(0), tol=1e-3) == 2
            if not is_plane or min(len(sizes), len(lengths)) < 3 or len(rows) < MIN_CELLS_TWO_TERMS:
                return (
                    "Not fitted: the law in N (parameters) and D (tokens). It needs at least 3 sizes and 3 run lengths "
                    f"varied independently, in {MIN_CELLS_TWO_TERMS} cells; {recipe} has {len(sizes)} sizes in "
                    f"{len(rows)} cells."
                )
        elif len(rows) < MIN_CELLS:
            return f"Not fitted: the law over {name}. It needs {MIN_CELLS} cells; {recipe} has {len(rows)}."
    return ""


def law_row(recipe: str, cells: Cells, fits: Fits, number: int) -> LawRow:
    """A law with intervals of its parameters."""
    laws = (fits.laws[number], *fits.replicates[number])

    def estimates(parameters: Callable[[Law], Iterable[float]]) -> tuple[Estimate, ...]:
        return tuple(fits.estimate(values, [number]) for values in zip(*map(parameters, laws), strict=True))

    return LawRow(
        recipe=recipe,
        floor=fits.estimate((law.floor for law in laws), [number], least=0.0),
        coefficients=estimates(lambda law: law.coefficients),
        exponents=estimates(lambda law: law.exponents),
        references=tuple(map(float, laws[0].references)),
        worst_residual=float(np.abs(cells.means / laws[0].loss(cells.x) - 1).max()),
        num_cells=len(cells.losses),
    )


def factor_of(fits: Fits, number: int) -> Estimate:
    """Factor on x of a recipe in the common law."""
    assert fits.common is not None
    return fits.estimate(law.factors[number] for law in (fits.common, *fits.common_replicates))


def differences_of(fits: Fits, number: int) -> tuple[Estimate, Estimate]:
    """Floor and first exponent of a recipe minus the baseline's."""
    pairs, recipes = fits.pairs(number), [number, 0]
    floors = fits.estimate((law.floor - base.floor for law, base in pairs), recipes)
    return floors, fits.estimate((law.exponents[0] - base.exponents[0] for law, base in pairs), recipes)


def shift_rows(recipe: str, every: Sequence[Cells], fits: Fits, number: int) -> list[ShiftRow]:
    """The law compared with the baseline's at the smallest, the middle and the largest x; none for two terms."""
    if every[number].x.shape[1] > 1:
        return []
    smallest, largest = every[number].x.min(), every[number].x.max()
    pairs, recipes = fits.pairs(number), [number, 0]
    return [
        ShiftRow(
            recipe=recipe,
            x=float(x),
            gap=fits.estimate(((law.loss([x]) / base.loss([x]) - 1).item() for law, base in pairs), recipes),
            effective=fits.estimate(((base.x_for(law.loss([x])) / x).item() for law, base in pairs), recipes),
        )
        for x in (smallest, np.sqrt(smallest * largest), largest)
    ]
