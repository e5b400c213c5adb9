"""The cells of a scaling study: the runs of one size, length and recipe, and how recipes lie apart in them.

Where a size and length was trained under several settings (a sweep), the one with the lowest mean loss stands for it,
among those with the most seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np

from megafp8.reports.estimate import Estimate
from megafp8.reports.intervals import CONFIDENCE, student_quantile
from megafp8.reports.study_points import RECIPE_AXIS, Point


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
                recipe=group[0].recipe, options=options_of(group), parameters=group[0].parameters,
                tokens=group[0].tokens, flops=group[0].flops, losses=losses,
                seeds=tuple(point.seed for point in group), mean=means[key],
                spread=float(np.std(losses, ddof=1)) if len(losses) > 1 else None, is_best=best[key[:3]] == key,
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
