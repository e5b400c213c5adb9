"""A coordinate check: how the sizes of activations depend on the width, as slopes with their noise and as figures.

A size that is proportional to width^s has the slope s in logarithms. It is fitted for each seed, so that the seeds give
its noise. muP is derived for infinite widths, which others approach with errors that fall with the width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megafp8.analysis.plotting import new_figure, plot_style
from megafp8.analysis.seed_statistics import Interval, mean_interval
from megafp8.utils.formatting import text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIMIT = 0.1
"""Slopes of finite widths that count as flat: 7% for a doubled width."""
SMALLEST_GROWTH = 0.5
"""Of what grows in standard parametrization: an interval that has it cannot call anything flat."""
GROWS, SHRINKS, FLAT, UNDECIDED, NO_SLOPE = "grows", "shrinks", "flat", "not decided", "diverged, or no update"
LOGITS = "logits"
STANDARD, MUP = "standard", "muP"
PANEL_INCHES = 2.2
SMALLEST_SPAN = 10.0
"""Of a column's y axis, as a factor."""


class Coordinate(NamedTuple):
    """A row of coordinates.csv: an activation in the forward pass of a step.

    Attributes:
        parametrization: `STANDARD` or `MUP`.
        size: root mean square.
        change: root mean square of the difference from the first step.
    """

    recipe: str
    parametrization: str
    seed: int
    width: int
    step: int
    activation: str
    size: float
    change: float


@dataclass(frozen=True, kw_only=True)
class Slope:
    """How an activation depends on the width.

    Attributes:
        size: slope in the first step, of the initial weights.
        change: slope of what the updates of all steps have changed.
    """

    recipe: str
    parametrization: str
    activation: str
    size: Interval
    change: Interval

    @property
    def verdict(self) -> str:
        """Of the change, and of the initial size where that is not flat; the initial logits of muP shrink as
        1 / sqrt(width)."""
        of_size = direction(self.size)
        is_expected = of_size == FLAT or (of_size == SHRINKS and self.activation == LOGITS)
        return direction(self.change) if is_expected else of_size


def direction(slope: Interval) -> str:
    """Whether a slope is beyond `LIMIT` by more than the noise of the seeds; not decided with one seed."""
    if not math.isfinite(slope.mean):
        return NO_SLOPE
    if slope.low is None or slope.high is None:
        return UNDECIDED
    if slope.low > LIMIT or slope.high < -LIMIT:
        return GROWS if slope.low > LIMIT else SHRINKS
    return FLAT if max(slope.high, -slope.low) < SMALLEST_GROWTH else UNDECIDED


def fit_slopes(rows: Sequence[Coordinate]) -> list[Slope]:
    """The slopes of each recipe, parametrization and activation, in the order of the rows."""
    last = max(row.step for row in rows)
    groups: dict[tuple[str, str, str], list[Coordinate]] = {}
    for row in rows:
        groups.setdefault((row.recipe, row.parametrization, row.activation), []).append(row)
    return [
        Slope(
            recipe=recipe,
            parametrization=parametrization,
            activation=activation,
            size=seed_slopes([(each.seed, each.width, each.size) for each in own if each.step == 1]),
            change=seed_slopes([(each.seed, each.width, each.change) for each in own if each.step == last]),
        )
        for (recipe, parametrization, activation), own in groups.items()
    ]


def seed_slopes(values: Sequence[tuple[int, int, float]]) -> Interval:
    """The slope of log(value) over log(width), with its interval over seeds; NaN if a value is not above 0.

    Args:
        values: seed, width and value; at least two widths of each seed.
    """
    found = []
    for seed in dict.fromkeys(seed for seed, _, _ in values):
        points = np.array([(width, value) for each, width, value in values if each == seed])
        is_positive = np.isfinite(points).all() and (points > 0).all()
        found.append(float(np.polyfit(np.log(points[:, 0]), np.log(points[:, 1]), 1)[0]) if is_positive else math.nan)
    return mean_interval(found)


def slope_table(slopes: Sequence[Slope]) -> str:
    """The slopes as text."""
    rows = [
        [each.recipe, each.parametrization, each.activation, as_text(each.size), as_text(each.change), each.verdict]
        for each in slopes
    ]
    header = ("recipe", "parametrization", "activation", "slope of initial size", "slope of change", "verdict")
    return text_table(header, rows, "lllrrl")


def as_text(slope: Interval) -> str:
    """A slope and half the width of its interval."""
    noise = "" if slope.high is None else f" +- {slope.high - slope.mean:.2f}"
    return f"{slope.mean:+.2f}{noise}"


def verdict_lines(slopes: Sequence[Slope]) -> list[str]:
    """A line for each recipe and parametrization."""
    lines = []
    for recipe, parametrization in dict.fromkeys((each.recipe, each.parametrization) for each in slopes):
        own = [each for each in slopes if (each.recipe, each.parametrization) == (recipe, parametrization)]
        parts = [
            f"{verdict}: {', '.join(names)}"
            for verdict in (GROWS, SHRINKS, UNDECIDED, NO_SLOPE)
            if (names := [each.activation for each in own if each.verdict == verdict])
        ]
        lines.append(f"{recipe}, {parametrization}: {'; '.join(parts) or 'flat within the noise of the seeds'}")
    return lines


@plot_style({"axes.titlesize": 9, "axes.titleweight": "normal", "font.size": 8})
def plot_coordinates(rows: Sequence[Coordinate], recipe: str) -> Figure:
    """Sizes over the width: a column for each activation, a row for each parametrization, a line for each step.

    Lines are geometric means over seeds, bands reach from the smallest to the largest. Steps double from line to line.
    """
    own = [row for row in rows if row.recipe == recipe]
    parametrizations = list(dict.fromkeys(row.parametrization for row in own))
    activations = list(dict.fromkeys(row.activation for row in own))
    figure = new_figure(PANEL_INCHES * len(activations), PANEL_INCHES * len(parametrizations) + 0.3)
    grid = figure.subplots(len(parametrizations), len(activations), sharex=True, sharey="col", squeeze=False)
    for line, parametrization in zip(grid, parametrizations, strict=True):
        for axes, activation in zip(line, activations, strict=True):
            draw_panel(axes, [r for r in own if (r.parametrization, r.activation) == (parametrization, activation)])
            axes.set_title(activation if parametrization == parametrizations[0] else "")
        line[0].set_ylabel(f"{parametrization}\nroot mean square")
    for axes in grid[-1]:
        axes.set_xlabel("hidden size")
        low, high = axes.get_ylim()
        if high / low < SMALLEST_SPAN:  # else the noise of the embedding would look like a trend
            middle = math.sqrt(low * high)
            axes.set_ylim(middle / math.sqrt(SMALLEST_SPAN), middle * math.sqrt(SMALLEST_SPAN))
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", title=recipe, fontsize=7)
    return figure


def draw_panel(axes: Axes, rows: Sequence[Coordinate]) -> None:
    """Draw the sizes of one activation."""
    from matplotlib import colormaps

    steps = sorted({row.step for row in rows})
    steps = [step for step in steps if step & (step - 1) == 0 or step == steps[-1]]
    widths = sorted({row.width for row in rows})
    for index, step in enumerate(steps):
        # [widths, seeds]
        sizes = np.array([[row.size for row in rows if (row.step, row.width) == (step, width)] for width in widths])
        color = colormaps["viridis"](0.9 * index / max(1, len(steps) - 1))
        axes.plot(widths, np.exp(np.log(sizes).mean(1)), color=color, linewidth=1.2, label=f"step {step}")
        axes.fill_between(widths, sizes.min(1), sizes.max(1), color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
