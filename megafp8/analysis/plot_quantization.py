"""What quantization did to every tensor of a run: over its steps, and where the codes of the last look lie.

Where a tensor's values lie in the range that their scales give them, against how far down each format reaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import numpy as np

from megafp8.analysis.runs import LoadedRun
from megafp8.errors import DataError
from megafp8.metrics.records import TensorStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


OPERANDS = ("input", "weight", "grad_output")
FRACTIONS = ("underflow_fraction", "saturated_fraction", "codes_changed_fraction", "update_to_weight")
FIELDS = (*FRACTIONS, "sqnr_db", "mean_local_sqnr_db", "amax", "scale_spread_octaves", "staleness_octaves",
          "outlier_octaves")  # fmt: skip
TITLES = {
    "underflow_fraction": "share of values that become zero",
    "saturated_fraction": "share of values that are cut off",
    "codes_changed_fraction": "share of codes that a step changes",
    "update_to_weight": "norm of update to norm of weight",
    "sqnr_db": "SQNR in dB",
    "mean_local_sqnr_db": "mean local SQNR in dB",
    "amax": "amax",
    "scale_spread_octaves": "octaves between the scales",
    "staleness_octaves": "octaves that it outgrew its scale by",
    "outlier_octaves": "octaves from median to largest channel",
}
SMALLEST_FRACTION = 1e-6
COLOR_MAP = "viridis"
MAX_LABELS = 32


def plot_telemetry(
    run: LoadedRun, output: Path, *, field: str = "underflow_fraction", recipe: Optional[str] = None
) -> Path:
    """Write a PNG: above, for each operand, a field of all linears over the steps; below, their codes of the last look
    by exponent.

    Args:
        field: of `TensorStats`.
        recipe: one that was tried, in place of the run's own; of its codes nothing is recorded, nor drawn.

    Raises:
        DataError: the run has no looks, the recipe was not tried, or the field was never known.
    """
    from matplotlib.figure import Figure

    tensors = tensors_of(run, recipe)
    linears = sorted({linear_of(name) for name in tensors[-1]}, key=natural)
    num_rows = 2 if recipe is None else 1
    height = num_rows * (2.1 + 0.1 * min(len(linears), 60))
    figure = Figure(figsize=(15, height), dpi=100, layout="constrained", facecolor="white")
    axes = figure.subplots(num_rows, len(OPERANDS), sharey=True, squeeze=False)
    grids = [grid_of(tensors, linears, operand, lambda stats: getattr(stats, field)) for operand in OPERANDS]
    if not any(np.isfinite(grid).any() for grid in grids):
        raise DataError(f"run {run.name} ({run.folder}) never knew {field}; others are {', '.join(FIELDS)}")
    _draw_fields(figure, axes[0], grids, field, [look.step for look in run.looks], linears)
    if recipe is None:
        _draw_exponents(figure, axes[1], tensors[-1], linears, run.looks[-1].step)
    name = recipe or run.looks[-1].recipe
    figure.suptitle(f"{run.name}: {name}{' (tried)' if recipe else ''}", x=0.01, ha="left", fontweight="bold")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    return output


def tensors_of(run: LoadedRun, recipe: Optional[str]) -> list[dict[str, TensorStats]]:
    """The tensors of each look, under the run's recipe or one that was tried."""
    if not run.looks:
        raise DataError(f"run {run.name} ({run.folder}) has no looks at quantization: train with --fp8-log-interval")
    found = [look.tensors if recipe is None else look.what_if.get(recipe, {}) for look in run.looks]
    if not found[-1]:
        tried = ", ".join(run.looks[-1].what_if) or "none"
        what = recipe or "a recipe of its own"
        raise DataError(f"run {run.name} ({run.folder}) has nothing of {what}; tried: {tried}")
    return found


def linear_of(tensor: str) -> str:
    """`layers.3.linear_fc1` of `layers.3.linear_fc1.input.row`."""
    return ".".join(tensor.split(".")[:3])


def natural(linear: str) -> tuple[int, int]:
    """In the order of the forward pass."""
    _, layer, name = linear.split(".")
    order = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    return int(layer), order.index(name)


