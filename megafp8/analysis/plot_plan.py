"""Figure of a training plan: scaling over GPUs, memory and step time of the best layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megafp8.analysis.percent import count_text
from megafp8.analysis.plotting import COLORS, LIMIT_COLOR, new_figure, plot_style, save_figure
from megafp8.errors import DataError
from megafp8.planning.layouts import PlannedLayout
from megafp8.planning.plan import Plan
from megafp8.planning.report import GIB, memory_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Every colour, then a paler one of each.
PART_COLORS = (*COLORS, "#f2a97f", "#80b8d8", "#80cebd", "#e8c8d8", "#f3cf80", "#868e96")
OTHERS_COLOR = "#f1f3f5"
MAX_LAYOUTS = 5
MIN_PART_FRACTION = 0.02
"""Parts of a step that are smaller are drawn together as "others"."""


@plot_style()
def plot_plan(plan: Plan, output: Path) -> Path:
    """Write a PNG.

    Raises:
        DataError: no layout fits.
    """
    layouts = plan.search.layouts[:MAX_LAYOUTS]
    if not layouts:
        raise DataError(f"no layout fits on {plan.search.world_size} x {plan.gpu.name}: there is nothing to draw")
    figure = new_figure(14, 9)
    by_count = {count: layout for count, layout in plan.scaling.items() if layout is not None}
    grid = figure.add_gridspec(2 if by_count else 1, 2)
    shares = [_shares(layout) for layout in by_count.values()]
    seconds = [{name: share * layout.step.seconds for name, share in _shares(layout).items()} for layout in layouts]
    # The two panels of steps have the same parts and colours, and so one legend.
    parts = _part_names([*shares, *seconds])
    if by_count:
        _draw_scaling(figure.add_subplot(grid[0, 0]), by_count, plan.gpu.name)
        axes = figure.add_subplot(grid[0, 1])
        _draw_stacks(axes, shares, parts, "Parts of a step of the fastest layout")
        axes.set_ylabel("share of the step")
        axes.set_ylim(0, 1)
        _label_counts(axes, by_count)
    _draw_memory(figure.add_subplot(grid[-1, 0]), layouts, plan.gpu.memory_bytes)
    axes = figure.add_subplot(grid[-1, 1])
    _draw_stacks(axes, seconds, parts, "Step time of the best layouts", has_legend=not by_count)
    axes.set_ylabel("seconds of a step")
    _label_layouts(axes, layouts)
    return save_figure(figure, output)


def _draw_scaling(axes: Axes, by_count: Mapping[int, PlannedLayout], gpu: str) -> None:
    """Speed of the fastest layout for each number of GPUs."""
    speeds = [layout.step.tokens_per_s_per_gpu for layout in by_count.values()]
    axes.plot(range(len(speeds)), speeds, marker="o", color=COLORS[0], linewidth=2)
    axes.set_ylim(0, 1.15 * max(speeds))
    axes.set_ylabel("tokens/s of one GPU")
    _label_counts(axes, by_count)
    axes.set_title(f"Speed of the fastest layout on {gpu}, the same batch")
    axes.grid(False, axis="x")


def _draw_memory(axes: Axes, layouts: Sequence[PlannedLayout], capacity_bytes: int) -> None:
    """Memory of each layout by part, and the GPU's capacity."""
    parts = [{name: size / GIB for name, size in memory_parts(layout).items()} for layout in layouts]
    _draw_stacks(axes, parts, _part_names(parts), "Memory of the best layouts")
    axes.axhline(capacity_bytes / GIB, color=LIMIT_COLOR, linewidth=1.5)
    axes.text(-0.45, capacity_bytes / GIB, "Memory of the GPU", color=LIMIT_COLOR, va="bottom", fontsize=10)
    axes.set_ylim(0, 1.12 * capacity_bytes / GIB)
    axes.set_ylabel("GiB of the fullest GPU")
    _label_layouts(axes, layouts)


def _shares(layout: PlannedLayout) -> dict[str, float]:
    """Fractions of the step time by part, small parts summed up as "others"."""
    parts = {name: seconds / layout.step.seconds for name, seconds in layout.step.parts.items()}
    large = {name: share for name, share in parts.items() if share >= MIN_PART_FRACTION}
    return large | {"others": 1 - sum(large.values())}


def _part_names(bars: Sequence[Mapping[str, float]]) -> list[str]:
    """The parts of stacked bars, "others" last."""
    names = list(dict.fromkeys(name for bar in bars for name in bar if name != "others"))
    return [*names, *(["others"] if any("others" in bar for bar in bars) else [])]


def _draw_stacks(
    axes: Axes, bars: Sequence[Mapping[str, float]], names: Sequence[str], title: str, has_legend: bool = True
) -> None:
    """Stacked bars; a part has the same color in all of them."""
    bottoms = [0.0] * len(bars)
    for index, name in enumerate(names):
        heights = [bar.get(name, 0.0) for bar in bars]
        color = OTHERS_COLOR if name == "others" else PART_COLORS[index % len(PART_COLORS)]
        axes.bar(range(len(bars)), heights, bottom=bottoms, color=color, width=0.72, label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    handles, labels = axes.get_legend_handles_labels()
    if has_legend:
        axes.legend(handles[::-1], labels[::-1], fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_title(title)
    axes.grid(False, axis="x")


def _label_counts(axes: Axes, by_count: Mapping[int, PlannedLayout]) -> None:
    axes.set_xticks(range(len(by_count)), [count_text(count) for count in by_count], fontsize=8)
    axes.set_xlabel("GPUs")


def _label_layouts(axes: Axes, layouts: Sequence[PlannedLayout]) -> None:
    names = [
        layout.name.replace(", ", "\n").replace(" VPP", "\nVPP").replace(" DP", "\nDP").replace("micro batch", "MBS")
        for layout in layouts
    ]
    axes.set_xticks(range(len(layouts)), names, fontsize=8)
