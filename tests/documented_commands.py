"""The commands in the bash blocks of documents, as a reader copies them, and the Python blocks of tutorials."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted(path for folder in ("docs", "docs/dev", "docs/tutorials") for path in (ROOT / folder).glob("*.md"))
PAGES = ("README.md", "CONTRIBUTING.md", *(path.relative_to(ROOT).as_posix() for path in DOCS))
BLOCK = re.compile(r"```(bash|python)\n(.*?)```", re.DOTALL)
COMMENT = re.compile(r"(^|\s+)#.*$")


@dataclass(frozen=True)
class Command:
    """One command, with its continued lines joined and its comment removed.

    Attributes:
        block: number of its block among the bash and Python blocks of the document, from 1.
        text: as the shell takes it.
    """

    block: int
    text: str


def commands_in(document: Path) -> Iterator[Command]:
    """The commands of a document, in order."""
    for number, block in _blocks_of(document, "bash"):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if text := COMMENT.sub("", line).strip():
                yield Command(number, text)


def python_of(document: Path) -> dict[int, str]:
    """The Python blocks of a document by their numbers."""
    return dict(_blocks_of(document, "python"))


def _blocks_of(document: Path, language: str) -> Iterator[tuple[int, str]]:
    for number, (found, block) in enumerate(BLOCK.findall(document.read_text(encoding="utf-8")), 1):
        if found == language:
            yield number, block


def lay_out(folder: Path) -> None:
    """The project's folder as commands name it, with everything that the setup needs."""
    for name in ("configs", "examples", "launcher", "benchmarks", "docs", "pretrain_gpt.py"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "tools").mkdir()
    for path in (ROOT / "tools").iterdir():
        (folder / "tools" / path.name).symlink_to(path)
    (folder / "tools/setup_venv.sh").unlink()
    (folder / "tools/setup_venv.sh").write_text("export PYTHON\n", encoding="utf-8")
