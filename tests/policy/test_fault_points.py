"""Fault points of the table, the code and the document are the same."""

from __future__ import annotations

import ast
from collections import Counter

from test_docs import ROOT, table_rows
from test_import_levels import package_trees

from megafp8.resilience import fault_injection


def named(function: str) -> Counter[str]:
    """How often the package calls `fault_injection.point("name"...)` or `fault_injection.poison`, by name."""
    calls = (
        node for file, tree in package_trees() if file != "resilience/fault_injection.py" for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"fault_injection.{function}"
    )  # fmt: skip
    return Counter(ast.literal_eval(call.args[0]) for call in calls)


def test_fault_points_of_table_and_code_agree() -> None:
    assert set(named("point")) == set(fault_injection.POINTS)
    assert set(named("poison")) == set(fault_injection.POISONS)


def test_the_document_has_the_fault_point_table() -> None:
    text = (ROOT / "docs/dev/reliability_internals.md").read_text(encoding="utf-8")
    rows = table_rows(text, "point") + table_rows(text, "number that goes wrong")
    assert {row[0].strip("`"): row[1] for row in rows} == fault_injection.POINTS | fault_injection.POISONS


def test_fault_points_without_a_plan_do_nothing() -> None:
    assert fault_injection.point is fault_injection.noop_point
    assert fault_injection.poison is fault_injection.noop_poison
