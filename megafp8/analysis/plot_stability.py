"""Figures of a stability report: gaps with their intervals, and the sweep of the learning rate.

Colours and styles are those of a comparison's figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megafp8.analysis import plot_comparison
from megafp8.analysis.pairing import Pair
from megafp8.analysis.plot_comparison import WIDTH_INCHES, DrawnRecipe, add_legend, color_of, gap_label
from megafp8.analysis.plotting import GRAY, INK, LIMIT_COLOR, PAGE_STYLE, new_figure, plot_style
from megafp8.analysis.stability_gaps import SuiteGap
from megafp8.analysis.stability_runs import SuiteRun
from megafp8.analysis.stability_sweep import SweepRow
from megafp8.config.variants import BASELINE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.figure import Figure


def colors_of(names: Iterable[str]) -> dict[str, str]:
    """The colour of each recipe, the baseline in that of the text."""
    colors: dict[str, str] = {}
    for name in names:
        index = sum(color not in (INK, GRAY) for color in colors.values())
        colors[name] = color_of(name, index, is_baseline=name == BASELINE)
    return colors


def drawn_recipes(runs: Sequence[SuiteRun]) -> list[DrawnRecipe]:
    """The recipes of a part for the figures of a comparison: their pairs with records on both sides."""
    loaded = {(run.recipe, run.seed): run.run for run in runs if run.final_loss is not None and not run.is_diverged}
    colors = colors_of(dict.fromkeys(run.recipe for run in runs))
    drawn = []
    for name, color in colors.items():
        pairs = tuple(
            Pair(base, own)
            for (recipe, seed), own in loaded.items()
            if recipe == name and own is not None and (base := loaded.get((BASELINE, seed))) is not None
        )
        if pairs:
            drawn.append(DrawnRecipe(name=name, pairs=pairs, color=color))
    return drawn


def plot_gap_rows(rows: Sequence[SuiteGap], *, spread_fraction: float | None = None) -> Figure:
    """Gaps of the final loss: dots for seeds, a bar for the interval of the mean, crosses for divergences.

    A cross on the right is of runs that diverged, one on the left of their references.

    Args:
        spread_fraction: of the baseline over its seeds, drawn as a dashed line.
    """
    colors = colors_of([BASELINE, *(row.name for row in rows)])
    figure = plot_comparison.plot_gap_rows(
        rows, [colors[row.name] for row in rows], bound_fraction=spread_fraction,
        label=gap_label("its reference"),
    )  # fmt: skip
    axes = figure.axes[0]
    end = 0.97 * axes.get_xlim()[1]
    for y, row in enumerate(rows):
        if row.num_diverged:
            axes.plot(end, y, "x", color=LIMIT_COLOR)
        if row.num_reference_diverged:
            axes.plot(-end, y, "x", color=LIMIT_COLOR)
    return figure


@plot_style(PAGE_STYLE)
def plot_sweep(rows: Sequence[SweepRow], limit: float) -> Figure:
    """Final loss over the learning rate: a line for each recipe's mean, dots for seeds, crosses for divergences.

    Args:
        limit: loss from which on a run counts as diverged, drawn as a dashed line.
    """
    figure = new_figure(WIDTH_INCHES, 3.4)
    axes = figure.subplots()
    colors = colors_of(row.name for row in rows)
    finite = [loss for row in rows for losses in row.losses.values() for loss in map(finite_or_nan, losses)]
    top = float(np.nanmax([limit if math.isfinite(limit) else math.nan, *finite, 0.0]))
    for row in rows:
        shown = np.array([list(map(finite_or_nan, each)) for each in row.losses.values()], dtype=np.float64)
        counts = np.isfinite(shown).sum(axis=0)
        means = np.where(counts > 0, np.nansum(shown, axis=0) / np.maximum(counts, 1), np.nan)
        axes.plot(row.rates, means, color=colors[row.name], linewidth=1.6, label=row.name)
        for losses in row.losses.values():
            axes.plot(row.rates, list(map(finite_or_nan, losses)), "o", color=colors[row.name], markersize=4)
            bad = [rate for rate, loss in zip(row.rates, losses, strict=True) if loss == math.inf]
            axes.plot(bad, [1.04 * top] * len(bad), "x", color=colors[row.name], markersize=6)
    if math.isfinite(limit):
        axes.axhline(limit, color=LIMIT_COLOR, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows[0].rates, [f"{rate:g}" for rate in rows[0].rates])
    axes.set_xlabel("learning rate")
    axes.set_ylabel("final validation loss (nats)")
    add_legend(axes)
    return figure


def finite_or_nan(loss: float | None) -> float:
    """A final loss for a curve: NaN, which is not drawn, after a divergence and without a result."""
    return loss if loss is not None and math.isfinite(loss) else math.nan
