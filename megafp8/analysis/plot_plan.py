"""A plan as a picture: speed of a GPU over the number of GPUs, memory of the best layouts, where their steps go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megafp8.errors import DataError
from megafp8.planning.layouts import PlannedLayout
from megafp8.planning.plan import Plan
from megafp8.planning.report import GIB, memory_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = (
    "#1971c2", "#74c0fc", "#2f9e44", "#8ce99a", "#e8590c", "#ffc078", "#9c36b5", "#e599f7", "#c2255c", "#868e96",
    "#ced4da", "#0c8599",
)  # fmt: skip
MOST_LAYOUTS = 5
SMALL_FRACTION = 0.02
"""Parts of a step below this in every layout are drawn as one."""


def plot_plan(plan: Plan, output: Path) -> Path:
    """Write a PNG.

    Raises:
        DataError: nothing fits, so there is nothing to draw.
    """
    layouts = plan.found.layouts[:MOST_LAYOUTS]
    if not layouts:
        raise DataError(f"no layout fits on {plan.found.world_size} x {plan.gpu.name}: there is nothing to draw")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 9), dpi=100, layout="constrained", facecolor="white")
    fitting = {count: layout for count, layout in plan.scaling.items() if layout is not None}
    grid = figure.add_gridspec(2, 2) if fitting else figure.add_gridspec(1, 2)
    if fitting:
        _draw_scaling(figure.add_subplot(grid[0, 0]), fitting, plan.gpu.name)
        _draw_scaling_parts(figure.add_subplot(grid[0, 1]), fitting)
    _draw_memory(figure.add_subplot(grid[-1, 0]), layouts, plan.gpu.memory_bytes)
    _draw_steps(figure.add_subplot(grid[-1, 1]), layouts)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    return output


def _draw_scaling(axes: Axes, fitting: dict[int, PlannedLayout], gpu: str) -> None:
    """Speed of the fastest layout for each number of GPUs."""
    speeds = [layout.step.tokens_per_s_per_gpu for layout in fitting.values()]
    axes.plot(range(len(fitting)), speeds, marker="o", color=COLORS[0], linewidth=2)
    axes.set_ylim(0, 1.15 * max(speeds))
    axes.set_ylabel("tokens/s of one GPU")
    _count_axis(axes, fitting)
    _style(axes, f"speed of the fastest layout on {gpu}, the same batch")


def _draw_scaling_parts(axes: Axes, fitting: dict[int, PlannedLayout]) -> None:
    """Shares of the step for each number of GPUs."""
    shares = [_shares(layout) for layout in fitting.values()]
    _stack(axes, shares)
    axes.set_ylabel("share of the step")
    axes.set_ylim(0, 1)
    _count_axis(axes, fitting)
    _style(axes, "where its step goes")


def _draw_memory(axes: Axes, layouts: Sequence[PlannedLayout], capacity_bytes: int) -> None:
    """Memory of each layout by part, under what the GPU has."""
    _stack(axes, [{name: size / GIB for name, size in memory_parts(layout).items()} for layout in layouts])
    axes.axhline(capacity_bytes / GIB, color="#c92a2a", linewidth=1.5)
    axes.text(-0.45, capacity_bytes / GIB, "memory of the GPU", color="#c92a2a", va="bottom", fontsize=10)
    axes.set_ylim(0, 1.12 * capacity_bytes / GIB)
    axes.set_ylabel("GiB of the fullest GPU")
    _layout_axis(axes, layouts)
    _style(axes, "memory of the best layouts")


def _draw_steps(axes: Axes, layouts: Sequence[PlannedLayout]) -> None:
    """Seconds of a step of each layout by part."""
    steps = [
        {name: share * layout.step.seconds for name, share in _shares(layout).items()} for layout in layouts
    ]  # fmt: skip
    _stack(axes, steps)
    axes.set_ylabel("seconds of a step")
    _layout_axis(axes, layouts)
    _style(axes, "steps of the best layouts")


def _shares(layout: PlannedLayout) -> dict[str, float]:
    """Parts of the step, in one order, the small ones together."""
    parts = {name: seconds / layout.step.seconds for name, seconds in layout.step.parts.items()}
    large = {name: share for name, share in parts.items() if share >= SMALL_FRACTION}
    return large | {"others": 1 - sum(large.values())}


def _stack(axes: Axes, bars: Sequence[dict[str, float]]) -> None:
    """Stacked bars; a part has one color in all of them."""
    names = list(dict.fromkeys(name for bar in bars for name in bar if name != "others"))
    names += ["others"] if any("others" in bar for bar in bars) else []
    bottoms = [0.0] * len(bars)
    for index, name in enumerate(names):
        heights = [bar.get(name, 0.0) for bar in bars]
        color = "#f1f3f5" if name == "others" else COLORS[index % len(COLORS)]
        axes.bar(range(len(bars)), heights, bottom=bottoms, color=color, width=0.72, label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _count_axis(axes: Axes, fitting: dict[int, PlannedLayout]) -> None:
    axes.set_xticks(range(len(fitting)), [f"{count:,}" for count in fitting], rotation=30)
    axes.set_xlabel("GPUs")


def _layout_axis(axes: Axes, layouts: Sequence[PlannedLayout]) -> None:
    names = [layout.name.replace(", ", "\n").replace(" VPP", "\nVPP").replace(" DP", "\nDP") for layout in layouts]
    axes.set_xticks(range(len(layouts)), names, fontsize=9)


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.grid(True, axis="y", color="#e9ecef")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
