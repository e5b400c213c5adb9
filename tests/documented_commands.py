"""The commands in the bash blocks of documents, as a reader copies them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/dev").glob("*.md")])
PAGES = ("README.md", "CONTRIBUTING.md", *(path.relative_to(ROOT).as_posix() for path in DOCS))
BASH_BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
COMMENT = re.compile(r"(^|\s+)#.*$")


@dataclass(frozen=True)
class Command:
    """One command, with its continued lines joined and its comment removed.

    Attributes:
        block: number of its block in the document, from 1.
        text: as the shell takes it.
    """

    block: int
    text: str


def commands_in(document: Path) -> Iterator[Command]:
    """The commands of a document, in order."""
    for number, block in enumerate(BASH_BLOCK.findall(document.read_text(encoding="utf-8")), 1):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if text := COMMENT.sub("", line).strip():
                yield Command(number, text)


def lay_out(folder: Path) -> None:
    """The project's folder as commands name it, with everything that the setup needs."""
    for name in ("configs", "examples", "launcher", "benchmarks", "pretrain_gpt.py"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "tools").mkdir()
    for path in (ROOT / "tools").iterdir():
        (folder / "tools" / path.name).symlink_to(path)
    (folder / "tools/setup_venv.sh").unlink()
    (folder / "tools/setup_venv.sh").write_text("export PYTHON\n", encoding="utf-8")
