"""Figure of a goodput study: where time is lost, the save interval, single runs, and what to improve first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megafp8.analysis.plotting import COLORS, GRAY, new_figure, save_figure, style_axes
from megafp8.planning.goodput import Goodput
from megafp8.planning.goodput_report import time_text
from megafp8.planning.goodput_simulation import PARTS, USEFUL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_BINS = 25
LABEL_FACTOR = 1.8
"""Labels of the time between saves are at least this factor apart."""


def plot_goodput(goodput: Goodput, cluster: str, output: Path) -> Path:
    """Write the figure in the format of the file's suffix."""
    figure = new_figure(14, 9)
    figure.suptitle(
        f"{goodput.inputs.days:g} days on {cluster}: {goodput.effective_fraction:.1%} effective training time",
        x=0.01, ha="left", fontweight="bold",
    )  # fmt: skip
    grid = figure.add_gridspec(2, 2)
    _draw_losses(figure.add_subplot(grid[0, 0]), goodput)
    _draw_intervals(figure.add_subplot(grid[0, 1]), goodput)
    _draw_runs(figure.add_subplot(grid[1, 0]), goodput)
    _draw_improvements(figure.add_subplot(grid[1, 1]), goodput)
    return save_figure(figure, output)


def _draw_losses(axes: Axes, goodput: Goodput) -> None:
    """A bar for each part but useful training, the largest first."""
    losses = {part: goodput.parts[part] * 100 for part in PARTS if part != USEFUL and goodput.parts[part]}
    losses = dict(sorted(losses.items(), key=lambda item: item[1]))
    _draw_bars(axes, losses, COLORS[0], "{:.2f}%")
    axes.set_xlabel("% of the elapsed time")
    style_axes(axes, "where time is lost", grid_axis="x")


def _draw_bars(axes: Axes, values: dict[str, float], color: str, pattern: str) -> None:
    """Horizontal bars with their values; nothing if there are none."""
    bars = axes.barh(list(values), list(values.values()), color=color, height=0.65)
    axes.bar_label(bars, [pattern.format(value) for value in values.values()], padding=4, fontsize=9)
    axes.set_xlim(0, 1.18 * max(values.values(), default=1.0))


def _draw_intervals(axes: Axes, goodput: Goodput) -> None:
    """Effective time over the save interval, with the formulas' intervals."""
    step_s = goodput.inputs.step_s
    if goodput.best:
        searched = goodput.best.fractions
        minutes = [steps * step_s / 60 for steps in searched]
        axes.plot(minutes, [fraction * 100 for fraction in searched.values()], color=GRAY, marker=".", linewidth=1)
        axes.set_xscale("log")
        ticks: list[int] = []
        for steps in searched:
            if not ticks or steps >= LABEL_FACTOR * ticks[-1]:
                ticks.append(steps)
        axes.set_xticks([steps * step_s / 60 for steps in ticks], [time_text(steps * step_s) for steps in ticks])
        axes.minorticks_off()
    # The intervals are often the same: each marker is smaller than the one before.
    markers = zip("osD^", (14, 10, 7, 4), COLORS, strict=False)
    for (name, (steps, fraction)), (marker, size, color) in zip(goodput.at_intervals.items(), markers, strict=False):
        label = f"{name}: {time_text(steps * step_s)}"
        axes.plot([steps * step_s / 60], [fraction * 100], marker, color=color, markersize=size, label=label)
    if goodput.at_intervals:
        axes.legend(fontsize=9, frameon=False, loc="lower center")
    axes.set_xlabel("training between saves")
    axes.set_ylabel("% effective, long runs")
    style_axes(axes, "save interval")


def _draw_runs(axes: Axes, goodput: Goodput) -> None:
    """Histogram of the simulated runs, with the range that another run falls into."""
    from matplotlib.ticker import MaxNLocator

    interval = goodput.interval
    axes.hist([fraction * 100 for fraction in goodput.run_fractions], bins=NUM_BINS, color=COLORS[1])
    label = f"{interval.coverage:.0%} of runs: {interval.low:.1%} to {interval.high:.1%}"
    axes.axvspan(interval.low * 100, interval.high * 100, color=COLORS[1], alpha=0.15, label=label)
    axes.axvline(goodput.effective_fraction * 100, color="black", linewidth=1.5, label="mean")
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=9, frameon=False, loc="upper left")
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.set_xlabel("% effective")
    axes.set_ylabel("simulated runs")
    style_axes(axes, "single runs", grid_axis="y")


def _draw_improvements(axes: Axes, goodput: Goodput) -> None:
    """A bar for the gain of each halved cost, the largest on top."""
    gains = {improvement.name: improvement.gain_fraction * 100 for improvement in reversed(goodput.improvements)}
    _draw_bars(axes, gains, COLORS[2], "{:+.2f}")
    axes.set_xlabel("points of effective training time")
    style_axes(axes, "what to improve first: one cost halved", grid_axis="x")
