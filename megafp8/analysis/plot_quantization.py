"""Figures of quantization: statistics of a run's tensors over its steps, and value ranges of single tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import numpy as np

from megafp8.analysis.plotting import COLORS, GRAY, new_figure, plot_style, save_figure
from megafp8.analysis.runs import LoadedRun
from megafp8.config.precision_map import ATTENTION_LINEARS, MLP_LINEARS, OUTPUT_LAYER
from megafp8.errors import DataError
from megafp8.metrics.expert_statistics import worst_of_experts
from megafp8.metrics.records import TensorStats, linear_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

OPERANDS = ("input", "weight", "grad_output")
FRACTIONS = ("underflow_fraction", "saturated_fraction", "codes_changed_fraction", "update_to_weight")
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
FIELDS = tuple(TITLES)
MIN_FRACTION = 1e-6
COLOR_MAP = "viridis"
MAX_LABELS = 32


def plot_telemetry(
    run: LoadedRun, output: Path, *, field: str = "underflow_fraction", recipe: Optional[str] = None
) -> Path:
    """Write a PNG of one statistic of all linears over the steps, and of the exponents in the last statistics step.

    The experts of a layer have one row, which shows the worst expert of each step.

    Args:
        field: of `TensorStats`.
        recipe: a what-if recipe in place of the run's own. Its exponents are not recorded, so they are not drawn.

    Raises:
        DataError: the run has no quantization statistics, none of the recipe, or none of the field.
    """
    tensors = [worst_of_experts(each, field) for each in tensors_of(run, recipe)]
    linears = sorted({linear_of(name) for name in tensors[-1]}, key=forward_order)
    num_rows = 2 if recipe is None else 1
    figure = new_figure(15, num_rows * (2.1 + 0.1 * min(len(linears), 60)))
    axes = figure.subplots(num_rows, len(OPERANDS), sharey=True, squeeze=False)
    grids = [grid_of(tensors, linears, operand, lambda stats: getattr(stats, field)) for operand in OPERANDS]
    if not any(np.isfinite(grid).any() for grid in grids):
        raise DataError(f"run {run.name} ({run.folder}) never knew {field}; others are {', '.join(FIELDS)}")
    records = run.quantization_records
    _draw_fields(figure, axes[0], grids, field, [record.step for record in records], linears)
    if recipe is None:
        _draw_exponents(figure, axes[1], tensors[-1], linears, records[-1].step)
    for panels in axes:
        panels[0].set_ylabel("layer and linear")
    name = recipe or records[-1].recipe
    what = TITLES[field][:1].upper() + TITLES[field][1:]
    tried = ", what-if recipe" if recipe else ""
    figure.suptitle(f"{what}: {name}{tried} (run {run.name})", x=0.01, ha="left", fontweight="bold")
    return save_figure(figure, output)


def tensors_of(run: LoadedRun, recipe: Optional[str]) -> list[dict[str, TensorStats]]:
    """The tensors of each statistics step, under the run's recipe or a what-if recipe."""
    records = run.quantization_records
    if not records:
        raise DataError(f"run {run.name} ({run.folder}) has no quantization statistics: train with --fp8-log-interval")
    found = [record.tensors if recipe is None else record.what_if.get(recipe, {}) for record in records]
    if not found[-1]:
        tried = ", ".join(records[-1].what_if) or "none"
        what = recipe or "a recipe of its own"
        raise DataError(f"run {run.name} ({run.folder}) has nothing of {what}; tried: {tried}")
    return found


def forward_order(linear: str) -> tuple[float, str, int]:
    """Sort key of linears in the order of the forward pass: `layers.3.linear_fc1`, `layers.3.experts.linear_fc1`."""
    if linear == OUTPUT_LAYER:
        return math.inf, "", 0
    _, layer, *kind, name = linear.split(".")
    order = (*ATTENTION_LINEARS, *MLP_LINEARS)
    return int(layer), "".join(kind), order.index(name)


def stats_of(tensors: Mapping[str, TensorStats], linear: str, operand: str) -> list[TensorStats]:
    """Statistics of an operand: one entry, or one for its rows and one for its columns."""
    names = (f"{linear}.{operand}{side}" for side in ("", ".row", ".column"))
    return [tensors[name] for name in names if name in tensors]


