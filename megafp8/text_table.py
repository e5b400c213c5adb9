"""Tables as text: columns in line for a terminal, and Markdown that can be read in its source, too.

`sides` has a letter for each column: `l` for words, which stand to the left, `r` for numbers. Columns behind its end
are numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# What begins an element of Markdown anywhere, and what begins one only where a line starts. `_` stays: names have many,
# and GitHub and CommonMark take none within a word for markup.
MARKUP = re.compile(r"[\\`*\[\]|]")
LINE_START = re.compile(r"^(?:[+-]|#+|(\d+)(?=[.)]))(?=[.)]? )")


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], sides: str = "l") -> str:
    """For a terminal: the header, a rule, a line for each row."""
    widths = column_widths(header, rows)
    rule = ["-" * width for width in widths]
    return "\n".join("  ".join(padded(cells, widths, sides)).rstrip() for cells in (header, rule, *rows))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], sides: str = "l") -> str:
    """The same in Markdown, which cells may hold."""
    widths = column_widths(header, rows)
    lines = [f"| {' | '.join(padded(cells, widths, sides))} |" for cells in (header, *rows)]
    ends = ["-" if side == "l" else ":" for side in sides.ljust(len(header), "r")]
    rule = "|".join(f"-{'-' * width}{end}" for width, end in zip(widths, ends, strict=True))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def markdown_of_texts(header: Sequence[str], rows: Sequence[Sequence[str]], sides: str = "l") -> str:
    """The same of cells that are shown as they are, whatever they hold."""
    header, *rows = [[escaped(cell) for cell in cells] for cells in (header, *rows)]
    return markdown(header, rows, sides)


def escaped(text: str) -> str:
    """A line of Markdown that shows a text as it is: names from disk may hold markup, HTML and line breaks."""
    line = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    line = MARKUP.sub(r"\\\g<0>", line.replace("&", "&amp;").replace("<", "&lt;"))
    line = f"\\{line}" if line.startswith(">") else line
    return LINE_START.sub(lambda found: f"{found[0]}\\" if found[1] else f"\\{found[0]}", line)


def column_widths(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Letters of the longest cell of each column."""
    return [max(map(len, column)) for column in zip(header, *rows, strict=True)]


def padded(cells: Sequence[str], widths: Sequence[int], sides: str) -> list[str]:
    """The cells of a line, filled up with blanks on the other side."""
    return [
        cell.ljust(width) if side == "l" else cell.rjust(width)
        for cell, width, side in zip(cells, widths, sides.ljust(len(widths), "r"), strict=True)
    ]
