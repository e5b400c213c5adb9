"""Where a tensor's values lie in the range that their scales give them, against how far down each format reaches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megafp8.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#e8590c", "#1971c2", "#2f9e44", "#9c36b5", "#c2255c", "#0c8599")
MAX_PANELS = 12
PANEL_COLUMNS = 2
MIN_OCTAVES = 39  # E5M2's range, and room for what is written beside its bar
ROOM_FOR_NAMES = 3.5


@dataclass(frozen=True, kw_only=True)
class FormatRange:
    """Octaves below its largest number that a format reaches: with full precision, and down to the smallest number."""

    name: str
    normal_octaves: float
    subnormal_octaves: float


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One tensor.

    Attributes:
        title: above the panel.
        counts: for each curve, values by octaves below the largest number that their scale expresses.
    """

    title: str
    counts: Mapping[str, Sequence[int]]


def plot_ranges(panels: Sequence[Panel], formats: Sequence[FormatRange], output: Path) -> Path:
    """Write a PNG: for each tensor the share of its values per octave, a curve a recipe, over the formats' ranges.

    Values left of a format's bar become zero in it; in the pale part of the bar they have fewer bits.

    Args:
        panels: at most MAX_PANELS are drawn.

    Raises:
        DataError: no panel.
    """
    if not panels:
        raise DataError("there is no tensor to draw")
    from matplotlib.figure import Figure

    drawn = panels[:MAX_PANELS]
    num_columns = min(PANEL_COLUMNS, len(drawn))
    num_rows = math.ceil(len(drawn) / num_columns)
    figure = Figure(
        figsize=(9.5 if num_columns == 1 else 15, 4.6 * num_rows), dpi=100, layout="constrained", facecolor="white"
    )
    grid = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axes, panel in zip(grid, drawn, strict=False):
        _draw(axes, panel, formats)
    for axes in grid[len(drawn) :]:
        axes.set_visible(False)
    if len(drawn) < len(panels):
        figure.suptitle(f"the first {len(drawn)} of {len(panels)} tensors", x=0.01, ha="left", color="#868e96")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    return output


def _draw(axes: Axes, panel: Panel, formats: Sequence[FormatRange]) -> None:
    """One tensor's curves, with the formats' bars below them."""
    total = max(sum(counts) for counts in panel.counts.values()) or 1
    floor = 0.3 / total  # below the share of a single value
    ends = {label: max((i + 1 for i, count in enumerate(c) if count), default=0) for label, c in panel.counts.items()}
    for index, (label, counts) in enumerate(panel.counts.items()):
        shares = [max(count / total, floor) for count in counts[: ends[label]]]
        if shares:
            # Curves that agree stay visible: the first ones lie wide underneath.
            width = 1.8 + 1.6 * (len(panel.counts) - 1 - index)
            color = COLORS[index % len(COLORS)]
            edges = [-octave for octave in range(len(shares) + 1)]
            axes.stairs(shares, edges, baseline=None, color=color, linewidth=width, alpha=0.85, label=label)
    axes.set_yscale("log")
    axes.set_xlim(-max(MIN_OCTAVES, *ends.values(), 0), ROOM_FOR_NAMES)
    _draw_formats(axes, formats, floor)
    axes.set_yticks([10.0**exponent for exponent in range(math.ceil(math.log10(floor)), 1)])
    axes.set_yticks([], minor=True)
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("log2 of the magnitude to the largest number that its scale expresses", fontsize=10.5)
    axes.set_ylabel("share of the values", fontsize=10.5)
    if any(ends.values()):
        axes.legend(fontsize=10.5, frameon=False, loc="upper left")
    axes.grid(True, color="#f1f3f5")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_formats(axes: Axes, formats: Sequence[FormatRange], floor: float) -> None:
    """A bar for each format, one below the other under the curves."""
    step = (1 / floor) ** (1 / 9)  # a ninth of the height of the curves, on the logarithmic axis
    for index, fmt in enumerate(formats):
        top = floor / step ** (index + 0.35)
        bottom = floor / step ** (index + 1)
        for start, length, color in (
            (-fmt.normal_octaves, fmt.normal_octaves, "#868e96"),
            (-fmt.subnormal_octaves, fmt.subnormal_octaves - fmt.normal_octaves, "#ced4da"),
        ):
            axes.barh(bottom, length, left=start, height=top - bottom, align="edge", color=color)
        middle = math.sqrt(top * bottom)
        axes.text(0.4, middle, fmt.name, ha="left", va="center", color="#495057", fontsize=10, fontweight="bold")
        axes.text(-fmt.subnormal_octaves - 0.4, middle, "becomes zero", ha="right", va="center", color="#868e96",
                  fontsize=9)  # fmt: skip
    axes.set_ylim(floor / step ** (len(formats) + 0.35), 3.0)
