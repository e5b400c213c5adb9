"""What a user may have meant: the nearest of the known names, and the messages that say so.

A wrong suggestion is worse than none, so that only names are suggested that differ by case, by `_` for `-`, by an
ending, or by a few letters.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Optional

SIMILARITY = 0.8
"""Least ratio of `difflib` of a suggestion. `max-steps` and `max-crashes` have 0.7."""
PREFIX_CHARS = 4
"""Least length of a text of which a suggestion is a longer form, as `tensorwise` is of `tensor`."""
LOCAL_FOLDERS = ("checkpoints", "data", "models", "runs")
"""First parts of paths that are no owners on the Hugging Face hub, even where the folder does not exist."""


def same_name(text: str, known: Iterable[str]) -> Optional[str]:
    """The known name that is equal but for case, and `_` for `-`; None if there is none."""
    return next((name for name in known if _plain(name) == _plain(text)), None)


def closest(text: str, known: Iterable[str], count: int = 1, similarity: float = SIMILARITY) -> list[str]:
    """The known names that a text may have meant, nearest first; empty if none is near."""
    import difflib  # here, so that --help does not import it

    names = {_plain(name): name for name in known}
    near = difflib.get_close_matches(_plain(text), names, n=count, cutoff=similarity)
    if len(_plain(text)) >= PREFIX_CHARS:
        near += [name for name in names if name.startswith(_plain(text)) and name not in near]
    return [names[name] for name in near[:count]]


def did_you_mean(text: str, known: Iterable[str], count: int = 1, similarity: float = SIMILARITY) -> str:
    """`; did you mean NAME?` to append to a message; empty if no known name is near."""
    near = closest(text, known, count, similarity)
    return f"; did you mean {' or '.join(near)}?" if near else ""


@dataclass(frozen=True)
class NameType:
    """argparse `type` of a name in any case: `known GPUs: h100, h200` for another one.

    Attributes:
        names: the known names, which shells complete.
        kind: of the names, in the plural.
        otherwise: what to do for one that is not known.
        spelling: makes a known name of what else people write for it.
        similarity, count: of the names to suggest.
    """

    names: tuple[str, ...]
    kind: str
    otherwise: str = ""
    spelling: Callable[[str], str] = str
    similarity: float = SIMILARITY
    count: int = 1

    def __call__(self, text: str) -> str:
        if (name := same_name(self.spelling(text), self.names)) is None:
            near = did_you_mean(text, self.names, self.count, self.similarity)
            otherwise = f"; {self.otherwise}" if self.otherwise else ""
            raise argparse.ArgumentTypeError(f"{text}{near} (known {self.kind}: {', '.join(self.names)}){otherwise}")
        return name


def unknown_keys(
    lines: Mapping[str, Optional[int]],
    known: Iterable[str],
    path: object = "",
    hint: Callable[[str], str] = lambda _: "",
) -> list[str]:
    """A problem for each unknown key of a file: `job.yaml:2: unknown key 'node'; did you mean nodes?`.

    The first one without a suggestion lists the known keys.

    Args:
        lines: the line of each key, None where it is not known.
        path: of the file; empty if there is none.
        hint: what else to append for a key, such as `; use lr`; it replaces the suggestion.
    """
    known, problems, is_listed = list(known), [], False
    for key, line in lines.items():
        if key in known:
            continue
        suggestion = hint(key) or did_you_mean(key, known)
        if not (suggestion or is_listed):
            suggestion, is_listed = f"; the keys are {', '.join(known)}", True
        where = f"{path}{f':{line}' if line else ''}: " if path else ""
        problems.append(f"{where}unknown key {key!r}{suggestion}")
    return problems


def hub_hint(name: str, *files: str) -> str:
    """`: to download ..., hf download ...` for a missing path that looks like a name on the Hugging Face hub.

    Args:
        files: to download; none: all.
    """
    owner = name.partition("/")[0]
    is_local = owner in LOCAL_FOLDERS or os.path.isdir(owner)
    if is_local or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        return ""
    return f": to fetch it from the Hugging Face hub, {download_command(name, *files)}"


def download_command(name: str, *files: str) -> str:
    """The command that downloads a model of the Hugging Face hub, or some of its files."""
    return " ".join(["hf download", name, *files, "--local-dir", name.rpartition("/")[2]])


def _plain(name: str) -> str:
    return name.casefold().replace("_", "-").lstrip("-")
