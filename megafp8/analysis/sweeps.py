"""Sweeps of hyperparameters at one size: the settings that differ, their ranking, and parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

from megafp8.analysis.percent import count_text
from megafp8.analysis.plot_comparison import WIDTH_INCHES
from megafp8.analysis.plotting import COLORS, GRAY, INK, PAGE_STYLE, new_figure, plot_style
from megafp8.analysis.scaling_laws import CellRow
from megafp8.analysis.study_points import RECIPE_AXIS, hyperparameters
from megafp8.analysis.tables import Table, optional

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LABELS = 8
ALT_TEXT = "A line for each setting over its values to its loss; the best one is bold"


def axes_of(cells: Sequence[CellRow]) -> list[str]:
    """The hyperparameters on which the configurations of a single size differ; none if there are several sizes."""
    has_one_size = len({cell.parameters for cell in cells}) == 1
    return hyperparameters(cell.options for cell in cells) if has_one_size else []


def columns_of(cells: Sequence[CellRow]) -> list[str]:
    """The same, after the recipe if there are several."""
    has_recipes = len({cell.recipe for cell in cells}) > 1
    return [*([RECIPE_AXIS] if has_recipes else []), *axes_of(cells)]


def value_of(cell: CellRow, axis: str) -> str:
    """The option of a configuration on an axis, without the axis' name."""
    return cell.recipe if axis == RECIPE_AXIS else cell.options.get(axis, "").removeprefix(axis)


def settings_text(cell: CellRow, columns: Sequence[str]) -> str:
    """A configuration in words: `lr 3e-3, warmup 100`."""
    return ", ".join(f"{axis} {value_of(cell, axis)}" for axis in columns)


def order(cell: CellRow) -> tuple[bool, float]:
    """Sorts by loss, and diverged configurations last."""
    return not math.isfinite(cell.mean), cell.mean


def ranked(cells: Sequence[CellRow]) -> list[CellRow]:
    """The configurations by mean loss."""
    return sorted(cells, key=order)


def best_of(cells: Sequence[CellRow]) -> CellRow:
    """The lowest mean loss among the configurations with the most seeds: one of few seeds may be low by chance."""
    return min(cells, key=lambda cell: (-len(cell.seeds), order(cell)))


def headline(cells: Sequence[CellRow], loss_name: str) -> str:
    """The best settings, and what the next ones lose."""
    columns, best = columns_of(cells), best_of(cells)
    text = f"The best of {len(cells)} settings is {settings_text(best, columns)}: {loss_name} {best.mean:.4f}"
    others = [cell for cell in ranked(cells) if cell is not best and len(cell.seeds) == len(best.seeds)]
    if not others or not math.isfinite(others[0].mean):
        return f"{text}."
    gap = others[0].mean - best.mean
    chance = " That is no more than the spread of seeds." if best.spread is not None and gap <= best.spread else ""
    return f"{text}, {gap:.4f} below {settings_text(others[0], columns)}.{chance}"


def ranking_table(cells: Sequence[CellRow], loss_name: str) -> Table:
    """All configurations, the best first."""
    columns, best = columns_of(cells), best_of(cells)
    rows = tuple(
        (
            str(rank), "best" if cell is best else "", *(value_of(cell, axis) for axis in columns), f"{cell.mean:.4f}",
            f"{cell.mean - best.mean:+.4f}", optional(cell.spread, "{:.4f}"), str(len(cell.seeds)),
            count_text(cell.tokens),
        )
        for rank, cell in enumerate(ranked(cells), start=1)
    )  # fmt: skip
    return Table(
        title="Ranking",
        header=("rank", "", *columns, "mean loss", "to the best", "spread over seeds", "seeds", "tokens"), rows=rows,
        note=f"By {loss_name} in nats a token. Best is the lowest among the settings with the most seeds.", sides="rl",
    )  # fmt: skip


def ranking_rows(cells: Sequence[CellRow]) -> list[dict[str, Any]]:
    """The ranking for JSON and CSV, a row for each configuration."""
    columns, best = columns_of(cells), best_of(cells)
    return [
        {"rank": rank, "is_best": cell is best} | {axis: value_of(cell, axis) for axis in columns}
        | {"loss": cell.mean, "spread": cell.spread, "seeds": len(cell.seeds), "tokens": cell.tokens}
        for rank, cell in enumerate(ranked(cells), start=1)
    ]  # fmt: skip


@plot_style(PAGE_STYLE)
def plot_coordinates(cells: Sequence[CellRow], loss_name: str) -> Figure:
    """Parallel coordinates: an upright axis for each hyperparameter, and on the right that of the loss."""
    columns, best = columns_of(cells), best_of(cells)
    figure = new_figure(WIDTH_INCHES, 4.6)
    axes = figure.subplots()
    axes.set_title(f"Settings and {loss_name}")
    finite = [cell.mean for cell in cells if math.isfinite(cell.mean)] or [0.0]
    low, high = min(finite), max(finite)
    ends = [1.0 if not math.isfinite(cell.mean) else (cell.mean - low) / ((high - low) or 1.0) for cell in cells]
    heights = [positions([value_of(cell, axis) for cell in cells]) for axis in columns]
    for cell, end, *values in zip(cells, ends, *heights, strict=True):
        line = (*values, end)
        if cell is best:
            axes.plot(line, color=COLORS[0], linewidth=3, zorder=3)
        else:  # the better, the darker
            style = "-" if math.isfinite(cell.mean) else ":"
            axes.plot(line, style, color=COLORS[1], linewidth=1.2, alpha=0.25 + 0.55 * (1 - end))
    for x, (axis, column) in enumerate(zip(columns, heights, strict=True)):
        labels = dict(zip(column, (value_of(cell, axis) for cell in cells), strict=True))
        draw_axis(axes, x, sorted(labels.items()))
    draw_axis(axes, len(columns), [(0.0, f"{low:.4f}"), (1.0, f"{high:.4f}")])
    axes.set_xticks(range(len(columns) + 1), [*columns, loss_name])
    axes.set_xlim(-0.35, len(columns) + 0.45)
    axes.yaxis.set_visible(False)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure


def positions(values: Sequence[str]) -> list[float]:
    """Heights from 0 to 1 on an axis, evenly spaced in the order of the values: of numbers, else of their names."""
    levels = sorted(set(values), key=sort_key)
    return [levels.index(value) / max(1, len(levels) - 1) for value in values]


def sort_key(text: str) -> tuple[bool, Union[float, str]]:
    """Numbers by value, then names."""
    try:
        return False, float(text)
    except ValueError:
        return True, text


def draw_axis(axes: Axes, x: float, labels: Sequence[tuple[float, str]]) -> None:
    """An upright axis; of many labels only some."""
    axes.axvline(x, color=GRAY, linewidth=1)
    for y, text in labels[:: -(-len(labels) // MAX_LABELS)]:
        axes.annotate(text, (x, y), (5, 7), textcoords="offset points", va="center", color=INK, zorder=4)
