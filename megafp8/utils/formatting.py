"""Text tables, Markdown tables, and checks for control characters.

The `sides` argument of tables has a letter for each column: `l` aligns left, `r` right. Columns beyond its end align
right.

Values that go into a generated script must not contain control characters: what follows a line break would be run as
shell code.
"""

from __future__ import annotations

import datetime
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from megafp8.errors import ConfigError
from megafp8.utils.files import visible

# Characters that are markup anywhere, and those that are markup only at the start of a line. `_` is not escaped: names
# contain many, and within a word CommonMark does not treat it as markup.
MARKUP = re.compile(r"[\\`*\[\]|]")
LINE_START = re.compile(r"^(?:[+-]|#+|(\d+)(?=[.)]))(?=[.)]? )")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], sides: str = "l") -> str:
    """A table for a terminal: header, rule, one line per row. Unprintable characters of the cells are escaped."""
    header, *rows = [[*map(visible, cells)] for cells in (header, *rows)]
    widths = _column_widths(header, rows)
    rule = ["-" * width for width in widths]
    return "\n".join("  ".join(_pad_cells(cells, widths, sides)).rstrip() for cells in (header, rule, *rows))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], sides: str = "l") -> str:
    """A Markdown table. Cells may contain Markdown."""
    widths = _column_widths(header, rows)
    lines = [f"| {' | '.join(_pad_cells(cells, widths, sides))} |" for cells in (header, *rows)]
    ends = ["-" if side == "l" else ":" for side in sides.ljust(len(header), "r")]
    rule = "|".join(f"-{'-' * width}{end}" for width, end in zip(widths, ends, strict=True))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def escaped_markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], sides: str = "l") -> str:
    """A Markdown table whose cells are plain text: markup in them is escaped."""
    header, *rows = [[escape_markdown(cell) for cell in cells] for cells in (header, *rows)]
    return markdown_table(header, rows, sides)


def escape_markdown(text: str) -> str:
    """Escape a text for one line of Markdown. Names from disk may contain markup, HTML and line breaks."""
    line = "".join(char if char.isprintable() else " " for char in text).strip()
    line = MARKUP.sub(r"\\\g<0>", line.replace("&", "&amp;").replace("<", "&lt;"))
    line = f"\\{line}" if line.startswith(">") else line
    return LINE_START.sub(lambda found: f"{found[0]}\\" if found[1] else f"\\{found[0]}", line)


def _column_widths(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Characters of the longest cell of each column."""
    return [max(map(len, column)) for column in zip(header, *rows, strict=True)]


def _pad_cells(cells: Sequence[str], widths: Sequence[int], sides: str) -> list[str]:
    """The cells of a row, padded to the widths."""
    return [
        cell.ljust(width) if side == "l" else cell.rjust(width)
        for cell, width, side in zip(cells, widths, sides.ljust(len(widths), "r"), strict=True)
    ]


# Unicode categories: control characters, line and paragraph separators, and surrogates, which stand for bytes that are
# not UTF-8.
REFUSED_CATEGORIES = ("Cc", "Zl", "Zp", "Cs")


def control_problems(where: str, value: Any, allowed: str = "") -> list[str]:
    """Problems with control characters in a string or path, or in those of a nested sequence or mapping.

    Args:
        where: name of the value in the messages.
        value: objects of other types have no problems.
        allowed: control characters that are accepted.
    """
    if isinstance(value, Mapping):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, (str, PurePath)):
        refused = {char for char in str(value) if unicodedata.category(char) in REFUSED_CATEGORIES} - set(allowed)
        found = ", ".join(ascii(char) for char in dict.fromkeys(str(value)) if char in refused)
        return [f"{where}: {str(value)!r}: remove the control characters {found}"] if found else []
    if isinstance(value, Sequence):
        return [problem for item in value for problem in control_problems(where, item, allowed)]
    return []


def check_lines(lines: Sequence[str]) -> None:
    """Check that the lines of a generated script contain no control characters but tabs.

    Raises:
        ConfigError: with every line that does.
    """
    problems = [problem for line in lines for problem in control_problems("a line of the script", line, allowed="\t")]
    if problems:
        raise ConfigError(problems)


def duration_text(seconds: float) -> str:
    """A duration in the unit that suits it: `12.5 hours`, `31.2 days`, `4.2 years`."""
    units = ((365 * 24 * 3600, "years", 1), (24 * 3600, "days", 2), (3600, "hours", 1), (60, "minutes", 1))
    size, name = next(((size, name) for size, name, least in units if seconds >= least * size), (1, "seconds"))
    return f"{seconds / size:,.1f} {name}"


def utc_now() -> str:
    """The current time in UTC, in ISO 8601 to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
