"""No import cycles, one meaning for each class name, and files of limited size."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest
from syntax_trees import tree_of

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 700
Graph = Mapping[str, set[str]]


@cache
def trees(folder: str) -> dict[str, ast.Module]:
    """Syntax trees by dotted module name."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return {name: tree_of(path) for name, path in zip(names, paths, strict=True)}


def import_graph(modules: Mapping[str, ast.Module]) -> Graph:
    """The imports of each module, including those inside functions."""
    graph: dict[str, set[str]] = defaultdict(set)
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found = {f"{node.module}.{alias.name}" for alias in node.names}
                found = {each if each in modules else node.module for each in found}
            else:
                continue
            graph[name] |= {each for each in found if each in modules and each != name}
    return graph


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules that reach one another (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def repeated_classes(modules: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Class names that more than one module defines."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module)
    return {name: where for name, where in homes.items() if len(where) > 1}


def parsed(**sources: str) -> dict[str, ast.Module]:
    return {name: ast.parse(source) for name, source in sources.items()}


def test_cycles_are_found() -> None:
    modules = parsed(a="import b", b="def f():\n    from c import x", c="import a", d="import a")
    assert cycles(import_graph(modules)) == [["a", "b", "c"]]
    assert cycles(import_graph(parsed(a="import b", b="import c", c=""))) == []


def test_repeated_classes_are_found() -> None:
    assert repeated_classes(parsed(a="class Plan: ...", b="class Plan: ...", c="class Other: ...")) == {
        "Plan": ["a", "b"]
    }


@pytest.mark.parametrize("folder", ["megafp8", "benchmarks"])
def test_no_import_cycles(folder: str) -> None:
    graph = dict(import_graph(trees(folder)))
    graph.pop("megafp8", None)  # it imports the Python API at the first use of a name
    assert cycles(graph) == []


def test_a_class_name_has_one_meaning() -> None:
    assert repeated_classes(trees("megafp8")) == {}


def test_files_are_short() -> None:
    assert list(too_long((ROOT / "megafp8").rglob("*.py"))) == []


def too_long(paths: Iterable[Path]) -> Iterable[str]:
    for path in paths:
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > MOST_LINES:
            yield f"{path.relative_to(ROOT)} has {num_lines} lines, more than {MOST_LINES}"
