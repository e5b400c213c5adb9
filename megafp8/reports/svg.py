"""Pictures as SVG for a page that has colours of its own, in light and in dark."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that no curve has, which the page replaces.
INK, GRID = "#0a0b0c", "#0c0b0a"


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
    svg = svg.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
