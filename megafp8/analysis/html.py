"""HTML pages of reports: self-contained files with inline SVG, for light and dark mode."""

from __future__ import annotations

import io
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megafp8.analysis.plotting import GRID, INK, take_names_literally

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent


def render(template: str, **content: Any) -> str:
    """Render a template of this folder. Text is escaped; an undefined name is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(template).render(**content)


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


def standalone_svg(svg: str) -> str:
    """The content of an SVG file, in light colours, for use outside a page."""
    colored = svg.replace("var(--ink)", "#212529").replace("var(--grid)", "#dee2e6")
    return colored.replace("<svg ", '<svg style="background: white" ', 1) + "\n"
