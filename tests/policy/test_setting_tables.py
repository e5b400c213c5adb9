"""What is known about a setting stands at its declaration: no other list of setting names says what settings are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from syntax_trees import tree_of

from megafp8.config.settings import all_settings, settings_by_name

ROOT = Path(__file__).resolve().parents[2]
MOST_NAMES = 3
# Values of settings, and names of other programs for them.
TABLES_OF_VALUES = {
    "checkpoint/convert/fields.py": "a model family",
    "checkpoint/convert/problems.py": "the smallest run",
    "config/fp8_lm.py": "the levels of FP8-LM",
    "planning/fit.py": "the same run in BF16",
}


def names_in(node: ast.AST) -> int:
    """How many names of settings a list, a dictionary or a string of words has."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        words = node.value.split() if "\n" not in node.value else []  # no prose
    elif isinstance(node, (ast.Tuple, ast.Set, ast.List, ast.Dict)):
        items = node.keys if isinstance(node, ast.Dict) else node.elts
        words = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    else:
        return 0
    return sum(word in settings_by_name() for word in words)


def tables(tree: ast.Module) -> list[int]:
    """Lines of tables with the names of several settings."""
    return [getattr(node, "lineno", 0) for node in ast.walk(tree) if names_in(node) > MOST_NAMES]


@pytest.mark.parametrize("source", ['A = ("%s", "%s", "%s", "%s")', 'A = "%s %s %s %s".split()'])
def test_tables_are_found(source: str) -> None:
    names = [setting.name for setting in all_settings()][:4]
    assert tables(ast.parse(source % tuple(names))) == [1]
    assert tables(ast.parse(source % ("a", "b", *names[2:]))) == []


def test_no_table_says_what_settings_are() -> None:
    package = ROOT / "megafp8"
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if (lines := tables(tree_of(path))) and not name.startswith("checkpoint/convert/families/"):
            found[name] = lines
    assert found.keys() <= TABLES_OF_VALUES.keys(), (
        f"{found}: say it at the declaration of the settings (range=, needs=, requires= or role=, config/schema/)"
    )
    assert found.keys() == TABLES_OF_VALUES.keys(), "a file of TABLES_OF_VALUES has no such table any more"
