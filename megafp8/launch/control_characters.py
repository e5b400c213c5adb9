"""Texts that become lines of a script, names of folders and lines of output hold no control characters.

A line break in a value is where a generated script's own line ends: what follows it would be shell.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from megafp8.errors import ConfigError

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
