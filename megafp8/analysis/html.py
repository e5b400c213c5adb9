"""What the HTML pages of reports share: one file that needs nothing else, with colours for light and for dark."""

from __future__ import annotations

import io
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent
# Colours that no curve has, which the page replaces.
INK, GRID = "#0a0b0c", "#0c0b0a"


def render(template: str, **content: Any) -> str:
    """A page from a template beside this file; texts are escaped, a name that it lacks is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(template).render(**content)


def to_svg(figure: Figure, name: str) -> str:
    """The picture as an SVG element that the page's colours reach.

    Args:
        name: what it shows, for those who cannot see it; also keeps its parts apart from those of other pictures.
    """
    import matplotlib

    stream = io.StringIO()
    # The salt makes the names of parts depend on the picture alone, so that the same runs give the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="((?:figure|axes|patch|line2d|text|matplotlib)[\w.]*)"', "", svg)
    svg = svg.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(name)}" ', 1)


def alone(svg: str) -> str:
    """The picture as a file of its own, in light colours, for documents that have no page around it."""
    colored = svg.replace("var(--ink)", "#212529").replace("var(--grid)", "#dee2e6")
    return colored.replace("<svg ", '<svg style="background: white" ', 1) + "\n"
