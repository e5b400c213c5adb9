"""Nothing outside megafp8/recipes/ branches on a recipe's name. Code asks the recipe object instead.

Tests, documents, examples and benchmarks may name recipes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from megafp8.recipes import registry

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("megafp8", "tools", "launcher", "pretrain_gpt.py")


def recipe_literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of the string constants that are a recipe's name, alone or as a word of a flag."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in registry.names():
            yield node.lineno, str(node.value)


def named_defaults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Comparisons with the registry's defaults, which are also names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                if isinstance(side, ast.Attribute) and side.attr.startswith("DEFAULT_"):
                    yield node.lineno, ast.unparse(node)


def files() -> Iterator[Path]:
    for place in PLACES:
        path = ROOT / place
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


@pytest.mark.parametrize(
    "source", ["if recipe == 'mxfp8': pass", "NAMES = ('delayed', 'other')", "x = {'nvfp4': 1}", "f(recipe='rowwise')"]
)
def test_a_recipe_literal_is_detected(source: str) -> None:
    assert list(recipe_literals(ast.parse(source)))


def test_a_comparison_with_a_default_is_detected() -> None:
    assert list(named_defaults(ast.parse("recipe.name == registry.DEFAULT_FP8")))


@pytest.mark.parametrize("rule", [recipe_literals, named_defaults])
def test_no_file_outside_recipes_names_a_recipe(rule) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files()
        if path.parent != ROOT / "megafp8" / "recipes"
        for line, text in rule(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "ask the recipe object instead:\n" + "\n".join(found)
