"""Nothing compares the name of the layers or the class of their backend. Code asks the backend's facts instead.

The three names stand in the setting, in the registry, and in the configuration of other programs. In texts, as in
`--transformer-impl emulated`, they may be anywhere.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from syntax_trees import tree_of

from megafp8.config import layer_backends
from megafp8.config.layer_backends import LAYER_BACKENDS, LayerBackend
from megafp8.config.schema import PrecisionConfig
from megafp8.config.settings import settings_by_name

PACKAGE = Path(__file__).resolve().parents[2] / "megafp8"
NAMED_IN = {
    "config/layer_backends.py": "the registry",
    "config/schema/precision.py": "the choices of the setting",
    "checkpoint/convert/megatron_args.py": "Megatron-LM's argument in its checkpoints",
    "checkpoint/convert/from_megatron.py": "Megatron-LM's argument in its checkpoints",
    "training/device_verification/steps.py": "the flags of its processes",
    "device/capability.py": "the name of the package",
    "planning/dry_run.py": "the name of the package",
    "mcore/cpu_patches.py": "the name of the package",
    "launch/doctor/checks.py": "the state of a recipe on this machine",
    "analysis/scaling_report.py": "the arithmetic in records",
    "analysis/comparison_page.py": "the arithmetic in records",
}
OWN = {name for name in LAYER_BACKENDS if name != "local"}  # `local` has other meanings, too
CLASSES = {each.__name__ for each in (LayerBackend, *LayerBackend.__subclasses__())}
OBJECTS = {name for name, value in vars(layer_backends).items() if isinstance(value, LayerBackend)}
HOLDERS = {"implementation", "transformer_impl", "backend"}


def comparisons(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Comparisons and type checks of layers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = {getattr(part, "attr", getattr(part, "id", "")) for side in sides for part in ast.walk(side)}
            literals = {part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)}
            is_named = literals & set(LAYER_BACKENDS) and names & HOLDERS and "attention_backend" not in names
            if is_named or names & (OBJECTS | CLASSES):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            if CLASSES & {getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(node)}:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.match_case) and OWN & {getattr(p, "value", "") for p in literals_of(node.pattern)}:
            yield node.pattern.lineno, ast.unparse(node.pattern)


def literals_of(pattern: ast.AST) -> list[ast.Constant]:
    return [part for part in ast.walk(pattern) if isinstance(part, ast.Constant)]


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """String constants that are a name, which a comparison or a table could use."""
    yield from ((part.lineno, part.value) for part in literals_of(tree) if part.value in OWN)


@pytest.mark.parametrize(
    "text",
    [
        'implementation == "transformer_engine"', 'run.implementation != "emulated"', '"local" == implementation',
        'config.precision.transformer_impl in ("emulated", "local")', 'implementation.name == "emulated"',
        "implementation is EMULATED", "run.implementation in (layer_backends.LOCAL, None)",
        "isinstance(backend, LayerBackend)", "type(backend) is _Emulated", "isinstance(x, layer_backends._Local)",
        'match name:\n    case "emulated" | "local":\n        pass',
    ],
)  # fmt: skip
def test_a_comparison_is_found(text: str) -> None:
    assert list(comparisons(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "implementation.quantizes",
        'choice == "local"',
        'parallel.backend == "nccl"',
        "isinstance(layer, EmulatedLinear)",
    ],
)
def test_other_code_is_not(text: str) -> None:
    assert not list(comparisons(ast.parse(text)))


def test_nothing_compares_layers() -> None:
    found = [
        f"megafp8/{file}:{line}: {text}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if (file := path.relative_to(PACKAGE).as_posix()) != "config/layer_backends.py"
        for line, text in comparisons(tree_of(path))
    ]
    assert not found, "ask a fact of the backend instead:\n" + "\n".join(found)


def test_only_these_files_have_the_names() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py")) if list(names(tree_of(path)))
    }
    assert found <= set(NAMED_IN), f"name no layers in {sorted(found - set(NAMED_IN))}"
    assert found == set(NAMED_IN), f"these name none any more: {sorted(set(NAMED_IN) - found)}"


def test_the_setting_has_the_names_of_the_registry() -> None:
    setting = settings_by_name()["precision.transformer_impl"]
    assert setting.choices == ("auto", *LAYER_BACKENDS)
    assert PrecisionConfig().transformer_impl in setting.choices
