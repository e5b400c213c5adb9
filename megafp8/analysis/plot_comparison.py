"""Figures of a comparison of recipes: as SVG for the HTML report, and the loss curves as PNG.

Lines are means over the seeds, bands span the seeds. The baseline and all text are drawn in `INK` and the grid in
`GRID`; the page replaces both for light and dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from megafp8.analysis import seed_statistics
from megafp8.analysis.compare import Comparison, RecipeRow
from megafp8.analysis.pairing import Pair, is_control
from megafp8.analysis.percent import count_text
from megafp8.analysis.plotting import (
    COLORS,
    GRAY,
    INK,
    LIMIT_COLOR,
    PAGE_STYLE,
    mark,
    new_figure,
    plot_style,
    save_figure,
    use_si_prefixes,
)
from megafp8.analysis.runs import LoadedRun
from megafp8.analysis.seed_statistics import Curve, over_seeds
from megafp8.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megafp8.analysis.stability_gaps import SuiteGap

WIDTH_INCHES, NARROW_INCHES = 8.6, 4.2
WIDTH_PIXELS, HEIGHT_PIXELS = 1200, 640  # of the loss curves
# The limits of the loss axes ignore this first part of the runs, whose steep fall would compress the rest.
STEEP_FRACTION = 0.08
MAX_POINTS = 800  # of a curve: its pixels. Of long runs a page would be megabytes of points that nobody sees
LEGEND_ROW_INCHES = 0.2
LETTERS_PER_INCH, LINE_LETTERS = 12, 6  # of names in a legend, and the width of the line beside a name
MIN_REACH_FRACTION = 0.001  # smallest range of a gap axis, so that noise does not fill it
GIB = 2**30
VISIBLE_GAP_FRACTION = 0.05  # a smaller gap is within the width of a loss curve
MIN_SEEDS_OF_BAND = 3
MAX_EXPONENT = 700  # of e, in FP64


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

    @property
    def is_baseline(self) -> bool:
        """Whether this is the baseline, which has the colour of the text."""
        return self.color == INK


_smoothed_loss = partial(seed_statistics.smoothed_field, field="loss")
# What is drawn of each recipe that has values.
Curves = Sequence[tuple[DrawnRecipe, Curve]]


def color_of(name: str, index: int, *, is_baseline: bool) -> str:
    """The colour of a recipe; `index` counts the recipes that are neither baseline nor control."""
    if is_baseline:
        return INK
    return GRAY if is_control(name) else COLORS[index % len(COLORS)]


@plot_style(PAGE_STYLE)
def plot_gap_rows(
    rows: Sequence[RecipeRow | SuiteGap], colors: Sequence[str], *, bound_fraction: Optional[float], label: str
) -> Figure:
    """Gap of every row: dots for pairs, a bar for the interval of the mean, the bound as a dashed line.

    Args:
        bound_fraction: None draws no bound.
        label: of the x axis.
    """
    figure, axes = _figure(0.9 + 0.42 * len(rows))
    values = [gap for row in rows for gap in row.gaps_fraction]
    values += [end for row in rows if row.gap for end in (row.gap.low, row.gap.high) if end is not None]
    sizes = [abs(value) for value in values if math.isfinite(value)]
    reach = 110 * max([*sizes, 1.2 * (bound_fraction or 0), MIN_REACH_FRACTION])
    if bound_fraction is not None:
        axes.axvspan(100 * bound_fraction, reach, color=LIMIT_COLOR, alpha=0.08, linewidth=0)
        axes.axvline(100 * bound_fraction, color=LIMIT_COLOR, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.axvline(0, color=INK, linewidth=1)
    for y, (row, color) in enumerate(zip(rows, colors, strict=True)):
        finite = [100 * gap for gap in row.gaps_fraction if math.isfinite(gap)]
        axes.plot(finite, [y] * len(finite), "o", color=color, markersize=4.5)
        if row.gap is None:
            continue
        if row.gap.low is not None and row.gap.high is not None:
            axes.plot([100 * row.gap.low, 100 * row.gap.high], [y, y], color=color, linewidth=7, alpha=0.3,
                      solid_capstyle="butt")  # fmt: skip
        axes.plot(100 * row.gap.mean, y, "|", color=color, markersize=17, markeredgewidth=2.4)
        if not math.isfinite(row.gap.mean):
            axes.annotate("the loss is not finite", (0, y), (6, 0), textcoords="offset points", va="center")
    _name_rows(axes, [row.name for row in rows])
    axes.set_xlim(-reach, reach)
    axes.set_xlabel(label)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    return figure


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of a figure, the first one on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(False, axis="y")


def plot_gaps(comparison: Comparison, colors: Sequence[str]) -> Figure:
    """Final gap of every recipe that has one, and the bound of the comparison."""
    both = zip(comparison.recipes, colors, strict=True)
    shown = [(row, color) for row, color in both if row.verdict and row.gap is not None]
    return plot_gap_rows(
        [row for row, _ in shown], [color for _, color in shown], bound_fraction=comparison.bound_fraction,
        label=gap_label(comparison.baseline),
    )  # fmt: skip


UPRIGHT_GAP_LABEL = "gap (%)  worse \u2192"
"""Of a vertical axis, where it reads upwards."""


def gap_label(baseline: str) -> str:
    """Label of a horizontal axis of gaps."""
    return f"better \u2190  gap to {baseline} (%)  \u2192 worse"


def band_text(recipes: Sequence[DrawnRecipe], confidence: float) -> str:
    """What the band of a gap is; with two seeds an interval would be as wide as the panel."""
    return "the range over the seeds" if _has_few_seeds(recipes) else f"the {confidence:.0%} interval of its mean"


def _has_few_seeds(recipes: Sequence[DrawnRecipe]) -> bool:
    return min(len(recipe.pairs) for recipe in recipes) < MIN_SEEDS_OF_BAND


@plot_style(PAGE_STYLE)
def plot_validation(recipes: Sequence[DrawnRecipe], *, confidence: float) -> Optional[Figure]:
    """Validation loss over tokens; below it the gap to the baseline with the interval of its mean, or its range.

    None if no run was validated.
    """
    band = seed_statistics.full_range if _has_few_seeds(recipes) else seed_statistics.interval_band(confidence)
    gaps = _curves(_without_baseline(recipes), lambda pair: seed_statistics.validation_gap(pair.base, pair.run), band)
    losses = _run_curves(recipes, seed_statistics.validation_losses)
    figure = _plot_with_gaps(losses, gaps, "validation loss (nats)", marker="o")
    if figure is not None:
        _mark_phases(figure.axes[0], recipes)
        _add_perplexity(figure.axes[0])
    return figure


@plot_style(PAGE_STYLE)
def plot_time(recipes: Sequence[DrawnRecipe]) -> Optional[Figure]:
    """Validation loss over the time spent in steps; None if no run was validated."""
    curves = _run_curves(recipes, seed_statistics.validation_losses_over_time)
    if not curves:
        return None
    figure, axes = _figure(2.9)
    _draw_losses(axes, curves, "validation loss (nats)", marker="o")
    axes.set_xlabel("time in steps (s)")
    add_legend(axes)
    return figure


@plot_style(PAGE_STYLE)
def plot_training(recipes: Sequence[DrawnRecipe]) -> Optional[Figure]:
    """Training loss over tokens; below it the smoothed gap to the baseline with the range over the seeds.

    None if no run has steps.
    """
    losses = _run_curves(recipes, _smoothed_loss)
    gaps = _curves(_without_baseline(recipes), seed_statistics.smoothed_gap)
    figure = _plot_with_gaps(losses, gaps, "training loss (nats)")
    if figure is not None:
        _mark_phases(figure.axes[0], recipes)
    return figure


@plot_style(PAGE_STYLE)
def plot_grad_norms(recipes: Sequence[DrawnRecipe]) -> Optional[Figure]:
    """Gradient norm before clipping over tokens; None if no run recorded it."""
    from matplotlib.ticker import LogLocator

    curves = _run_curves(recipes, partial(seed_statistics.smoothed_field, field="grad_norm"))
    if not curves:
        return None
    figure, axes = _figure(2.9)
    _draw(axes, curves)
    axes.set_yscale("log", subs=())  # every label of a minor tick would hide others over a decade
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel("gradient norm")
    _token_axis(axes)
    add_legend(axes)
    return figure


@plot_style(PAGE_STYLE)
def plot_speed_and_memory(comparison: Comparison, colors: Sequence[str]) -> Optional[Figure]:
    """Tokens per second and peak memory, one bar per recipe; without a panel that has no value, None without any."""
    from matplotlib.ticker import MaxNLocator

    rows = comparison.drawn
    colors = [color for row, color in zip(comparison.recipes, colors, strict=True) if row in rows]
    panels: dict[str, tuple[Callable[[float], str], list[Optional[float]]]] = {
        "tokens/s": (count_text, [row.tokens_per_second for row in rows]),
        "peak memory (GiB)": ("{:.3g}".format, [row.memory_peak_bytes and row.memory_peak_bytes / GIB for row in rows]),
    }
    panels = {label: (shown, values) for label, (shown, values) in panels.items() if any(values)}
    if not panels:
        return None
    figure, grid = _figure(0.8 + 0.34 * len(rows), columns=len(panels))
    for axes, (label, (shown, values)) in zip(np.atleast_1d(grid), panels.items(), strict=True):
        known = [value or 0.0 for value in values]
        bars = axes.barh(range(len(rows)), known, color=colors, alpha=0.75, height=0.6)
        texts = ["not measured" if value is None else shown(value) for value in values]
        axes.bar_label(bars, texts, padding=4)
        axes.set_xlim(0, 1.28 * max(known))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        if max(known) >= 1000:
            use_si_prefixes(axes.xaxis)
        axes.set_xlabel(label)
        _name_rows(axes, [row.name if axes is figure.axes[0] else "" for row in rows])
    return figure


def _figure(
    height: float, *, rows: int = 1, columns: int = 1, width: float = WIDTH_INCHES, ratios: tuple[float, float] = (1, 1)
) -> tuple[Figure, Any]:
    figure = new_figure(width, height)
    return figure, figure.subplots(rows, columns, sharex=rows > 1, height_ratios=ratios if rows == 2 else None)


def _height_ratios(gaps: Curves) -> tuple[float, float]:
    """Heights of the losses and of the gaps: equal curves hide each other, so their gaps get the room."""
    ends = [np.abs(curve.mean[math.ceil(len(curve.mean) * STEEP_FRACTION) :]) for _, curve in gaps]
    finite = np.concatenate([np.zeros(1), *(values[np.isfinite(values)] for values in ends)])
    return (1, 1.7) if finite.max() < VISIBLE_GAP_FRACTION else (1.7, 1)


def _plot_with_gaps(losses: Curves, gaps: Curves, loss_label: str, marker: str = "") -> Optional[Figure]:
    """Losses, and below them the gaps if there are any; None without losses."""
    if not losses:
        return None
    figure, panels = _figure(4.6, rows=2, ratios=_height_ratios(gaps)) if gaps else _figure(2.9)
    above, *below = np.atleast_1d(panels)
    _draw_losses(above, losses, loss_label, marker)
    for axes in below:
        _draw_gaps(axes, gaps, marker)
    _token_axis(figure.axes[-1])
    add_legend(above)
    return figure


def _draw_losses(axes: Axes, losses: Curves, label: str, marker: str = "") -> None:
    """Loss curves, with the axis limited to the losses after the steep first part of the runs."""
    _draw(axes, losses, marker=marker)
    axes.set_ylabel(label)
    curves = [finite for values in _y_values(axes) if (finite := values[np.isfinite(values)]).size]
    if not curves:
        return
    low = min(values.min() for values in curves)
    steep_fraction = 0 if marker else STEEP_FRACTION  # validations are few, and the first one comes late
    high = max(values[min(len(values) - 1, math.ceil(len(values) * steep_fraction))] for values in curves)
    if high > low:
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def _draw_gaps(axes: Axes, gaps: Curves, marker: str = "") -> None:
    """Gaps in percent, with an axis that is symmetric about zero and ignores the steep first part of the runs."""
    _draw(axes, [(recipe, _percent(curve)) for recipe, curve in gaps], marker=marker)
    axes.set_ylabel(UPRIGHT_GAP_LABEL)
    ends = [values[math.ceil(len(values) * STEEP_FRACTION) :] for values in _y_values(axes)]
    sizes = np.abs(np.concatenate([*ends, [100 * MIN_REACH_FRACTION]]))
    limit = 1.5 * float(np.max(sizes[np.isfinite(sizes)]))
    axes.axhline(0, color=INK, linewidth=3, alpha=0.35, zorder=1)
    axes.set_ylim(-limit, limit)


def _curves(
    recipes: Sequence[DrawnRecipe],
    points: Callable[[Pair], tuple[np.ndarray, np.ndarray]],
    band: Callable[[np.ndarray], tuple[float, float]] = seed_statistics.full_range,
) -> Curves:
    """The curves of recipes, averaged over their pairs; without those that have no value."""
    curves = [(recipe, over_seeds([points(pair) for pair in recipe.pairs], band)) for recipe in recipes]
    return [(recipe, curve) for recipe, curve in curves if np.isfinite(curve.mean).any()]


def _run_curves(recipes: Sequence[DrawnRecipe], points: Callable[[LoadedRun], tuple[np.ndarray, np.ndarray]]) -> Curves:
    """`_curves` of points of the runs themselves."""
    return _curves(recipes, lambda pair: points(pair.run))


def _without_baseline(recipes: Sequence[DrawnRecipe]) -> list[DrawnRecipe]:
    return [recipe for recipe in recipes if not recipe.is_baseline]


def _draw(axes: Axes, curves: Curves, *, marker: str = "") -> None:
    for recipe, complete in curves:
        curve = thinned(complete)
        # The baseline is wide and pale, so that a curve on top of it leaves both visible.
        width, alpha = (4.5, 0.35) if recipe.is_baseline else (1.6, 1.0)
        axes.fill_between(curve.x, curve.low, curve.high, color=recipe.color, alpha=0.13, linewidth=0)
        axes.plot(curve.x, curve.mean, color=recipe.color, linewidth=width, alpha=alpha, marker=marker, markersize=3.5,
                  label=recipe.name)  # fmt: skip


def _mark_phases(axes: Axes, recipes: Sequence[DrawnRecipe]) -> None:
    """Mark where a phase of data began, with its name, in the first run."""
    for name, tokens in recipes[0].runs[0].data_phases.items():
        mark(axes, f"data: {name}", tokens, INK)


def thinned(curve: Curve) -> Curve:
    """Every n-th point of a curve, at most `MAX_POINTS`, with the last one."""
    stride = max(1, math.ceil(len(curve.x) / MAX_POINTS))
    chosen = np.arange(len(curve.x) - 1, -1, -stride)[::-1]
    return Curve(x=curve.x[chosen], mean=curve.mean[chosen], low=curve.low[chosen], high=curve.high[chosen])


def _percent(curve: Curve) -> Curve:
    return Curve(x=curve.x, mean=100 * curve.mean, low=100 * curve.low, high=100 * curve.high)


def _y_values(axes: Axes) -> list[np.ndarray]:
    return [np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.get_lines()]


def _add_perplexity(axes: Axes) -> None:
    right = axes.secondary_yaxis("right")
    right.yaxis.set_major_formatter(lambda loss, _: f"{math.exp(loss):.3g}" if loss < MAX_EXPONENT else "")
    right.set_ylabel("perplexity")
    right.grid(False)


def _token_axis(axes: Axes) -> None:
    axes.set_xlabel("training tokens")
    axes.set_xlim(left=0)
    use_si_prefixes(axes.xaxis)


@plot_style(PAGE_STYLE)
def make_narrow(figure: Figure) -> Figure:
    """The same figure for a narrow screen: fonts keep their size, axes and legend are fitted again."""
    for legend in list(figure.legends):
        _, num_rows = legend_shape([text.get_text() for text in legend.get_texts()], figure.get_figwidth())
        figure.set_figheight(figure.get_figheight() - num_rows * LEGEND_ROW_INCHES)
        legend.remove()
        figure.set_figwidth(NARROW_INCHES)
        add_legend(figure.axes[0])
    figure.set_figwidth(NARROW_INCHES)
    return figure


def legend_shape(labels: Sequence[str], width_inches: float) -> tuple[int, int]:
    """Columns and rows of a legend in a figure of this width."""
    widths = [len(label) + LINE_LETTERS for label in labels]
    room = int(LETTERS_PER_INCH * width_inches)
    num_columns = len(labels) if sum(widths) <= room else max(1, room // max(widths))
    return num_columns, math.ceil(len(labels) / num_columns)


def add_legend(axes: Axes) -> None:
    """Add a legend above the axes of the figure, which grows by the height of the legend."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure = axes.get_figure(root=True)
        assert figure is not None
        num_columns, num_rows = legend_shape(labels, figure.get_figwidth())
        figure.set_figheight(figure.get_figheight() + num_rows * LEGEND_ROW_INCHES)
        figure.legend(handles, labels, loc="outside upper left", ncols=num_columns, handlelength=1.6,
                      columnspacing=1.4)  # fmt: skip


