"""Shipped files name nothing outside the project: no folder of one machine, no package registry, no loose ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("megafp8", "tools", "launcher", "examples", "benchmarks", "tests", "docs", ".ci")
FILES = ("*.py", "*.md", "*.toml", "*.txt", "*.cfg", "*.sh")
SUFFIXES = {".py", ".sh", ".md", ".toml", ".txt", ".cfg", ".yaml", ".yml", ".json", ".sbatch", ""}

RULES = {
    "a folder of one machine": re.compile(r"(?<![\w.<>$}])/(?:work|root|home|tmp|scratch|mnt)/\w"),
    # Spelled so that this file does not name them either.
    "a package registry": re.compile(
        r"py[p]i\.org|python[h]osted|arti[f]actory|dev[p]i|nex[u]s3?\.|jf[r]og"
        r"|index-url[= ]+https?:|//(?:localhost|127\.)|https?://\S*/simple\b"
    ),
    "a loose end": re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b"),
}

BROKEN = [
    ("a folder of one machine", "cache = '/tmp/megafp8'"),
    ("a folder of one machine", "see /home/someone/notes.md"),
    ("a folder of one machine", "see /wor" + "k/notes.md"),
    ("a package registry", "pip install --index-url https://somewhere/simple torch"),
    ("a package registry", "see https://somewhere/simple/megafp8"),
    ("a package registry", "https://py" + "pi.org/project/megafp8"),
    ("a loose end", "# TODO: later"),
]
SOUND = ["tempfile.gettempdir()", "a/tmp/b", "$HOME/work/x", "data/home/x", "the work/life of it", "pip install torch"]


def broken_rules(line: str) -> list[str]:
    return [name for name, pattern in RULES.items() if pattern.search(line)]


@pytest.mark.parametrize(("rule", "line"), BROKEN)
def test_each_rule_detects_its_example(rule: str, line: str) -> None:
    assert broken_rules(line) == [rule]


@pytest.mark.parametrize("line", SOUND)
def test_no_rule_rejects_valid_lines(line: str) -> None:
    assert broken_rules(line) == []


def test_shipped_files_name_nothing_outside_the_project() -> None:
    found = []
    for path in shipped_files():
        name = path.relative_to(ROOT).as_posix()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            # Tests may use an invented path as an argument that nothing opens.
            rules = [rule for rule in broken_rules(line) if not (name.startswith("tests/") and "folder" in rule)]
            found += [f"{name}:{number}: {rule}: {line.strip()}" for rule in rules]
    assert not found, "\n".join(found)


def shipped_files() -> Iterator[Path]:
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    beside = (path for pattern in FILES for path in ROOT.glob(pattern))
    for path in sorted({*inside, *beside}):
        is_ours = path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts
        if is_ours and path != Path(__file__).resolve():
            yield path
