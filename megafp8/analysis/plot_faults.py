"""Figure of planted faults in a stability report: loss over steps of the clean run, with each fault and each repair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Optional

import numpy as np

from megafp8.analysis.html import INK
from megafp8.analysis.plot_comparison import BOUND_COLOR, COLORS, FONT, WIDTH_INCHES, add_legend, style_panel
from megafp8.analysis.plotting import GRAY, new_figure
from megafp8.analysis.runs import LoadedRun
from megafp8.analysis.stability_faults import CLEAN, REPAIR, REPAIR_EVENTS, WINDOW
from megafp8.analysis.stability_runs import SuiteRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_COLUMNS, PANEL_INCHES = 2, 1.8
NUM_BEFORE = 30  # steps before the fault that are shown
TOP, BOTTOM = 1.5, 0.97  # ends of a panel, relative to the clean run's losses
WITHOUT_REPAIR = "no repair"
STYLES = {CLEAN: INK, WITHOUT_REPAIR: BOUND_COLOR, **dict(zip(REPAIR_EVENTS, COLORS[1:], strict=False))}
"""What a line is of to its colour."""


def plot_faults(runs: Sequence[SuiteRun], recipe: str, fault_step: int) -> Optional[Figure]:
    """A panel for each fault of a recipe, from some steps before it to the end; None without runs.

    Args:
        runs: of the part, of all recipes and seeds.
        fault_step: the first step with the fault.
    """
    arms: dict[str, list[LoadedRun]] = {}
    for run in runs:
        if run.recipe == recipe and run.run is not None and run.run.steps:
            arms.setdefault(run.choice["fault"], []).append(run.run)
    clean = arms.pop(CLEAN, [])
    faults = list(dict.fromkeys(arm.partition(REPAIR)[0] for arm in arms))
    if not clean or not faults:
        return None
    num_rows = -(-len(faults) // NUM_COLUMNS)
    figure = new_figure(WIDTH_INCHES, 0.3 + PANEL_INCHES * num_rows)
    panels = figure.subplots(num_rows, NUM_COLUMNS, squeeze=False, sharex=True, sharey=True).flat
    for fault, axes in zip(faults, panels, strict=False):
        style_panel(axes)
        lines = {name.partition(REPAIR)[2] or WITHOUT_REPAIR: own for name, own in arms.items()
                 if name.partition(REPAIR)[0] == fault}  # fmt: skip
        draw_panel(axes, {CLEAN: clean, **lines}, fault_step)
        axes.set_title(fault, fontsize=FONT, color=INK, loc="left")
    for axes in panels:  # what is left of the last row
        axes.set_axis_off()
    first = figure.axes[0]
    limit_panel(first, clean, fault_step)
    for name in dict.fromkeys(arm.partition(REPAIR)[2] for arm in arms):
        if name and name not in first.get_legend_handles_labels()[1]:
            first.plot([], [], color=STYLES.get(name, GRAY), linewidth=1.4, label=name)
    figure.supxlabel("step", fontsize=FONT, color=INK)
    figure.supylabel("training loss (nats)", fontsize=FONT, color=INK)
    add_legend(first)
    return figure


def draw_panel(axes: Axes, lines: Mapping[str, Sequence[LoadedRun]], fault_step: int) -> None:
    """The smoothed losses of all runs of a fault."""
    last = max(run.steps[-1].step for run in lines[CLEAN])
    axes.axvline(fault_step, color=GRAY, linewidth=1, linestyle=(0, (4, 3)))
    for name, runs in lines.items():
        for index, run in enumerate(runs):
            steps, losses = run.series("step"), trailing_mean(run.series("loss"))
            axes.plot(steps, losses, color=STYLES.get(name, GRAY), linewidth=1.8 if name == CLEAN else 1.2,
                      label=name if index == 0 else None)  # fmt: skip
            if steps[-1] < last:
                axes.plot(steps[-1], losses[-1], "x", color=STYLES.get(name, GRAY), markersize=6)


def trailing_mean(losses: np.ndarray) -> np.ndarray:
    """Mean of the last `WINDOW` finite losses at every step, float64 [steps]; NaN where none is finite."""
    is_finite = np.isfinite(losses)
    sums = np.concatenate(([0.0], np.cumsum(np.where(is_finite, losses, 0.0))))
    counts = np.concatenate(([0], np.cumsum(is_finite)))
    end = np.arange(1, len(losses) + 1)
    first = np.maximum(0, end - WINDOW)
    count = counts[end] - counts[first]
    return np.where(count > 0, (sums[end] - sums[first]) / np.maximum(count, 1), np.nan)


def limit_panel(axes: Axes, clean: Sequence[LoadedRun], fault_step: int) -> None:
    """Limits of all panels, from the clean runs: a fault may raise the loss without any."""
    shown = np.concatenate([trailing_mean(run.series("loss"))[run.series("step") >= fault_step] for run in clean])
    shown = shown[np.isfinite(shown)]
    axes.set_xlim(max(1, fault_step - NUM_BEFORE), max(run.steps[-1].step for run in clean))
    if shown.size:
        axes.set_ylim(BOTTOM * shown.min(), max(shown.max() / BOTTOM, TOP * shown.min()))
