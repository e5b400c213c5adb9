"""A learning-rate schedule as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Union

COLORS = ("#1971c2", "#e8590c")
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
    for (name, values), color in zip(rates.items(), COLORS, strict=False):
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
