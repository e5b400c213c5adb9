"""The names of the package: few, documented, and imported at their first use."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import megafp8
from megafp8.recipes import registry


def modules_after(code: str) -> set[str]:
    """The modules that a fresh process has imported after some code."""
    text = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    ).stdout
    return set(text.split())


@pytest.mark.parametrize("code", ["import megafp8", "import megafp8; megafp8.recipes.get('nvfp4')"])
def test_imports_are_lazy(code: str) -> None:
    assert not modules_after(code) & {"torch", "numpy", "pandas", "megatron", "megafp8.config"}


def test_the_planner_and_the_reader_need_no_torch() -> None:
    assert "torch" not in modules_after("import megafp8; megafp8.plan, megafp8.read_records")


def test_modules_need_no_megatron_core() -> None:
    assert "megatron.core" not in modules_after("import megafp8; megafp8.QuantizedLinear(16, 16)")


def test_the_stub_has_the_names() -> None:
    stub = ast.parse(Path(megafp8.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert sorted(name.asname or "" for node in imports for name in node.names) == sorted(megafp8.__all__)
    for node in imports:
        for name in node.names:
            assert getattr(importlib.import_module(node.module or ""), name.name) is getattr(megafp8, name.name)


@pytest.mark.parametrize("name", megafp8.__all__)
def test_every_name_exists_and_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(megafp8, name))
    assert name in dir(megafp8)


def test_other_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'megafp8' has no attribute 'Linear'"):
        megafp8.Linear  # noqa: B018


def test_recipes() -> None:
    assert megafp8.recipes.names() == registry.names()
    assert megafp8.recipes.get("delayed").options["fp8_amax_compute_algo"] == "max"
