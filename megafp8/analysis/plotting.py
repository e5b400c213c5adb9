"""Shared parts of all figures: colours, style, figure set-up and saving.

matplotlib is imported where a figure is made, so that modules which only may draw start without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

from megafp8.utils.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")
# The colours of Okabe and Ito, which colour-blind readers tell apart, without their black and yellow, and two more.
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b4173", "#8c6d31")
GRAY = "#868e96"
LIMIT_COLOR = "#9b2226"
"""Of dashed lines that no curve should cross."""
# Placeholders, which no curve uses; a page replaces them with its own text and grid colours.
INK, GRID = "#0a0b0c", "#0c0b0a"
PAGE_STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), GRID),
}


@contextmanager
def plot_style(settings: Any = None) -> Iterator[None]:
    """Draw in the style of figures.mplstyle, with a dictionary of further settings of matplotlib. Also a decorator."""
    import matplotlib

    with matplotlib.rc_context(settings, Path(__file__).with_name("figures.mplstyle")):
        yield


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


def mark(axes: Axes, name: str, x: float, color: str = "#495057") -> None:
    """Mark a place on the x axis with a dashed line and its name."""
    axes.axvline(x, color="#adb5bd", linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        name, (x, 0.03), (3, 0), xycoords=("data", "axes fraction"), textcoords="offset points", rotation=90,
        va="bottom", fontsize=9, color=color,
    )  # fmt: skip


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


def use_si_prefixes(axis: Axis) -> None:
    """Label the ticks of an axis with k, M, G and so on."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))
