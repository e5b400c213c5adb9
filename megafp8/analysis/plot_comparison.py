"""Figures of a comparison of recipes, drawn as SVG for the HTML report.

Lines are means over the seeds, bands span the seeds. The baseline and all text are drawn in `INK` and the grid in
`GRID`; the page replaces both for light and dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from megafp8.analysis import seed_statistics
from megafp8.analysis.compare import Comparison, RecipeRow
from megafp8.analysis.html import GRID, INK
from megafp8.analysis.pairing import Pair, is_control
from megafp8.analysis.plotting import GRAY, new_figure, style_axes, use_si_prefixes
from megafp8.analysis.runs import LoadedRun
from megafp8.analysis.seed_statistics import Curve, over_seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#e8590c", "#1c7ed6", "#2f9e44", "#ae3ec9", "#e64980", "#0ca678", "#f08c00", "#7048e8")
BOUND_COLOR = "#e03131"
WIDTH_INCHES = 8.6
# The limits of the loss axes ignore this first part of the runs, whose steep fall would compress the rest.
STEEP_FRACTION = 0.08
MIN_REACH_FRACTION = 0.001  # smallest range of a gap axis, so that noise does not fill it
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class DrawnRecipe:
    """A recipe in the figures: its pairs with the baseline, and its colour in all of them."""

    name: str
    pairs: tuple[Pair, ...]
    color: str

    @property
    def runs(self) -> list[LoadedRun]:
        """The runs of the recipe itself."""
        return [pair.run for pair in self.pairs]


def color_of(name: str, index: int, *, is_baseline: bool) -> str:
    """The colour of a recipe; `index` counts the recipes that are neither baseline nor control."""
    if is_baseline:
        return INK
    return GRAY if is_control(name) else COLORS[index % len(COLORS)]


def plot_gaps(comparison: Comparison, colors: Sequence[str]) -> Figure:
    """Gap of every recipe: dots for seeds, a bar for the interval of the mean, the bound as a dashed line."""
    rows = zip(comparison.recipes, colors, strict=True)
    shown = [(row, row.gap, color) for row, color in rows if row.verdict and row.gap is not None]
    figure, axes = _figure(0.9 + 0.42 * max(1, len(shown)))
    values = [value for row, gap, _ in shown for value in (*row.gaps_fraction, gap.low, gap.high) if value is not None]
    finite = [abs(value) for value in values if math.isfinite(value)]
    reach = 100 * 1.1 * max([*finite, 1.2 * comparison.bound_fraction, MIN_REACH_FRACTION])
    bound = 100 * comparison.bound_fraction
    axes.axvspan(bound, reach, color=BOUND_COLOR, alpha=0.08, linewidth=0)
    axes.axvline(bound, color=BOUND_COLOR, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.axvline(0, color=INK, linewidth=1)
    for place, (row, gap, color) in enumerate(shown):
        if gap.low is not None and gap.high is not None:
            axes.plot([100 * gap.low, 100 * gap.high], [place, place], color=color, linewidth=7, alpha=0.3,
                      solid_capstyle="butt")  # fmt: skip
        axes.plot(100 * np.array(row.gaps_fraction), [place] * len(row.gaps_fraction), "o", color=color, markersize=4.5)
        axes.plot(100 * gap.mean, place, "|", color=color, markersize=17, markeredgewidth=2.4)
    axes.set_yticks(range(len(shown)), [row.name for row, *_ in shown], fontsize=10)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(-reach, reach)
    axes.set_xlabel(f"gap of the final validation loss to {comparison.baseline} of the same seed (%)")
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    axes.grid(False, axis="y")
    return figure


def plot_validation(recipes: Sequence[DrawnRecipe], *, confidence: float) -> Figure:
    """Validation loss over tokens; below it the gap to the baseline with the interval of its mean."""
    figure, above, below = _figure_with_gaps(recipes)
    _draw_runs(above, recipes, seed_statistics.validation_losses, marker="o")
    for index, recipe in enumerate(recipes[1:], start=1):
        gaps = [seed_statistics.validation_gap(pair.base, pair.run) for pair in recipe.pairs]
        gap = over_seeds(gaps, seed_statistics.interval_band(confidence))
        _draw(below, _percent(gap), recipe, index, marker="o")
    _finish_with_gaps(above, below, "validation loss (nats)", f"gap (%), {confidence:.0%} interval")
    _add_perplexity(above)
    return figure


def plot_time(recipes: Sequence[DrawnRecipe]) -> Figure:
    """Validation loss over the time spent in steps."""
    figure, axes = _figure(3.1)
    _draw_runs(axes, recipes, seed_statistics.validation_losses_over_time, marker="o")
    _limit_losses(axes)
    axes.set_ylabel("validation loss (nats)")
    axes.set_xlabel("time in steps (s)")
    _legend(axes)
    return figure


def plot_training(recipes: Sequence[DrawnRecipe]) -> Figure:
    """Training loss over tokens; below it the smoothed gap to the baseline with the range over the seeds."""
    figure, above, below = _figure_with_gaps(recipes)
    _draw_runs(above, recipes, partial(seed_statistics.smoothed_field, field="loss"))
    for index, recipe in enumerate(recipes[1:], start=1):
        _draw(below, _percent(over_seeds([seed_statistics.smoothed_gap(pair) for pair in recipe.pairs])), recipe, index)
    _finish_with_gaps(above, below, "training loss (nats)", "gap (%), smoothed")
    return figure


def plot_grad_norms(recipes: Sequence[DrawnRecipe]) -> Optional[Figure]:
    """Gradient norm before clipping over tokens; None if no run recorded it."""
    if not any(np.isfinite(run.series("grad_norm")).any() for recipe in recipes for run in recipe.runs):
        return None
    figure, axes = _figure(3.1)
    _draw_runs(axes, recipes, partial(seed_statistics.smoothed_field, field="grad_norm"))
    axes.set_yscale("log")
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel("gradient norm")
    _token_axis(axes)
    _legend(axes)
    return figure


def plot_speed_and_memory(comparison: Comparison, colors: Sequence[str]) -> Figure:
    """Tokens per second and peak memory, one bar per recipe."""
    rows = comparison.drawn
    colors = [color for row, color in zip(comparison.recipes, colors, strict=True) if row in rows]
    figure, (left, right) = _figure(0.8 + 0.34 * len(rows), columns=2)
    _bars(left, rows, colors, [row.tokens_per_second for row in rows], "tokens/s", lambda value: f"{value:,.0f}")
    memory = [row.memory_peak_bytes and row.memory_peak_bytes / GIB for row in rows]
    _bars(right, rows, colors, memory, "peak memory (GiB)", lambda value: f"{value:.3g}")
    right.set_yticklabels([])
    return figure


def _figure(height: float, *, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    figure = new_figure(WIDTH_INCHES, height)
    panels = figure.subplots(
        rows, columns, sharex=rows > 1, gridspec_kw={"height_ratios": (1.7, 1)} if rows == 2 else None
    )
    for axes in np.atleast_1d(panels):
        style_axes(axes, grid_color=GRID)
        axes.tick_params(labelsize=9.5, color=GRID, labelcolor=INK, which="both")
        for spine in axes.spines.values():
            spine.set_color(GRID)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set(color=INK, size=10)
    return figure, panels


def _figure_with_gaps(recipes: Sequence[DrawnRecipe]) -> tuple[Figure, Axes, Axes]:
    """Two panels, the lower one for gaps; without gaps one panel, returned as both."""
    if len(recipes) == 1:
        figure, axes = _figure(3.1)
        return figure, axes, axes
    figure, (above, below) = _figure(4.6, rows=2)
    return figure, above, below


def _draw_runs(
    axes: Axes,
    recipes: Sequence[DrawnRecipe],
    points: Callable[[LoadedRun], tuple[np.ndarray, np.ndarray]],
    marker: str = "",
) -> None:
    """Draw a curve of all recipes, averaged over their runs."""
    for index, recipe in enumerate(recipes):
        _draw(axes, over_seeds([points(run) for run in recipe.runs]), recipe, index, marker=marker)


def _draw(axes: Axes, curve: Curve, recipe: DrawnRecipe, index: int, *, marker: str = "") -> None:
    # The baseline is wide and pale, so that a curve on top of it leaves both visible.
    width, alpha = (4.5, 0.35) if index == 0 else (1.6, 1.0)
    axes.fill_between(curve.x, curve.low, curve.high, color=recipe.color, alpha=0.13, linewidth=0)
    axes.plot(curve.x, curve.mean, color=recipe.color, linewidth=width, alpha=alpha, marker=marker, markersize=3.5,
              label=recipe.name)  # fmt: skip


def _percent(curve: Curve) -> Curve:
    return Curve(x=curve.x, mean=100 * curve.mean, low=100 * curve.low, high=100 * curve.high)


def _y_values(axes: Axes) -> list[np.ndarray]:
    return [np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.get_lines()]


def _limit_losses(axes: Axes) -> None:
    """Limit the loss axis to the losses after the steep first part of the runs."""
    curves = [finite for values in _y_values(axes) if (finite := values[np.isfinite(values)]).size]
    if not curves:
        return
    low = min(values.min() for values in curves)
    high = max(values[min(len(values) - 1, math.ceil(len(values) * STEEP_FRACTION))] for values in curves)
    if high > low:
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def _finish_with_gaps(above: Axes, below: Axes, loss_label: str, gap_label: str) -> None:
    """Set the limits and labels of both panels; the gap axis is symmetric about zero."""
    _limit_losses(above)
    if below is not above:
        ends = [values[math.ceil(len(values) * STEEP_FRACTION) :] for values in _y_values(below)]
        sizes = np.abs(np.concatenate([*ends, [100 * MIN_REACH_FRACTION]]))
        limit = 1.5 * float(np.max(sizes[np.isfinite(sizes)]))
        below.axhline(0, color=INK, linewidth=3, alpha=0.35, zorder=1)
        below.set_ylim(-limit, limit)
        below.set_ylabel(gap_label)
    above.set_ylabel(loss_label)
    _token_axis(below)
    _legend(above)


def _add_perplexity(axes: Axes) -> None:
    right = axes.secondary_yaxis("right")
    right.yaxis.set_major_formatter(lambda loss, _: f"{math.exp(loss):.3g}")
    right.set_ylabel("perplexity", color=INK, size=10)
    right.tick_params(labelsize=9.5, color=GRID, labelcolor=INK)
    right.spines["right"].set_visible(False)


def _token_axis(axes: Axes) -> None:
    axes.set_xlabel("training tokens")
    axes.set_xlim(left=0)
    use_si_prefixes(axes.xaxis)


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.figure.legend(handles, labels, loc="outside upper left", ncols=min(7, len(labels)), frameon=False,
                           fontsize=9.5, labelcolor=INK, handlelength=1.6, columnspacing=1.4)  # fmt: skip


def _bars(
    axes: Axes,
    rows: Sequence[RecipeRow],
    colors: Sequence[str],
    values: Sequence[Optional[float]],
    label: str,
    format_value: Callable[[float], str],
) -> None:
    places, known = range(len(rows)), [value or 0.0 for value in values]
    axes.barh(places, known, color=colors, alpha=0.75, height=0.6)
    for place, value in zip(places, values, strict=True):
        text = "not measured" if value is None else format_value(value)
        axes.annotate(text, (value or 0.0, place), (4, 0), textcoords="offset points", va="center", fontsize=9,
                      color=INK)  # fmt: skip
    axes.set_yticks(places, [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.28 * max([*known, 1e-9]))
    axes.set_xlabel(label)
    axes.grid(False, axis="y")
