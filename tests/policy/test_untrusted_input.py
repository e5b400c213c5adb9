"""Untrusted files are read only by `megafp8/utils/`, and paths on a command line are checked.

Read from the source. The readers of json and yaml raise errors of many classes, block on a named pipe and accept files
of any size and depth. `type=Path` accepts paths that no file can have, which then fail with a traceback.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from syntax_trees import tree_of

ROOT = Path(__file__).resolve().parents[2]
PARSERS = {
    "json": {"load", "loads", "JSONDecoder"},
    "yaml": {"load", "load_all", "safe_load", "safe_load_all", "full_load", "unsafe_load", "compose", "parse", "scan"},
}
EXCEPTIONS = {
    "megafp8/utils/strict_json.py": "the reader itself",
    "megafp8/data/preprocessing/documents.py": "lines of training text, by the million; their own reader bounds them",
    "megafp8/data/preprocessing/preprocess.py": "what it wrote itself a moment ago, to have tuples as lists",
    "megafp8/data/tokenizers/encoders.py": "text that a library makes of a model, in memory",
}


def own_parsers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Uses of the readers of json and yaml."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = {node.attr} & PARSERS.get(node.value.id, set())
            yield from ((node.lineno, f"{node.value.id}.{name}") for name in names)
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names} & PARSERS.get(node.module or "", set())
            yield from ((node.lineno, f"{node.module}.{name}") for name in names)


def unchecked_paths(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Command-line arguments of type `Path`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "type" and getattr(node.value, "id", "") == "Path":
            yield node.value.lineno, "type=Path"


@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.loads(text)", "import json\nmap(json.loads, lines)", "from json import load",
        "import yaml\nyaml.compose(x)", "def f():\n    import yaml\n    return yaml.safe_load(x)",
        "from yaml import safe_load as read",
    ],
)  # fmt: skip
def test_parsers_are_found(source: str) -> None:
    assert list(own_parsers(ast.parse(source)))


def test_unchecked_paths_are_found() -> None:
    assert list(unchecked_paths(ast.parse("parser.add_argument('--x', type=Path, metavar='F')")))


def test_only_the_reader_module_parses() -> None:
    found = {file: list(own_parsers(tree)) for file, tree in sources()}
    uses = {file: lines for file, lines in found.items() if lines}
    surplus = {file: lines for file, lines in uses.items() if file not in EXCEPTIONS}
    assert not surplus, f"use megafp8/utils/strict_json.py or strict_yaml.py: {surplus}"
    assert set(EXCEPTIONS) <= set(uses), "remove the exceptions that are none any more"


def test_paths_on_command_lines_are_checked() -> None:
    found = {file: lines for file, tree in sources() if (lines := list(unchecked_paths(tree)))}
    assert not found, f"use path_argument of megafp8/utils/files.py: {found}"


@functools.cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    """Every module that users run, with its syntax tree."""
    files = [path for folder in ("megafp8", "tools", "launcher") for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple((path.relative_to(ROOT).as_posix(), tree_of(path)) for path in (*files, ROOT / "pretrain_gpt.py"))
