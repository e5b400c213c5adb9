"""The pictures of a comparison of recipes, as SVG for a page.

Lines are means over the seeds, bands what the seeds span. The baseline and all lettering are drawn in `INK`, the grid
in `GRID`: the page sets both for light and for dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from megafp8.analysis.compare import Comparison
from megafp8.analysis.html import GRID, INK
from megafp8.analysis.pairing import Pair, is_control
from megafp8.analysis.runs import LoadedRun
from megafp8.analysis.seed_statistics import (
    Curve,
    interval_band,
    over_seeds,
    smoothed_field,
    smoothed_gap,
    validation_gap,
    validation_losses,
    validation_losses_over_time,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#e8590c", "#1c7ed6", "#2f9e44", "#ae3ec9", "#e64980", "#0ca678", "#f08c00", "#7048e8")
CONTROL_COLOR = "#868e96"
WIDTH_INCHES = 8.6
# The fall of the first steps would squeeze all the rest.
STEEP_FRACTION = 0.08
MIN_REACH_FRACTION = 0.001  # no finer: noise should not look like a finding
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A recipe as it is drawn: its pairs with the baseline, and its colour in every picture."""

    name: str
    pairs: tuple[Pair, ...]
    color: str

    @property
    def runs(self) -> list[LoadedRun]:
        """Its own runs."""
        return [pair.run for pair in self.pairs]


def color_of(name: str, index: int, *, is_baseline: bool) -> str:
    """The colour of the recipe that is the index-th of those which are neither baseline nor control."""
    if is_baseline:
        return INK
    return CONTROL_COLOR if is_control(name) else COLORS[index % len(COLORS)]


def plot_gaps(comparison: Comparison, colors: Sequence[str]) -> Figure:
    """Every recipe's gap: dots for seeds, a bar for the interval of the mean, the bound as a dashed line."""
    every = zip(comparison.recipes, colors, strict=True)
    shown = [(row, row.gap, color) for row, color in every if row.verdict and row.gap is not None]
    figure, axes = _figure(0.9 + 0.42 * max(1, len(shown)))
    values = [one for row, gap, _ in shown for one in (*row.gaps_fraction, gap.low, gap.high) if one is not None]
    finite = [abs(value) for value in values if math.isfinite(value)]
    reach = 100 * 1.1 * max([*finite, 1.2 * comparison.bound_fraction, MIN_REACH_FRACTION])
    bound = 100 * comparison.bound_fraction
    axes.axvspan(bound, reach, color="#e03131", alpha=0.08, linewidth=0)
    axes.axvline(bound, color="#e03131", linewidth=1.2, linestyle=(0, (4, 3)))
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


def plot_validation(recipes: Sequence[Drawn], *, confidence: float) -> Figure:
    """Validation loss over tokens; below, the gap to the baseline with the interval of its mean."""
    figure, above, below = _figure_with_gaps(recipes)
    for index, recipe in enumerate(recipes):
        _draw(above, over_seeds([validation_losses(run) for run in recipe.runs]), recipe, index, marker="o")
        if index:
            gap = over_seeds([validation_gap(p.base, p.run) for p in recipe.pairs], interval_band(confidence))
            _draw(below, _percent(gap), recipe, index, marker="o")
    _limit_losses(above)
    if below is not above:
        _finish_gaps(below, f"gap (%), {confidence:.0%} interval")
    above.set_ylabel("validation loss (nats)")
    _add_perplexity(above)
    _token_axis(below)
    _legend(above)
    return figure


def plot_time(recipes: Sequence[Drawn]) -> Figure:
    """Validation loss over the time spent in steps."""
    figure, axes = _figure(3.1)
    for index, recipe in enumerate(recipes):
        _draw(axes, over_seeds([validation_losses_over_time(run) for run in recipe.runs]), recipe, index, marker="o")
    _limit_losses(axes)
    axes.set_ylabel("validation loss (nats)")
    axes.set_xlabel("time in steps (s)")
    _legend(axes)
    return figure


def plot_training(recipes: Sequence[Drawn]) -> Figure:
    """Training loss over tokens; below, the smoothed gap to the baseline with what the seeds span."""
    figure, above, below = _figure_with_gaps(recipes)
    for index, recipe in enumerate(recipes):
        _draw(above, over_seeds([smoothed_field(run, "loss") for run in recipe.runs]), recipe, index)
        if index:
            _draw(below, _percent(over_seeds([smoothed_gap(pair) for pair in recipe.pairs])), recipe, index)
    _limit_losses(above)
    if below is not above:
        _finish_gaps(below, "gap (%), smoothed")
    above.set_ylabel("training loss (nats)")
    _token_axis(below)
    _legend(above)
    return figure


def plot_grad_norms(recipes: Sequence[Drawn]) -> Optional[Figure]:
    """Gradient norm before clipping over tokens; None where no run has it."""
    if not any(np.isfinite(run.series("grad_norm")).any() for recipe in recipes for run in recipe.runs):
        return None
    figure, axes = _figure(3.1)
    for index, recipe in enumerate(recipes):
        _draw(axes, over_seeds([smoothed_field(run, "grad_norm") for run in recipe.runs]), recipe, index)
    axes.set_yscale("log")
    for axis_part in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis_part(lambda value, _: f"{value:g}")
    axes.set_ylabel("gradient norm")
    _token_axis(axes)
    _legend(axes)
    return figure


