"""How long the documents of shards are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megafp8.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
