"""Import levels and forbidden constructs, read from the source, so that a violation fails here and not in review.

Each rule is a function from a module's syntax tree to the lines that break it. Every rule is first tested on an example
that breaks it, then applied to the package.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from syntax_trees import tree_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megafp8"

# A part (a folder, or a module at the top level) imports parts of lower levels only. A wing inside of a folder of the
# core is a part of its own.
LEVELS = {
    "errors": 0, "utils": 1,
    "recipes": 2, "resilience": 2,
    "config": 3, "kernels": 3,
    "device": 4, "quantization": 4, "mcore": 4, "data": 4,
    "te": 5, "resources": 5, "optimizer": 5, "metrics": 5,
    "checkpoint": 6, "fsdp": 6,
    "models": 7,
    "nonfinite": 8,
    "training": 9,
    "planning": 10, "data/preprocessing": 10, "checkpoint/convert": 10, "training/device_verification": 10,
    "launch": 11, "analysis": 11,
    "cli": 12,
}  # fmt: skip
# The core trains. Wings use it, and it imports none of them. The parts of each wing, and the groups that it may import:
WINGS = {
    "plan": ("planning",),
    "prepare": ("data/preprocessing",),
    "convert": ("checkpoint/convert",),
    "launch": ("launch",),
    "report": ("analysis",),
    "verify": ("training/device_verification",),
    "cli": ("cli",),
}
CORE = "core"
MAY_IMPORT = {
    CORE: set(),
    "plan": {CORE},
    "prepare": {CORE},
    "convert": {CORE},
    "launch": {CORE, "plan"},
    "report": {CORE, "plan"},
    "verify": {CORE},
    "cli": {CORE, *WINGS},
}
PARTS_WITHOUT_TORCH = {
    "errors", "utils", "recipes", "resilience", "config", "resources", "planning", "launch", "analysis", "cli",
}  # fmt: skip
PARTS_WITH_MEGATRON = {
    "data", "mcore", "te", "optimizer", "checkpoint", "checkpoint/convert", "fsdp", "models", "nonfinite",
    "training",
}  # fmt: skip
PART_WITH_TRANSFORMER_ENGINE = "te"
PATCHED_BY = {"megatron": "mcore", "torch": "mcore", "transformer_engine": "te"}

CONTAINER_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque"}
MUTATING_METHODS = {
    "append", "appendleft", "extend", "insert", "remove", "pop", "popleft", "popitem", "clear", "sort", "reverse",
    "add", "discard", "update", "setdefault",
}  # fmt: skip

Violations = Iterator[tuple[int, str]]


def part_of(file: str) -> str:
    """ "quantization/linear.py" -> "quantization", "errors.py" -> "errors", "data/preprocessing/plan.py" ->
    "data/preprocessing"."""
    nested = "/".join(file.split("/")[:2])
    return nested if nested in LEVELS else file.split("/")[0].removesuffix(".py")


def group_of(part: str) -> str:
    """The wing of a part, or the core."""
    return next((wing for wing, parts in WINGS.items() if part in parts), CORE)


def imported_modules(tree: ast.AST, file: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of every import, including those inside functions. A name imported from a module counts
    as a module, since it may be one."""
    package = ["megafp8", *file.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def upward_imports(tree: ast.AST, file: str) -> Violations:
    part = part_of(file)
    for line, name in imported_modules(tree, file):
        other = imported_part(name)
        if other is None or other == part:
            continue
        if other not in LEVELS:
            yield line, f"{name}: give {other} a level in this test"
        elif LEVELS[other] >= LEVELS[part]:
            yield line, f"{part} (level {LEVELS[part]}) imports {name} (level {LEVELS[other]})"


def imported_part(name: str) -> str | None:
    """The part of an imported module of the package; None for a library, and for the package's own attributes."""
    package, *names = name.split(".")
    return part_of("/".join(names)) if package == "megafp8" and names and not names[0].startswith("__") else None


def wing_imports(tree: ast.AST, file: str) -> Violations:
    group = group_of(part_of(file))
    for line, name in imported_modules(tree, file):
        other = group_of(imported_part(name) or "")
        if other != group and other not in MAY_IMPORT[group]:
            allowed = ", ".join(sorted(MAY_IMPORT[group])) or "no wing"
            yield line, f"{group} imports {name} of {other}; it may import {allowed}"


def forbidden_libraries(tree: ast.AST, file: str) -> Violations:
    part = part_of(file)
    for line, name in imported_modules(tree, file):
        library = name.split(".")[0]
        if library == "torch" and part in PARTS_WITHOUT_TORCH:
            yield line, f"{part} imports {name} and must work without torch"
        if library == "megatron" and part not in PARTS_WITH_MEGATRON:
            yield line, f"{part} imports {name}; megatron-core is for {', '.join(sorted(PARTS_WITH_MEGATRON))}"
        if library == "transformer_engine" and part != PART_WITH_TRANSFORMER_ENGINE:
            yield line, f"{name} is imported outside te/"
        if library == "triton" and part != "kernels":
            yield line, f"{name} is imported outside kernels/"


def patches(tree: ast.AST, file: str) -> Violations:
    """Assignments to attributes of other libraries outside the file for patches. torch.backends may be set."""
    origins = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                origins[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else ""
        elif isinstance(node, ast.ImportFrom) and not node.level:
            origins |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def foreign(node: ast.AST) -> str:
        """The dotted name of an expression that belongs to a library which another file patches."""
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in origins:
            return ""
        full = ".".join([origins[node.id] or node.id, *reversed(names)])
        part = part_of(file)
        is_guarded = PATCHED_BY.get(full.split(".")[0], part) != part and not full.startswith("torch.backends.")
        return full if is_guarded else ""

    def report(full: str) -> str:
        return f"{full} is set outside {PATCHED_BY[full.split('.')[0]]}/"

    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            if node.args and foreign(node.args[0]):
                yield node.lineno, report(foreign(node.args[0]))
            continue
        else:
            continue
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and foreign(part):
                    yield node.lineno, report(foreign(part))


def global_statements(tree: ast.AST, file: str) -> Violations:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


def mutable_module_state(tree: ast.Module, file: str) -> Violations:
    """Containers at module level must be constants: named in capitals and never changed in the module."""
    containers = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and is_container(node.value):
            containers |= {target.id: node.lineno for target in targets if isinstance(target, ast.Name)}
    containers.pop("__all__", None)
    for name, line in containers.items():
        if not name.isupper():
            yield line, f"module-level container {name}: a constant is named in capitals, state lives in an object"
    for node in ast.walk(tree):
        name = mutated_name(node)
        if name in containers and name.isupper():
            yield node.lineno, f"the constant {name} is changed"


def is_container(node: ast.AST | None) -> bool:
    if isinstance(node, ast.Call):
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        return name in CONTAINER_CALLS
    return isinstance(node, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))


def mutated_name(node: ast.AST) -> str:
    """The name whose object a statement or call changes in place; "" for any other node."""
    changed: ast.AST | None = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING_METHODS:
        changed = node.func.value
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        changed = node.value
    elif isinstance(node, ast.AugAssign):
        changed = node.target
    return changed.id if isinstance(changed, ast.Name) else ""


RULES = (upward_imports, wing_imports, forbidden_libraries, patches, global_statements, mutable_module_state)

BROKEN = [
    (upward_imports, "config/x.py", "import megafp8.device.gpus"),
    (upward_imports, "config/x.py", "from megafp8 import training"),
    (upward_imports, "quantization/x.py", "def f():\n    from megafp8.metrics.records import StepRecord"),
    (upward_imports, "quantization/x.py", "from ..metrics import records"),
    (upward_imports, "quantization/x.py", "from megafp8.misc import anything"),
    (upward_imports, "data/x.py", "from megafp8.data.preprocessing.documents import read_texts"),
    (wing_imports, "data/x.py", "from megafp8.data.preprocessing.documents import read_texts"),
    (wing_imports, "checkpoint/x.py", "from megafp8.checkpoint import convert"),
    (wing_imports, "training/x.py", "def f():\n    import megafp8.planning.plan"),
    (wing_imports, "training/x.py", "from .device_verification import verify"),
    (wing_imports, "models/x.py", "from ..cli.common import log"),
    (wing_imports, "planning/x.py", "from megafp8.launch.job import Job"),
    (wing_imports, "training/device_verification/x.py", "from megafp8.analysis.runs import load_run"),
    (forbidden_libraries, "config/x.py", "import torch.nn as nn"),
    (forbidden_libraries, "analysis/x.py", "from torch import Tensor"),
    (forbidden_libraries, "quantization/x.py", "from megatron.core import parallel_state"),
    (forbidden_libraries, "device/capability.py", "import megatron.core"),
    (forbidden_libraries, "quantization/linear.py", "import transformer_engine.pytorch as te"),
    (patches, "models/x.py", "from megatron.core import parallel_state\nparallel_state.get_world_size = f"),
    (patches, "models/x.py", "import megatron.core.tensor_parallel as tp\ntp.layers.f, x = g, 1"),
    (patches, "models/x.py", "import torch\ntorch.cuda.synchronize = lambda: None"),
    (patches, "models/x.py", "import torch\nsetattr(torch.cuda, 'synchronize', None)"),
    (patches, "mcore/cpu_patches.py", "import transformer_engine.pytorch as te\nte.Linear.forward = f"),
    (patches, "models/x.py", "from megatron.core.ddp import DDP\ndef f():\n    del DDP.method"),
    (global_statements, "models/x.py", "def f():\n    global x\n    x = 1"),
    (mutable_module_state, "models/x.py", "cache = {}"),
    (mutable_module_state, "models/x.py", "import collections\n_seen: object = collections.defaultdict(list)"),
    (mutable_module_state, "models/x.py", "CACHE = {}\ndef f(x):\n    CACHE[x] = 1"),
    (mutable_module_state, "models/x.py", "NAMES = [n for n in 'ab']\ndef f():\n    NAMES.append(1)"),
    (mutable_module_state, "models/x.py", "TABLE = dict(a=1)\nTABLE |= {}"),
    (mutable_module_state, "models/x.py", "TABLE = {1: 2}\ndef f():\n    del TABLE[1]"),
]

SOUND = """
import torch
from megafp8 import __version__
from megafp8.errors import ConfigError
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

__all__ = ["f"]
TABLE = {"a": 1}
NAMES = tuple(TABLE)
torch.backends.cuda.matmul.allow_tf32 = True

def f(module):
    config = TransformerConfig()
    config.field = 1
    module.weight = torch.zeros(1)
    setattr(module, "bias", None)
    local = {}
    local["a"] = TABLE["a"]
    local.update(TABLE)
"""


@pytest.mark.parametrize(("rule", "file", "source"), BROKEN)
def test_each_rule_detects_its_example(rule, file: str, source: str) -> None:
    assert list(rule(ast.parse(source), file)), f"{rule.__name__} let pass:\n{source}"


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_rejects_valid_code(rule) -> None:
    assert list(rule(ast.parse(SOUND), "models/x.py")) == []


@pytest.mark.parametrize("rule", RULES)
def test_the_package_follows_the_rule(rule) -> None:
    found = [f"megafp8/{file}:{line}: {text}" for file, tree in package_trees() for line, text in rule(tree, file)]
    assert not found, "\n".join(found)


def test_every_part_has_a_level() -> None:
    parts = {part_of(file) for file, _ in package_trees()} - {"__init__"}
    assert parts == set(LEVELS), f"a part without a level, or a level without a part: {sorted(parts ^ set(LEVELS))}"


def test_wings_stand_above_the_core() -> None:
    of_wings = {part for parts in WINGS.values() for part in parts}
    assert of_wings <= set(LEVELS)
    assert max(LEVELS[part] for part in set(LEVELS) - of_wings) < min(LEVELS[part] for part in of_wings)


def test_parts_without_torch_do_not_import_it_indirectly() -> None:
    """A real import, since a module that does not import torch may import one that does."""
    modules = [
        "megafp8." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file, _ in package_trees()
        if part_of(file) in PARTS_WITHOUT_TORCH
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def package_trees() -> Iterator[tuple[str, ast.Module]]:
    """Path below megafp8/ and syntax tree of every module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if file != "__init__.py":
            yield file, tree_of(path)
