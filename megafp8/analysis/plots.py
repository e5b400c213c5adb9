"""Loss curves as a picture: above the losses, below how far each run is from the baseline.

A learning-rate schedule as a picture.

How long the documents of shards are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np

from megafp8.analysis.pairing import recipe_of
from megafp8.analysis.runs import LoadedRun
from megafp8.analysis.seed_statistics import relative_gap, smooth, smoothing_window, validation_gap
from megafp8.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


WIDTH_PIXELS, HEIGHT_PIXELS, PIXELS_PER_INCH = 1200, 640, 100
COLORS = ("#3a3f47", "#e8590c", "#1971c2", "#2f9e44", "#9c36b5", "#c2255c", "#0c8599", "#f08c00")
# The fall of the first steps would squeeze all the rest: the loss axis begins where this part of the run is done.
STEEP_FRACTION = 1 / 25


def plot_loss_curves(
    runs: Sequence[LoadedRun], output: Union[str, Path], *, baseline: Optional[str] = None, title: str = "Training loss"
) -> Path:
    """Write a PNG of the runs' losses over training tokens.

    Thin: the loss of each step; thick: its running mean over a twenty-fifth of the run; markers: validation. The
    lower panel shows how far each run is from the baseline at the same step, in percent, as running mean and for
    validation. The steep first twenty-fifth may leave the picture at the top.

    Args:
        baseline: name of the run that the lower panel is relative to; default the first.

    Raises:
        DataError: a run without step records, or an unknown baseline.
    """
    for run in runs:
        if not run.steps:
            raise DataError(f"run {run.name} ({run.folder}) has no step records: there is no curve to draw")
    base = next((run for run in runs if run.name == baseline), None) if baseline else runs[0]
    if base is None:
        raise DataError(f"baseline {baseline!r} is none of the runs; they are {', '.join(run.name for run in runs)}")
    ordered = [base, *(run for run in runs if run is not base)]

    from matplotlib.figure import Figure

    has_gap_panel = len(ordered) > 1
    figure = Figure(
        figsize=(WIDTH_PIXELS / PIXELS_PER_INCH, HEIGHT_PIXELS / PIXELS_PER_INCH),
        dpi=PIXELS_PER_INCH,
        layout="constrained",
        facecolor="white",
    )
    if has_gap_panel:
        loss_axes, gap_axes = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, 1))
        _draw_gaps(gap_axes, ordered)
    else:
        loss_axes = gap_axes = figure.subplots()
    _draw_losses(loss_axes, ordered)
    loss_axes.set_title(title, loc="left", fontsize=16, fontweight="bold", pad=12)
    _style_token_axis(gap_axes, last_token=max(run.steps[-1].consumed_tokens for run in runs))
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _draw_losses(axes: Axes, runs: Sequence[LoadedRun]) -> None:
    lows, highs = [], []
    for index, run in enumerate(runs):
        color = COLORS[index % len(COLORS)]
        tokens, loss = run.series("consumed_tokens"), run.series("loss")
        smoothed = smooth(loss, smoothing_window(len(loss)))
        # The baseline lies wide and pale underneath: curves that agree stay both visible.
        width, alpha = (5.0, 0.45) if index == 0 and len(runs) > 1 else (1.8, 1.0)
        axes.plot(tokens, loss, color=color, linewidth=0.7, alpha=0.25, zorder=1)
        axes.plot(
            tokens, smoothed, color=color, linewidth=width, alpha=alpha, linestyle=_dashes(index), label=_label(run)
        )
        validations = run.evals_of("valid")
        axes.plot(
            [record.consumed_tokens for record in validations],
            [record.loss for record in validations],
            **_marker(index),
        )
        lows += [*smoothed, *(record.loss for record in validations)]
        highs.append(smoothed[int(len(smoothed) * STEEP_FRACTION)])
    axes.plot([], [], linestyle="none", marker="o", color="#868e96", label="markers: validation")
    low, high = min(filter(np.isfinite, lows), default=0.0), max(filter(np.isfinite, highs), default=0.0)
    if high > low:
        axes.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))
    axes.set_ylabel("loss (nats per token)", fontsize=13)
    axes.legend(fontsize=12.5, frameon=False, loc="upper right")
    _style(axes)


def _draw_gaps(axes: Axes, runs: Sequence[LoadedRun]) -> None:
    base, *others = runs
    axes.axhline(0, color=COLORS[0], linewidth=3.0, alpha=0.45, zorder=1)
    largest = 0.0
    for index, run in enumerate(others, start=1):
        tokens, gap = relative_gap(base, run)
        smoothed = smooth(gap, smoothing_window(len(gap)), keeps_width=True)
        color = COLORS[index % len(COLORS)]
        axes.plot(tokens, smoothed * 100, color=color, linewidth=1.8, linestyle=_dashes(index))
        eval_tokens, eval_gap = validation_gap(base, run)
        axes.plot(eval_tokens, eval_gap * 100, **_marker(index))
        drawn = np.abs(np.concatenate((smoothed[int(len(gap) * STEEP_FRACTION) :], eval_gap)))
        largest = max(largest, float(np.max(drawn[np.isfinite(drawn)], initial=0.0)) * 100)
    # Symmetric about zero, and no finer than 0.1 %: noise should not look like a finding.
    limit = 1.25 * max(largest, 0.08)
    axes.set_ylim(-limit, limit)
    axes.set_ylabel("gap (%)", fontsize=13)
    _style(axes)


def _dashes(index: int) -> Any:
    """Solid for the first two; from the third on dashed, so that a curve beneath stays visible."""
    return "-" if index < 2 else (0, (5, index))


def _marker(index: int) -> dict[str, Any]:
    """Validation points: an open ring for the baseline, a diamond inside it for the others."""
    color = COLORS[index % len(COLORS)]
    return {
        "linestyle": "none",
        "marker": "o" if index == 0 else "D",
        "markersize": 10 if index == 0 else 5,
        "markerfacecolor": "white" if index == 0 else color,
        "markeredgecolor": color,
        "markeredgewidth": 1.6 if index == 0 else 1.0,
        "zorder": 4,
    }


def _style(axes: Axes) -> None:
    axes.grid(True, color="#e9ecef", linewidth=1.0)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=12, color="#adb5bd")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#adb5bd")


def _style_token_axis(axes: Axes, *, last_token: int) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel("training tokens", fontsize=13)
    axes.set_xlim(0, 1.01 * last_token)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _label(run: LoadedRun) -> str:
    validations = run.evals_of("valid")
    final = f", final validation {validations[-1].loss:.4f}" if validations else ""
    return f"{recipe_of(run)}{final}"


SCHEDULE_COLORS = ("#1971c2", "#e8590c")
WEIGHT_DECAY_COLOR = "#868e96"


def plot_schedule(
    steps: Sequence[int],
    rates: Mapping[str, Sequence[float]],
    weight_decays: Sequence[float],
    output: Union[str, Path],
    *,
    marks: Mapping[str, float],
    title: str,
) -> Path:
    """Write a picture: learning rates over the steps, the weight decay below where it changes.

    Args:
        steps: the steps that are drawn.
        rates: for each curve, named by whose rate it is, the learning rate at those steps.
        weight_decays: at those steps.
        output: .png, .svg or .pdf.
        marks: steps at which a phase ends, by what ends there.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    changes = len(set(weight_decays)) > 1
    figure = Figure(figsize=(10, 5.4 if changes else 4), dpi=110, layout="constrained", facecolor="white")
    panels = figure.subplots(2 if changes else 1, 1, sharex=True, squeeze=False,
                             gridspec_kw={"height_ratios": (3, 1)} if changes else None)[:, 0]  # fmt: skip
    for (name, values), color in zip(rates.items(), SCHEDULE_COLORS, strict=False):
        panels[0].plot(steps, values, color=color, linewidth=2.2, label=name)
    for name, step in marks.items():
        panels[0].axvline(step, color="#adb5bd", linewidth=1, linestyle=(0, (4, 3)))
        panels[0].annotate(
            name, (step, 0.03), (3, 0), xycoords=("data", "axes fraction"), textcoords="offset points", rotation=90,
            va="bottom", fontsize=9, color="#495057",
        )  # fmt: skip
    panels[0].set_ylabel("learning rate")
    panels[0].set_ylim(bottom=0)
    panels[0].set_title(title, loc="left", fontsize=12, fontweight="bold")
    if len(rates) > 1:
        panels[0].legend(frameon=False)
    if changes:
        panels[1].plot(steps, weight_decays, color=WEIGHT_DECAY_COLOR, linewidth=2)
        panels[1].set_ylabel("weight decay")
    panels[-1].set_xlabel("step")
    panels[-1].set_xlim(0, max(steps))
    panels[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in panels:
        axes.grid(True, color="#e9ecef")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


DOCUMENTS_COLOR, TOKENS_COLOR = "#1971c2", "#e8590c"


@dataclass(frozen=True, kw_only=True)
class LengthPanel:
    """One shard.

    Attributes:
        title: above the panel.
        labels: of the bins, in tokens.
        num_documents: in each bin.
        num_tokens: in each bin.
    """

    title: str
    labels: Sequence[str]
    num_documents: Sequence[int]
    num_tokens: Sequence[int]


def plot_lengths(panels: Sequence[LengthPanel], output: Path) -> Path:
    """Write a PNG: for each shard the share of its documents, and of its tokens, by the length of the document.

    Raises:
        DataError: no panel.
    """
    if not panels:
        raise DataError("there is no shard to draw")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2 * len(panels)), dpi=100, layout="constrained", facecolor="white")
    for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        _draw(axes, panel)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    return output


def _draw(axes: Axes, panel: LengthPanel) -> None:
    for offset, (name, counts, color) in enumerate(
        (("documents", panel.num_documents, DOCUMENTS_COLOR), ("tokens", panel.num_tokens, TOKENS_COLOR))
    ):
        total = sum(counts) or 1
        places = [place + 0.42 * (offset - 0.5) for place in range(len(counts))]
        axes.bar(places, [count / total for count in counts], width=0.4, color=color, label=f"share of the {name}")
    axes.set_xticks(range(len(panel.labels)), panel.labels, rotation=40, ha="right", fontsize=9)
    axes.set_xlabel("tokens in the document", fontsize=10.5)
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    axes.legend(fontsize=10.5, frameon=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(True, axis="y", color="#f1f3f5")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
