"""Plots of loss curves, of learning-rate schedules and of document lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from megafp8.analysis import plotting
from megafp8.analysis.pairing import recipe_of
from megafp8.analysis.plotting import GRAY, new_figure, save_figure, style_axes, use_si_prefixes
from megafp8.analysis.runs import LoadedRun
from megafp8.analysis.seed_statistics import relative_gap, smooth, smoothing_window, validation_gap
from megafp8.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_PIXELS, HEIGHT_PIXELS = 1200, 640
LOSS_COLORS = ("#3a3f47", *plotting.COLORS)
FRAME_COLOR = "#adb5bd"
# The limits of the loss axis ignore this first part of a run, whose steep fall would compress the rest.
STEEP_FRACTION = 1 / 25
FIRST_COLOR, SECOND_COLOR = "#1971c2", "#e8590c"


def plot_loss_curves(runs: Sequence[LoadedRun], output: Path, title: str) -> Path:
    """Write a PNG of the runs' losses over training tokens.

    Thin lines are the losses of the steps, thick lines their running means over a twenty-fifth of the run, markers the
    validation losses. The lower panel shows the gap of each run to the first at the same step in percent. The steep
    first twenty-fifth of a run may exceed the upper limit of the loss axis.

    Raises:
        DataError: a run has no step records.
    """
    for run in runs:
        if not run.steps:
            raise DataError(f"run {run.name} ({run.folder}) has no step records: there is no curve to draw")
    figure = new_figure(WIDTH_PIXELS / 100, HEIGHT_PIXELS / 100)
    if len(runs) > 1:
        loss_axes, gap_axes = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, 1))
        _draw_gaps(gap_axes, runs)
    else:
        loss_axes = gap_axes = figure.subplots()
    _draw_losses(loss_axes, runs)
    loss_axes.set_title(title, loc="left", fontsize=16, fontweight="bold", pad=12)
    gap_axes.set_xlabel("training tokens", fontsize=13)
    gap_axes.set_xlim(0, 1.01 * max(run.steps[-1].consumed_tokens for run in runs))
    use_si_prefixes(gap_axes.xaxis)
    return save_figure(figure, output)


def _draw_losses(axes: Axes, runs: Sequence[LoadedRun]) -> None:
    lows, highs = [], []
    for index, run in enumerate(runs):
        color = LOSS_COLORS[index % len(LOSS_COLORS)]
        tokens, loss = run.series("consumed_tokens"), run.series("loss")
        smoothed = smooth(loss, smoothing_window(len(loss)))
        # The baseline is wide and pale, so that a curve on top of it leaves both visible.
        width, alpha = (5.0, 0.45) if index == 0 and len(runs) > 1 else (1.8, 1.0)
        axes.plot(tokens, loss, color=color, linewidth=0.7, alpha=0.25, zorder=1)
        axes.plot(
            tokens, smoothed, color=color, linewidth=width, alpha=alpha, linestyle=_dashes(index), label=_label(run)
        )
        validations = run.evals_of("valid")
        losses = [record.loss for record in validations]
        axes.plot([record.consumed_tokens for record in validations], losses, **_marker(index))
        lows += [*smoothed, *losses]
        highs.append(smoothed[int(len(smoothed) * STEEP_FRACTION)])
    axes.plot([], [], linestyle="none", marker="o", color=GRAY, label="markers: validation")
    low, high = min(filter(np.isfinite, lows), default=0.0), max(filter(np.isfinite, highs), default=0.0)
    if high > low:
        axes.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))
    axes.set_ylabel("loss (nats per token)", fontsize=13)
    axes.legend(fontsize=12.5, frameon=False, loc="upper right")
    _style(axes)


def _draw_gaps(axes: Axes, runs: Sequence[LoadedRun]) -> None:
    base, *others = runs
    axes.axhline(0, color=LOSS_COLORS[0], linewidth=3.0, alpha=0.45, zorder=1)
    largest = 0.0
    for index, run in enumerate(others, start=1):
        tokens, gap = relative_gap(base, run)
        smoothed = smooth(gap, smoothing_window(len(gap)), keeps_width=True)
        color = LOSS_COLORS[index % len(LOSS_COLORS)]
        axes.plot(tokens, smoothed * 100, color=color, linewidth=1.8, linestyle=_dashes(index))
        eval_tokens, eval_gap = validation_gap(base, run)
        axes.plot(eval_tokens, eval_gap * 100, **_marker(index))
        drawn = np.abs(np.concatenate((smoothed[int(len(gap) * STEEP_FRACTION) :], eval_gap)))
        largest = max(largest, float(np.max(drawn[np.isfinite(drawn)], initial=0.0)) * 100)
    # Symmetric about zero and at least +-0.1%, so that noise does not fill the panel.
    limit = 1.25 * max(largest, 0.08)
    axes.set_ylim(-limit, limit)
    axes.set_ylabel("gap (%)", fontsize=13)
    _style(axes)


def _dashes(index: int) -> Any:
    """Line style: solid for the first two runs, then dashed, so that a curve below stays visible."""
    return "-" if index < 2 else (0, (5, index))


def _marker(index: int) -> dict[str, Any]:
    """Marker style of validation losses: a ring for the baseline, a filled diamond for the others."""
    color = LOSS_COLORS[index % len(LOSS_COLORS)]
    is_baseline = index == 0
    return {
        "linestyle": "none",
        "marker": "o" if is_baseline else "D",
        "markersize": 10 if is_baseline else 5,
        "markerfacecolor": "white" if is_baseline else color,
        "markeredgecolor": color,
        "markeredgewidth": 1.6 if is_baseline else 1.0,
        "zorder": 4,
    }


def _style(axes: Axes) -> None:
    style_axes(axes)
    axes.grid(True, linewidth=1.0)
    axes.tick_params(labelsize=12, color=FRAME_COLOR)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FRAME_COLOR)


def _label(run: LoadedRun) -> str:
    last = run.last_validation
    return f"{recipe_of(run)}, final validation {last.loss:.4f}" if last else recipe_of(run)


def plot_schedule(
    steps: Sequence[int],
    rates: Mapping[str, Sequence[float]],
    weight_decays: Sequence[float],
    output: Union[str, Path],
    *,
    batch_sizes: Sequence[int] = (),
    marks: Mapping[str, float],
    title: str,
) -> Path:
    """Plot learning rates over steps, and below them the weight decay and the batch size if they change.

    Args:
        steps: the steps that are drawn.
        rates: learning rates at those steps, by the name of the curve.
        weight_decays: at those steps.
        output: .png, .svg or .pdf.
        batch_sizes: sequences per global batch at those steps.
        marks: step at which each phase ends, by name.
    """
    lower = {"weight decay": weight_decays, "batch size": batch_sizes}
    changing = {name: values for name, values in lower.items() if len(set(values)) > 1}
    figure = new_figure(10, 4 + 1.4 * len(changing), dpi=110)
    panels = figure.subplots(1 + len(changing), 1, sharex=True, squeeze=False,
                             gridspec_kw={"height_ratios": (3, *[1] * len(changing))})[:, 0]  # fmt: skip
    for axes in panels:
        style_axes(axes)
    top, bottom = panels[0], panels[-1]
    for (name, values), color in zip(rates.items(), (FIRST_COLOR, SECOND_COLOR), strict=False):
        top.plot(steps, values, color=color, linewidth=2.2, label=name)
    for name, step in marks.items():
        top.axvline(step, color=FRAME_COLOR, linewidth=1, linestyle=(0, (4, 3)))
        top.annotate(
            name, (step, 0.03), (3, 0), xycoords=("data", "axes fraction"), textcoords="offset points", rotation=90,
            va="bottom", fontsize=9, color="#495057",
        )  # fmt: skip
    top.set_ylabel("learning rate")
    top.set_ylim(bottom=0)
    top.set_title(title, loc="left", fontsize=12, fontweight="bold")
    if len(rates) > 1:
        top.legend(frameon=False)
    for axes, (name, values) in zip(panels[1:], changing.items(), strict=True):
        axes.plot(steps, values, color=GRAY, linewidth=2)
        axes.set_ylabel(name)
    bottom.set_xlabel("step")
    bottom.set_xlim(0, max(steps))
    use_si_prefixes(bottom.xaxis)
    return save_figure(figure, output)


@dataclass(frozen=True, kw_only=True)
class LengthPanel:
    """Histogram of one shard's document lengths.

    Attributes:
        labels: of the bins, in tokens.
        num_documents: in each bin.
        num_tokens: in each bin.
    """

    title: str
    labels: Sequence[str]
    num_documents: Sequence[int]
    num_tokens: Sequence[int]


def plot_lengths(panels: Sequence[LengthPanel], output: Path) -> Path:
    """Write a PNG with the shares of each shard's documents and tokens by document length.

    Raises:
        DataError: no panel.
    """
    if not panels:
        raise DataError("there is no shard to draw")
    figure = new_figure(10, 4.2 * len(panels))
    for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        _draw_lengths(axes, panel)
    return save_figure(figure, output)


def _draw_lengths(axes: Axes, panel: LengthPanel) -> None:
    for offset, (name, counts, color) in enumerate(
        (("documents", panel.num_documents, FIRST_COLOR), ("tokens", panel.num_tokens, SECOND_COLOR))
    ):
        total = sum(counts) or 1
        positions = [position + 0.42 * (offset - 0.5) for position in range(len(counts))]
        axes.bar(positions, [count / total for count in counts], width=0.4, color=color, label=f"share of the {name}")
    axes.set_xticks(range(len(panel.labels)), panel.labels, rotation=40, ha="right", fontsize=9)
    axes.set_xlabel("tokens in the document", fontsize=10.5)
    axes.legend(fontsize=10.5, frameon=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    style_axes(axes, panel.title, grid_axis="y")
