"""HTML pages of reports: self-contained files with inline SVG, for light and dark mode.

A page has a header, sections in order, and facts about what was run. A section has what it needs of a text, a table,
notes, warnings and figures. `page.html.jinja` has the markup.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from megafp8.analysis.plot_comparison import make_narrow
from megafp8.analysis.plotting import GRID, INK, take_names_literally
from megafp8.analysis.tables import Table
from megafp8.utils.files import atomic_write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class PageFigure:
    """Pictures with one caption.

    Attributes:
        pictures: by name, the SVG of each view: "wide" and "narrow" screens, or one for both.
        has_panels: whether the pictures stand side by side.
    """

    pictures: Mapping[str, Mapping[str, str]]
    caption: str = ""
    has_panels: bool = False


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """A part of a page, with its content in the order of the fields.

    Attributes:
        name: id in the page.
        colors: of the rows of the table, as CSS.
        classes: of the verdicts in the second column of the table.
    """

    name: str = ""
    title: str = ""
    text: str = ""
    table: Optional[Table] = None
    colors: Sequence[str] = ()
    classes: Sequence[str] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    figures: Sequence[PageFigure] = ()


def render(**content: Any) -> str:
    """The HTML of a page. Text is escaped; an undefined name is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.jinja").render(**content)


def page_figure(title: str, figure: Figure, caption: str) -> PageFigure:
    """A figure for wide and for narrow screens."""
    views = {"wide": to_svg(figure, title), "narrow": to_svg(make_narrow(figure), f"{title} (narrow)")}
    return PageFigure(pictures={title: views}, caption=caption.strip())


def write_files(folder: Path, contents: Mapping[str, str]) -> list[Path]:
    """Write the files of a report into a folder, which is created, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        atomic_write_text(folder / name, text)
    return [folder / name for name in contents]


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element that follows the page's colours.

    Args:
        name: what the figure shows, for screen readers. It also makes the ids of the figure's parts unique in the page.
    """
    import matplotlib

    take_names_literally(figure)
    stream = io.StringIO()
    # With a fixed salt the ids depend on the figure only, so the same runs give the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Only ids that something refers to are unique in the page.
    references = set(re.findall(r"#([\w.]+)", svg))
    svg = re.sub(r'\bid="([\w.]+)"', lambda found: found[0] if found[1] in references else "", svg)
    svg = svg.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(name)}" ', 1)


def standalone_svg(figure: Figure, name: str) -> str:
    """The content of an SVG file, in light colours, for use outside a page; arguments as of `to_svg`."""
    colored = to_svg(figure, name).replace("var(--ink)", "#212529").replace("var(--grid)", "#dee2e6")
    return colored.replace("<svg ", '<svg style="background: white" ', 1) + "\n"
