"""Shared parts of all figures: colours, figure set-up, axes style and saving.

matplotlib is imported where a figure is made, so that modules which only may draw start without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, Optional, Union

from megafp8.utils.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")
COLORS = ("#e8590c", "#1971c2", "#2f9e44", "#9c36b5", "#c2255c", "#0c8599", "#f08c00")
GRAY = "#868e96"
GRID_COLOR = "#e9ecef"


def new_figure(width_inches: float, height_inches: float, dpi: int = 100) -> Figure:
    """An empty figure with a white background, which lays its axes out by itself."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_inches, height_inches), dpi=dpi, layout="constrained", facecolor="white")


def picture_problems(flag: str, path: Optional[Path]) -> list[str]:
    """What is wrong with the path of a flag, whose suffix is the format of a figure; None is no figure."""
    if path is None or path.suffix in PICTURES:
        return []
    return [f"{flag} {path}: must end in {', '.join(PICTURES)}"]


def save_figure(figure: Figure, path: Union[str, Path]) -> Path:
    """Write a figure in the format of the file's suffix; the folder is created."""
    path = Path(path)
    take_names_literally(figure)
    with atomic_write(path) as stream:
        figure.savefig(stream, format=path.suffix[1:])
    return path


def take_names_literally(figure: Figure) -> None:
    """Turn formulas between dollar signs off, which names of runs may have; labels of powers keep them."""
    from matplotlib.text import Text
    from matplotlib.ticker import LogFormatter

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if isinstance(axis.get_major_formatter(), LogFormatter):
            for label in axis.get_ticklabels(which="both"):
                label.set_parse_math(True)


def style_axes(
    axes: Axes,
    title: str = "",
    *,
    grid_axis: Literal["both", "x", "y"] = "both",
    grid_color: str = GRID_COLOR,
    text_color: str = "black",
) -> None:
    """Set the title, draw the grid behind the data and remove the top and right spines."""
    if title:
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=text_color)
    axes.grid(True, axis=grid_axis, color=grid_color)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def use_si_prefixes(axis: Axis) -> None:
    """Label the ticks of an axis with k, M, G and so on."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))