def stats_of(tensors: dict[str, TensorStats], linear: str, operand: str) -> list[TensorStats]:
    """Of the operand's rows and columns, or of both together."""
    names = (f"{linear}.{operand}{side}" for side in ("", ".row", ".column"))
    return [tensors[name] for name in names if name in tensors]


def grid_of(
    looks: Sequence[dict[str, TensorStats]],
    linears: Sequence[str],
    operand: str,
    value: Callable[[TensorStats], Optional[float]],
) -> np.ndarray:
    """FP64 [linears, looks]; of rows and columns the mean; NaN where there is no value."""
    grid = np.full((len(linears), len(looks)), np.nan)
    for row, linear in enumerate(linears):
        for column, tensors in enumerate(looks):
            values = [value(stats) for stats in stats_of(tensors, linear, operand)]
            known = [each for each in values if each is not None and math.isfinite(each)]
            if known:
                grid[row, column] = sum(known) / len(known)
    return grid


def _draw_fields(
    figure: Figure, axes: Sequence[Axes], grids: Sequence[np.ndarray], field: str, steps: Sequence[int],
    linears: Sequence[str],
) -> None:  # fmt: skip
    """A heat map an operand, under one scale of colours; fractions on a logarithmic one, of which 0 is the bottom."""
    from matplotlib.colors import LogNorm, Normalize

    values = np.concatenate([grid[np.isfinite(grid)] for grid in grids])
    is_fraction = field in FRACTIONS
    if is_fraction:
        norm = LogNorm(SMALLEST_FRACTION, max(values.max(), 10 * SMALLEST_FRACTION))
    else:
        norm = Normalize(values.min(), max(values.max(), values.min() + 1e-9))
    for each, grid, operand in zip(axes, grids, OPERANDS, strict=True):
        shown = np.maximum(grid, SMALLEST_FRACTION) if is_fraction else grid
        edges = np.arange(len(steps) + 1) - 0.5
        image = each.pcolormesh(edges, np.arange(len(linears) + 1), shown, norm=norm, cmap=COLOR_MAP)
        _finish(each, operand, linears)
        ticks = range(0, len(steps), max(1, len(steps) // 8))
        each.set_xticks(list(ticks), [str(steps[tick]) for tick in ticks])
        each.set_xlabel("step")
    figure.colorbar(image, ax=axes, label=TITLES[field])


def _draw_exponents(
    figure: Figure, axes: Sequence[Axes], tensors: dict[str, TensorStats], linears: Sequence[str], step: int
) -> None:
    """A heat map an operand: the share of codes with each exponent."""
    from matplotlib.colors import LogNorm

    for each, operand in zip(axes, OPERANDS, strict=True):
        width = max((len(s.exponent_counts) for name in linears for s in stats_of(tensors, name, operand)), default=1)
        shares = np.full((len(linears), max(width, 1)), np.nan)
        formats = set()
        for row, linear in enumerate(linears):
            for stats in stats_of(tensors, linear, operand)[:1]:
                counts = np.array(stats.exponent_counts, dtype=np.float64)
                shares[row, : len(counts)] = counts / max(1.0, counts.sum())
                formats.add(stats.format.upper())
        edges = np.arange(shares.shape[1] + 1) - 1.5
        image = each.pcolormesh(
            edges,
            np.arange(len(linears) + 1),
            np.where(shares > 0, shares, np.nan),
            norm=LogNorm(1e-5, 1),
            cmap=COLOR_MAP,
        )
        _finish(each, f"{operand}, {' and '.join(sorted(formats))}", linears)
        each.set_xlabel(f"exponent field at step {step} (-1: zeros, 0: subnormals)")
    figure.colorbar(image, ax=axes, label="share of the codes")


def _finish(axes: Axes, title: str, linears: Sequence[str]) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    every = max(1, math.ceil(len(linears) / MAX_LABELS))
    labels = [linear.removeprefix("layers.").replace(".linear_", " ") for linear in linears[::every]]
    axes.set_yticks([index + 0.5 for index in range(0, len(linears), every)], labels, fontsize=8)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()


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