def plot_speed_and_memory(comparison: Comparison, colors: Sequence[str]) -> Figure:
    """Tokens a second and peak memory, a bar a recipe."""
    rows = comparison.drawn
    colors = [color for row, color in zip(comparison.recipes, colors, strict=True) if row in rows]
    figure, (left, right) = _figure(0.8 + 0.34 * len(rows), columns=2)
    _bars(left, rows, colors, [row.tokens_per_second for row in rows], "tokens/s", lambda value: f"{value:,.0f}")
    memory = [row.memory_peak_bytes and row.memory_peak_bytes / GIB for row in rows]
    _bars(right, rows, colors, memory, "peak memory (GiB)", lambda value: f"{value:.3g}")
    right.set_yticklabels([])
    return figure


def _figure(height: float, *, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=100, layout="constrained")
    axes = figure.subplots(
        rows, columns, sharex=rows > 1, gridspec_kw={"height_ratios": (1.7, 1)} if rows == 2 else None
    )
    for each in np.atleast_1d(axes):
        _style(each)
    return figure, axes


def _figure_with_gaps(recipes: Sequence[Drawn]) -> tuple[Figure, Axes, Axes]:
    """Two panels, the lower one for gaps; where there are none, one panel that is both."""
    if len(recipes) == 1:
        figure, axes = _figure(3.1)
        return figure, axes, axes
    figure, (above, below) = _figure(4.6, rows=2)
    return figure, above, below


def _style(axes: Axes) -> None:
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9.5, color=GRID, labelcolor=INK, which="both")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=INK, size=10)


def _draw(axes: Axes, curve: Curve, recipe: Drawn, index: int, *, marker: str = "") -> None:
    # The baseline lies wide and pale underneath: curves that agree stay both visible.
    width, alpha = (4.5, 0.35) if index == 0 else (1.6, 1.0)
    axes.fill_between(curve.x, curve.low, curve.high, color=recipe.color, alpha=0.13, linewidth=0)
    axes.plot(curve.x, curve.mean, color=recipe.color, linewidth=width, alpha=alpha, marker=marker, markersize=3.5,
              label=recipe.name)  # fmt: skip


def _percent(curve: Curve) -> Curve:
    return Curve(x=curve.x, mean=100 * curve.mean, low=100 * curve.low, high=100 * curve.high)


def _drawn(axes: Axes) -> list[np.ndarray]:
    return [np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.get_lines()]


def _limit_losses(axes: Axes) -> None:
    """The loss axis begins where the steep first part of the runs is done."""
    curves = [values[np.isfinite(values)] for values in _drawn(axes)]
    curves = [values for values in curves if values.size]
    if not curves:
        return
    low = min(values.min() for values in curves)
    high = max(values[min(len(values) - 1, math.ceil(len(values) * STEEP_FRACTION))] for values in curves)
    if high > low:
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def _finish_gaps(axes: Axes, label: str) -> None:
    """Symmetric about zero, as far as the curves go when the steep part is done."""
    ends = [values[math.ceil(len(values) * STEEP_FRACTION) :] for values in _drawn(axes)]
    sizes = np.abs(np.concatenate([*ends, [100 * MIN_REACH_FRACTION]]))
    limit = 1.5 * float(np.max(sizes[np.isfinite(sizes)]))
    axes.axhline(0, color=INK, linewidth=3, alpha=0.35, zorder=1)
    axes.set_ylim(-limit, limit)
    axes.set_ylabel(label)


def _add_perplexity(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter

    right = axes.secondary_yaxis("right")
    right.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{math.exp(loss):.3g}"))
    right.set_ylabel("perplexity", color=INK, size=10)
    right.tick_params(labelsize=9.5, color=GRID, labelcolor=INK)
    right.spines["right"].set_visible(False)


def _token_axis(axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel("training tokens")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.figure.legend(handles, labels, loc="outside upper left", ncols=min(7, len(labels)), frameon=False,
                           fontsize=9.5, labelcolor=INK, handlelength=1.6, columnspacing=1.4)  # fmt: skip


def _bars(
    axes: Axes,
    rows: Sequence[Any],
    colors: Sequence[str],
    values: Sequence[Optional[float]],
    label: str,
    shown: Callable[[float], str],
) -> None:
    places, known = range(len(rows)), [value or 0.0 for value in values]
    axes.barh(places, known, color=colors, alpha=0.75, height=0.6)
    for place, value in zip(places, values, strict=True):
        text = "not measured" if value is None else shown(value)
        axes.annotate(text, (value or 0.0, place), (4, 0), textcoords="offset points", va="center", fontsize=9,
                      color=INK)  # fmt: skip
    axes.set_yticks(places, [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.28 * max([*known, 1e-9]))
    axes.set_xlabel(label)
    axes.grid(False, axis="y")
