"""Figure of the load of a run's experts: one statistic of all layers in each panel, over the steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megafp8.analysis.plotting import COLORS, new_figure, plot_style, save_figure
from megafp8.analysis.runs import LoadedRun
from megafp8.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {
    "max_to_mean": "largest load over the mean",
    "variation": "coefficient of variation of the loads",
    "num_idle": "experts without tokens",
    "entropy_fraction": "entropy of the router over the largest possible one",
    "dropped_fraction": "share of assignments dropped",
    "padded_fraction": "share of rows that are padding",
    "bias_min": "smallest bias of an expert",
    "bias_max": "largest bias of an expert",
}
MAX_LINES = len(COLORS)


@plot_style()
def plot_experts(run: LoadedRun, output: Path) -> Path:
    """Write a PNG with a panel for each statistic of `LayerLoad` that the run recorded.

    A panel has a line for each layer; of more than `MAX_LINES` layers, the median and the range over layers.

    Raises:
        DataError: the run has no records of experts.
    """
    records = run.expert_records
    if not records:
        raise DataError(f"run {run.name} ({run.folder}) has no records of experts: it has none, or logged no step")
    layers = sorted({layer for record in records for layer in record.layers}, key=int)
    grids = {field: grid_of(run, layers, field) for field in PANELS}
    drawn = [field for field in PANELS if np.isfinite(grids[field]).any()]
    figure = new_figure(15, 3.0 * -(-len(drawn) // 2))
    panels = figure.subplots(-(-len(drawn) // 2), 2, squeeze=False).flatten()
    for axes, field in zip(panels, drawn, strict=False):
        _draw(axes, [record.step for record in records], grids[field], layers)
        axes.set_title(PANELS[field])
    for axes in panels[len(drawn) :]:
        axes.set_visible(False)
    panels[0].legend(fontsize=9)
    figure.suptitle(f"{run.name}: load of the experts", x=0.01, ha="left", fontweight="bold")
    return save_figure(figure, output)


def grid_of(run: LoadedRun, layers: list[str], field: str) -> np.ndarray:
    """One statistic, FP64 [layers, records]; NaN where there is no value."""
    values = [[getattr(each.layers.get(layer), field, None) for each in run.expert_records] for layer in layers]
    grid = np.array(values, dtype=np.float64)
    return np.where(np.isfinite(grid), grid, np.nan)


def _draw(axes: Axes, steps: list[int], grid: np.ndarray, layers: list[str]) -> None:
    """The lines of one panel."""
    if len(layers) <= MAX_LINES:
        for layer, color, values in zip(layers, COLORS, grid, strict=False):
            axes.plot(steps, values, color=color, linewidth=1.4, marker=".", markersize=4, label=f"layer {layer}")
    else:
        axes.fill_between(steps, grid.min(0), grid.max(0), color=COLORS[1], alpha=0.2, label="range over layers")
        axes.plot(steps, np.median(grid, 0), color=COLORS[1], linewidth=1.6, label="median over layers")
    axes.set_xlabel("step")