@plot_style({"font.size": 13, "axes.titlesize": 16})
def plot_loss_curves(recipes: Sequence[DrawnRecipe], output: Path, title: str) -> Path:
    """Write a PNG of the losses over training tokens, of the first seed of each recipe.

    Lines are running means over a twenty-fifth of the run, markers the validation losses. The lower panel shows the gap
    of each run to the first at the same step in percent.

    Raises:
        DataError: a run has no step records.
    """
    recipes = [replace(recipe, name=_final_loss(recipe), pairs=recipe.pairs[:1]) for recipe in recipes]
    runs = [recipe.runs[0] for recipe in recipes]
    for run in runs:
        if not run.steps:
            raise DataError(f"run {run.name} ({run.folder}) has no step records: there is no curve to draw")
    gaps = _curves(recipes[1:], seed_statistics.smoothed_gap)
    figure, panels = _figure(
        HEIGHT_PIXELS / 100, rows=min(2, len(runs)), width=WIDTH_PIXELS / 100, ratios=_height_ratios(gaps)
    )
    above, *below = np.atleast_1d(panels)
    for recipe in recipes:
        above.plot(*seed_statistics.validation_losses(recipe.runs[0]), **_marker(recipe))
    _draw_losses(above, _run_curves(recipes, _smoothed_loss), "loss (nats per token)")
    above.plot([], [], "o", color=GRAY, label="markers and numbers: validation")
    _mark_phases(above, recipes)
    above.set_title(title, pad=12)
    above.legend(loc="upper right")
    for axes in below:
        for recipe in recipes[1:]:
            tokens, validated = seed_statistics.validation_gap(recipe.pairs[0].base, recipe.pairs[0].run)
            axes.plot(tokens, 100 * validated, **_marker(recipe))
        _draw_gaps(axes, gaps)
    _token_axis(figure.axes[-1])
    return save_figure(figure, output)


def _marker(recipe: DrawnRecipe) -> dict[str, Any]:
    """Marker of validation losses: a ring for the baseline, a diamond for the others."""
    shape = {"marker": "o", "markersize": 10} if recipe.is_baseline else {"marker": "D", "markersize": 5}
    return {"linestyle": "none", "color": recipe.color, "zorder": 4, "markerfacecolor": "white", **shape}


def _final_loss(recipe: DrawnRecipe) -> str:
    """The name of the recipe and the last validation loss."""
    last = recipe.runs[0].last_validation
    return f"{recipe.name} {last.loss:.4f}" if last else recipe.name
