"""Plots of learning-rate schedules and of document lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Union

from megafp8.analysis.plotting import COLORS, GRAY, mark, new_figure, plot_style, save_figure, use_si_prefixes
from megafp8.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SECOND_COLOR, FIRST_COLOR = COLORS[:2]


@plot_style()
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
                             height_ratios=(3, *[1] * len(changing)))[:, 0]  # fmt: skip
    top, bottom = panels[0], panels[-1]
    for (name, values), color in zip(rates.items(), (FIRST_COLOR, SECOND_COLOR), strict=False):
        top.plot(steps, values, color=color, linewidth=2.2, label=name)
    names: dict[float, list[str]] = {}
    for name, step in marks.items():
        names.setdefault(step, []).append(name)
    for step, together in names.items():
        mark(top, ", ".join(together), step)
    top.set_ylabel("learning rate")
    top.set_ylim(bottom=0)
    top.set_title(title)
    if len(rates) > 1:
        top.legend()
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


@plot_style({"font.size": 10.5})
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
    axes.set_xlabel("tokens in the document")
    axes.legend()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_title(panel.title)
    axes.grid(False, axis="x")
