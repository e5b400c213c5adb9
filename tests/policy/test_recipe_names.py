"""Nothing outside megafp8/recipes/ branches on a recipe's name. Code asks the recipe object instead.

Tests, documents, examples and benchmarks may name recipes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from syntax_trees import tree_of

from megafp8.recipes import registry

ROOT = Path(__file__).resolve().parents[2]
PATHS = ("megafp8", "tools", "launcher", "pretrain_gpt.py")
# Strings that name a recipe among other words, and why they may.
MENTIONS = {
    "megafp8/cli/run_comparison.py": "variants that --help gives as examples",
    "megafp8/mcore/cpu_patches.py": "quotes the source of megatron-core",
}
# Names that mean something else in a file.
OTHER_MEANINGS = {("megafp8/config/schema/training.py", "blockwise"): "a mode of tensor parallelism in Megatron-LM"}
# "delayed scaling" and "delayed scales" name the technique, which Transformer Engine and Megatron-LM call so.
MENTION = re.compile(
    rf"(?<![\w.-])({'|'.join(map(re.escape, registry.names()))})(?![\w-]| scal(es|ing))", re.IGNORECASE
)


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


def recipe_mentions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of the strings with a recipe's name among other words, without docstrings."""
    docstrings = {
        id(node.value)
        for parent in ast.walk(tree)
        if isinstance(body := getattr(parent, "body", None), list)
        for node in body
        if isinstance(node, ast.Expr)
    }
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in docstrings else None
        if isinstance(text, str) and text not in registry.names() and MENTION.search(text):
            yield node.lineno, text


def files() -> Iterator[Path]:
    for name in PATHS:
        path = ROOT / name
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


@pytest.mark.parametrize(
    "source", ["if recipe == 'mxfp8': pass", "NAMES = ('delayed', 'other')", "x = {'nvfp4': 1}", "f(recipe='rowwise')"]
)
def test_a_recipe_literal_is_detected(source: str) -> None:
    assert list(recipe_literals(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["x = 'blocks of MXFP8'", "f(help='delayed: margin')", "f'{flag}: not with tensorwise; remove {x}'"]
)
def test_a_name_among_other_words_is_detected(source: str) -> None:
    assert list(recipe_mentions(ast.parse(source)))


@pytest.mark.parametrize("source", ["x = 'delayed scaling'", "def f():\n    'About mxfp8.'", "x = 'my_mxfp8'"])
def test_docstrings_and_the_technique_are_not_detected(source: str) -> None:
    assert not list(recipe_mentions(ast.parse(source)))


def test_a_comparison_with_a_default_is_detected() -> None:
    assert list(named_defaults(ast.parse("recipe.name == registry.DEFAULT_FP8")))


@pytest.mark.parametrize("rule", [recipe_literals, named_defaults])
def test_no_file_outside_recipes_names_a_recipe(rule) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files()
        if path.parent != ROOT / "megafp8" / "recipes"
        for line, text in rule(tree_of(path))
        if (str(path.relative_to(ROOT)), text) not in OTHER_MEANINGS
    ]
    assert not found, "ask the recipe object instead:\n" + "\n".join(found)


def test_no_string_of_the_package_names_one_among_other_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files()
        if path.parent != ROOT / "megafp8" / "recipes" and str(path.relative_to(ROOT)) not in MENTIONS
        for line, text in recipe_mentions(tree_of(path))
    ]
    assert not found, "describe the property, or take the names from the registry:\n" + "\n".join(found)


def test_every_exception_is_needed() -> None:
    for name in MENTIONS:
        assert list(recipe_mentions(tree_of(ROOT / name))), name
    for name, literal in OTHER_MEANINGS:
        assert literal in dict(map(reversed, recipe_literals(tree_of(ROOT / name))))