def grid_of(
    steps: Sequence[Mapping[str, TensorStats]],
    linears: Sequence[str],
    operand: str,
    value: Callable[[TensorStats], Optional[float]],
) -> np.ndarray:
    """One statistic of an operand, as FP64 [linears, steps].

    Rows and columns are averaged; NaN where there is no value.
    """
    grid = np.full((len(linears), len(steps)), np.nan)
    for row, linear in enumerate(linears):
        for column, tensors in enumerate(steps):
            values = [value(stats) for stats in stats_of(tensors, linear, operand)]
            known = [each for each in values if each is not None and math.isfinite(each)]
            if known:
                grid[row, column] = sum(known) / len(known)
    return grid


def _draw_fields(
    figure: Figure, axes: Sequence[Axes], grids: Sequence[np.ndarray], field: str, steps: Sequence[int],
    linears: Sequence[str],
) -> None:  # fmt: skip
    """One heat map per operand with a common colour scale, logarithmic for fractions (0 gets the lowest)."""
    from matplotlib.colors import LogNorm, Normalize

    values = np.concatenate([grid[np.isfinite(grid)] for grid in grids])
    is_fraction = field in FRACTIONS
    norm: Normalize
    if is_fraction:
        norm = LogNorm(MIN_FRACTION, max(values.max(), 10 * MIN_FRACTION))
    else:
        norm = Normalize(values.min(), max(values.max(), values.min() + 1e-9))
    for panel, grid, operand in zip(axes, grids, OPERANDS, strict=True):
        shown = np.maximum(grid, MIN_FRACTION) if is_fraction else grid
        image = _draw_heat_map(panel, shown, linears, operand, norm, first_edge=-0.5)
        ticks = range(0, len(steps), max(1, len(steps) // 8))
        panel.set_xticks(list(ticks), [str(steps[tick]) for tick in ticks])
        panel.set_xlabel("step")
    figure.colorbar(image, ax=axes, label=TITLES[field])


def _draw_exponents(
    figure: Figure, axes: Sequence[Axes], tensors: Mapping[str, TensorStats], linears: Sequence[str], step: int
) -> None:
    """One heat map per operand: the share of codes with each exponent."""
    from matplotlib.colors import LogNorm

    for panel, operand in zip(axes, OPERANDS, strict=True):
        width = max((len(s.exponent_counts) for name in linears for s in stats_of(tensors, name, operand)), default=1)
        shares = np.full((len(linears), max(width, 1)), np.nan)
        formats = set()
        for row, linear in enumerate(linears):
            for stats in stats_of(tensors, linear, operand)[:1]:
                counts = np.array(stats.exponent_counts, dtype=np.float64)
                shares[row, : len(counts)] = counts / max(1.0, counts.sum())
                formats.add(stats.format.upper())
        title = f"{operand}, {' and '.join(sorted(formats))}"
        shown = np.where(shares > 0, shares, np.nan)
        image = _draw_heat_map(panel, shown, linears, title, LogNorm(1e-5, 1), first_edge=-1.5)
        panel.set_xlabel(f"exponent field at step {step} (-1: zeros, 0: subnormals)")
    figure.colorbar(image, ax=axes, label="share of the codes (white: no codes)")


def _draw_heat_map(
    axes: Axes, grid: np.ndarray, linears: Sequence[str], title: str, norm: Normalize, first_edge: float
) -> QuadMesh:
    """A heat map with one row per linear.

    Args:
        first_edge: left end of the first column on the x axis; columns are 1 wide.
    """
    edges = np.arange(grid.shape[1] + 1) + first_edge
    image = axes.pcolormesh(edges, np.arange(len(linears) + 1), grid, norm=norm, cmap=COLOR_MAP)
    axes.set_title(title, loc="left", fontsize=11)
    every = max(1, math.ceil(len(linears) / MAX_LABELS))
    labels = [linear.removeprefix("layers.").replace(".linear_", " ") for linear in linears[::every]]
    axes.set_yticks([index + 0.5 for index in range(0, len(linears), every)], labels, fontsize=8)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    return image


MAX_PANELS = 12
PANEL_COLUMNS = 2
MIN_OCTAVES = 39  # the range of E5M2 and the text beside its bar
NAME_OCTAVES = 3.5  # width of the format names on the x axis


@dataclass(frozen=True, kw_only=True)
class FormatRange:
    """Range of a format in octaves, from its largest number to the smallest normal and the smallest subnormal one."""

    name: str
    normal_octaves: float
    subnormal_octaves: float


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Histograms of one tensor.

    Attributes:
        counts: by the name of the curve, numbers of values by octave below the largest number that their scale
            expresses.
    """

    title: str
    counts: Mapping[str, Sequence[int]]


@plot_style({"font.size": 10.5})
def plot_ranges(panels: Sequence[Panel], formats: Sequence[FormatRange], output: Path) -> Path:
    """Write a PNG of the share of each tensor's values per octave, with the ranges of the formats below the curves.

    Values left of a format's bar underflow to zero. In the pale part of the bar they are subnormal.

    Args:
        panels: the first `MAX_PANELS` are drawn.

    Raises:
        DataError: no panel.
    """
    if not panels:
        raise DataError("there is no tensor to draw")
    drawn = panels[:MAX_PANELS]
    num_columns = min(PANEL_COLUMNS, len(drawn))
    num_rows = math.ceil(len(drawn) / num_columns)
    figure = new_figure(9.5 if num_columns == 1 else 15, 4.6 * num_rows)
    grid = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axes, panel in zip(grid, drawn, strict=False):
        _draw_ranges(axes, panel, formats)
    for axes in grid[len(drawn) :]:
        axes.set_visible(False)
    if len(drawn) < len(panels):
        figure.suptitle(f"the first {len(drawn)} of {len(panels)} tensors", x=0.01, ha="left", color=GRAY)
    return save_figure(figure, output)


def _draw_ranges(axes: Axes, panel: Panel, formats: Sequence[FormatRange]) -> None:
    """The curves of one tensor, with the bars of the formats below them."""
    total = max(sum(counts) for counts in panel.counts.values()) or 1
    floor = 0.3 / total  # below the share of a single value
    ends = {label: max((i + 1 for i, count in enumerate(c) if count), default=0) for label, c in panel.counts.items()}
    for index, (label, counts) in enumerate(panel.counts.items()):
        shares = [max(count / total, floor) for count in counts[: ends[label]]]
        if shares:
            # The first curves are the widest, so that curves on top of them leave all visible.
            width = 1.8 + 1.6 * (len(panel.counts) - 1 - index)
            color = COLORS[index % len(COLORS)]
            edges = [-octave for octave in range(len(shares) + 1)]
            axes.stairs(shares, edges, baseline=None, color=color, linewidth=width, alpha=0.85, label=label)
    axes.set_yscale("log")
    axes.set_xlim(-max(MIN_OCTAVES, *ends.values(), 0), NAME_OCTAVES)
    _draw_formats(axes, formats, floor)
    axes.set_yticks([10.0**exponent for exponent in range(math.ceil(math.log10(floor)), 1)])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("log2(|x| / largest number that the scale represents)")
    axes.set_ylabel("Share of the values")
    if any(ends.values()):
        axes.legend(loc="upper left")
    axes.set_title(panel.title)


def _draw_formats(axes: Axes, formats: Sequence[FormatRange], floor: float) -> None:
    """A bar for each format, stacked below the curves."""
    step = (1 / floor) ** (1 / 9)  # on the logarithmic axis, a ninth of the height of the curves
    for index, fmt in enumerate(formats):
        top = floor / step ** (index + 0.35)
        bottom = floor / step ** (index + 1)
        for start, length, color in (
            (-fmt.normal_octaves, fmt.normal_octaves, GRAY),
            (-fmt.subnormal_octaves, fmt.subnormal_octaves - fmt.normal_octaves, "#ced4da"),
        ):
            axes.barh(bottom, length, left=start, height=top - bottom, align="edge", color=color)
        middle = math.sqrt(top * bottom)
        axes.text(0.4, middle, fmt.name, ha="left", va="center", color="#495057", fontsize=10, fontweight="bold")
        axes.text(-fmt.subnormal_octaves - 0.4, middle, "becomes zero", ha="right", va="center", color=GRAY, fontsize=9)
    axes.set_ylim(floor / step ** (len(formats) + 0.35), 3.0)
