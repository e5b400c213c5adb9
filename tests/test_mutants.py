"""`tests/mutants.py`: its mutants of a module, its marks, and what counts as caught."""

from __future__ import annotations

import ast
from pathlib import Path

import mutants
import pytest
from mutants import Marker, TimedTest, caught, mutants_of

SOURCE = '''"""A module, with 1 number in its docstring."""

from __future__ import annotations

def clip(value: int = 3, *, is_open: bool = True) -> int:
    """1 + 1."""
    if value > 10 and not is_open:
        return f"{value + 1}"
    return value - 1  # µ
'''
EXPECTED = {
    (5, "3", "(4)"), (5, "True", "(False)"), (7, "value > 10 and not is_open", "(not (value > 10 and (not is_open)))"),
    (7, "value > 10 and not is_open", "(value > 10 or not is_open)"), (7, "value > 10", "(value >= 10)"),
    (7, "10", "(11)"), (7, "not is_open", "(is_open)"), (8, 'f"{value + 1}"', "(None)"), (9, "value - 1", "(None)"),
    (9, "value - 1", "(value + 1)"), (9, "1", "(2)"),
}  # fmt: skip


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "clip.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path / "clip.py"


def test_mutants_of_a_module(module: Path) -> None:
    found = list(mutants_of(module))
    assert {(each.line, each.before, each.after) for each in found} == EXPECTED and len(found) == len(EXPECTED)
    for each in found:
        text = each.apply(module.read_bytes()).decode()
        assert text != SOURCE and text.count("\n") == SOURCE.count("\n")
        ast.parse(text)


def test_marks_are_of_the_executed_lines() -> None:
    hits, lines = bytearray(10), {line: line for line in range(10)}
    code = compile(Marker(lines).visit(ast.parse(SOURCE)), "clip.py", "exec")
    names: dict = {"__hit__": hits}
    exec(code, names)
    assert [line for line in lines if hits[line]] == [5]
    assert names["clip"](5) == 4
    assert [line for line in lines if hits[line]] == [5, 7, 9]


@pytest.mark.parametrize(("body", "expected"), [("assert True", False), ("assert False", True), ("1 +", True)])
def test_a_failure_is_caught(body: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    {body}\n", encoding="utf-8")
    option = "def pytest_addoption(parser):\n    parser.addoption('--all-cases', action='store_true')\n"
    (tmp_path / "conftest.py").write_text(option, encoding="utf-8")
    test = TimedTest("test_it.py::test_it", "test_it.py", 1.0)
    assert caught([test], tmp_path, limit_s=10)[0] is expected
    assert not caught([test], tmp_path, limit_s=0.5)[0], "no time for a test"
