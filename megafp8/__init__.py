"""megafp8: FP8 and FP4 pretraining of GPT models on megatron-core and Transformer Engine.

The core trains: all folders but those of the wings. It imports no wing.
Wings use it: `planning`, `data.preprocessing`, `checkpoint.convert`, `launch`, `analysis`,
`training.device_verification` and `cli`.

The names in `__all__` are the Python API. They are imported at their first use, so that `import megafp8` is fast and
`recipes`, `plan` and `read_records` need no torch. `__init__.pyi` has their types.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_HOMES = {
    "LayoutSummary": "megafp8.planning.layout_summary",
    "plan": "megafp8.planning.layout_summary",
    "QuantizedLayers": "megafp8.quantization.modules",
    "QuantizedLinear": "megafp8.quantization.modules",
    "quantize_model": "megafp8.quantization.modules",
    "read_records": "megafp8.analysis.frames",
}
__all__ = ["recipes", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "recipes":
        return import_module("megafp8.recipes")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'megafp8' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
