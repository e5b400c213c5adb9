"""Tables as text: columns in line for a terminal, and Markdown that can be read in its source, too.

`sides` has a letter for each column: `l` for words, which stand to the left, `r` for numbers. Columns behind its end
are numbers.

Texts that become lines of a script, names of folders and lines of output hold no control characters.

A line break in a value is where a generated script's own line ends: what follows it would be shell.
"""

from __future__ import annotations

import datetime
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from megafp8.errors import ConfigError

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


# Control characters, separators of lines and paragraphs, and surrogates, which stand for bytes that are not UTF-8.
REFUSED = ("Cc", "Zl", "Zp", "Cs")


def control_characters(text: str, allowed: str = "") -> list[str]:
    """Those of a text, each once, but for those in `allowed`."""
    return [char for char in dict.fromkeys(text) if char not in allowed and unicodedata.category(char) in REFUSED]


def control_problems(where: str, value: Any, allowed: str = "") -> list[str]:
    """What is wrong with a value: a text or a path, or sequences and mappings of such; other values have no characters.

    Args:
        where: what the value is called, in errors.
    """
    if isinstance(value, Mapping):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, (str, PurePath)):
        found = ", ".join(map(ascii, control_characters(str(value), allowed)))
        return [f"{where}: {str(value)!r}: remove the control characters {found}"] if found else []
    if isinstance(value, Sequence):
        return [problem for item in value for problem in control_problems(where, item, allowed)]
    return []


def check_lines(lines: Sequence[str]) -> None:
    """Refuse lines of a script that a reader of it would take for more than one.

    Raises:
        ConfigError: with all of them.
    """
    problems = [problem for line in lines for problem in control_problems("a line of the script", line, allowed="\t")]
    if problems:
        raise ConfigError(problems)


def utc_now() -> str:
    """The present moment in UTC as ISO 8601 text, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
