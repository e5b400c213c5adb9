"""Messages of the package and comments of examples name subcommands of `megafp8`, not scripts: an installed package has
no scripts of a checkout.

Docstrings may name scripts. Those that `--help` prints are translated (`build_command_parser`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from syntax_trees import tree_of

from megafp8.cli.subcommands import SUBCOMMANDS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megafp8"
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in (".sh", ".yaml"))
# The table of scripts.
EXEMPT = {"cli/subcommands.py"}
PROGRAM = re.compile(r"\b(?:tools|launcher)/|\bpretrain_gpt\.py")
"""A script that a subcommand stands for. Comments of examples may name other examples."""
SCRIPT = re.compile(r"\b(?:tools|launcher|examples)/|\bpretrain_gpt\.py")
# "megafp8 plan" names a subcommand, "megafp8 needs" does not.
COMMAND = re.compile(r"\bmegafp8 (?!(?:is|needs|reads|trains)\b)([a-z][a-z-]*)")
# A path that the code itself uses, not a message.
PATH = re.compile(r"[\w/.]+")


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every string literal that is no docstring and not just a path."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.lineno, node.value


def scripts_in_messages(tree: ast.Module) -> list[str]:
    return [f"{line}: {text}" for line, text in messages(tree) if SCRIPT.search(text) and not PATH.fullmatch(text)]


@pytest.mark.parametrize(
    "source",
    ['print("see tools/plan.py")', 'x = f"{y}: start launcher/slurm.py again"', 'x = "bash " "examples/quickstart.sh"'],
)
def test_scripts_in_messages_are_found(source: str) -> None:
    assert scripts_in_messages(ast.parse(source))


@pytest.mark.parametrize(
    "source", ['"""As tools/plan.py does."""', 'PRETRAIN = "pretrain_gpt.py"', 'x = "megafp8 plan"']
)
def test_sound_lines_pass(source: str) -> None:
    assert scripts_in_messages(ast.parse(source)) == []


def package_trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), tree_of(path)


def test_no_message_names_a_script() -> None:
    found = [
        f"megafp8/{file}:{line}" for file, tree in package_trees() if file not in EXEMPT
        for line in scripts_in_messages(tree)
    ]  # fmt: skip
    assert not found, "name the subcommand of megafp8 instead:\n" + "\n".join(found)


def test_subcommands_in_messages_exist() -> None:
    found = [
        f"megafp8/{file}:{line}: {text}"
        for file, tree in package_trees()
        for line, text in messages(tree)
        for name in COMMAND.findall(text)
        if name not in SUBCOMMANDS
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_comments_of_examples_name_subcommands(path: Path) -> None:
    comments = [line for line in path.read_text(encoding="utf-8").splitlines() if line.lstrip().startswith("#")]
    assert [line for line in comments if PROGRAM.search(line)] == []
    commands = [command for line in comments if (command := re.match(r"#   megafp8 ([a-z-]+)", line))]
    assert [command[0] for command in commands if command[1] not in SUBCOMMANDS] == []
