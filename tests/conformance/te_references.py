"""Transformer Engine's references in Python, without its compiled libraries.

Where Transformer Engine is not installed, its wheel is sufficient. `run.sh` puts it into `.venv/oracles` as a file,
because megatron-core cannot be imported beside an incomplete installation. Two modules are read from it. The three
modules that they import from have stand-ins here, which are removed from `sys.modules` afterwards.
"""

import importlib
import os
import sys
import zipimport
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

ORACLES = Path(os.environ.get("MEGAFP8_ORACLES", Path(__file__).parents[2] / ".venv" / "oracles"))
RECIPES = "transformer_engine.pytorch.custom_recipes"


class _Quantizer:
    """What a reference uses of `Quantizer`."""

    def __init__(self, *, rowwise: bool, columnwise: bool):
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


class _Storage:
    """What it uses of `QuantizedTensorStorage`."""


def _stand_in(name: str, **contents: object) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(contents)
    return module


def _from_wheel(wheel: Path, name: str) -> ModuleType:
    stand_ins = [
        _stand_in("transformer_engine"),
        _stand_in("transformer_engine.pytorch"),
        _stand_in("transformer_engine.pytorch.tensor"),
        _stand_in("transformer_engine.pytorch.tensor.utils", is_custom=None),
        _stand_in("transformer_engine.pytorch.quantized_tensor", Quantizer=_Quantizer, QuantizedTensorStorage=_Storage),
        _stand_in(RECIPES),
    ]
    folder = zipimport.zipimporter(f"{wheel}/{RECIPES.replace('.', '/')}")
    with patch.dict(sys.modules, {module.__name__: module for module in stand_ins}):
        for part in ("reference_utils", "gemm", name):
            module = _stand_in(f"{RECIPES}.{part}")
            sys.modules[module.__name__] = module
            setattr(stand_ins[-1], part, module)
            exec(folder.get_code(part), vars(module))
        return module


def reference_module(name: str) -> ModuleType:
    """`transformer_engine.pytorch.custom_recipes.NAME`; skips the test where there is neither package nor wheel."""
    try:
        return importlib.import_module(f"{RECIPES}.{name}")
    except ImportError:
        wheels = sorted(ORACLES.glob("transformer_engine-*.whl"))
    if not wheels:
        pytest.skip(f"neither Transformer Engine nor its wheel in {ORACLES}")
    return _from_wheel(wheels[-1], name)
