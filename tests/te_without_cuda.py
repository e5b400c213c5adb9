"""Transformer Engine's Python on a machine without a GPU: its modules are real, its compiled library is not.

Import it first, in a separate process. It adds the package to `sys.modules` from the wheel that `run.sh` keeps as a
file, with stand-ins for the compiled parts. Modules and operations can be built and their state can be read. They
cannot compute.
"""

import enum
import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any, Optional
from unittest.mock import MagicMock

import torch
import torch.utils.flop_counter  # searches for Triton too
from torch.utils._triton import has_triton_package

ORACLES = Path(os.environ.get("MEGAFP8_ORACLES", Path(__file__).parents[1] / ".venv" / "oracles"))
# Imported by Transformer Engine, but not used by the tested code.
UNUSED = ("einops", "onnx", "onnxscript", "triton")


class Anything(types.ModuleType):
    """A module in which every name exists."""

    __version__ = "9.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self).setdefault(name, MagicMock(name=name))


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds those packages, and all modules in them."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Optional[importlib.machinery.ModuleSpec]:
        is_unused = fullname.split(".")[0] in UNUSED
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_unused else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Anything:
        return Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def wheel() -> Path:
    """The file; raises FileNotFoundError without it."""
    found = sorted(ORACLES.glob("transformer_engine-*.whl"))
    if not found:
        raise FileNotFoundError(f"no wheel of Transformer Engine in {ORACLES}")
    return found[-1]


def compiled_library() -> Anything:
    """`transformer_engine_torch`, with the numbers of Transformer Engine's headers."""
    library = Anything("transformer_engine_torch")
    numbers = {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7}
    library.DType = enum.IntEnum("DType", numbers | {"kFloat8E5M2": 8, "kFloat4E2M1": 10})
    backends = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
    library.NVTE_Fused_Attn_Backend = enum.IntEnum("NVTE_Fused_Attn_Backend", backends)
    return library


def install() -> None:
    """Let `import transformer_engine.pytorch` work as on a machine with a GPU, with allocation on the CPU."""
    has_triton_package()  # torch remembers the answer
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # no search for compiled libraries
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"  # the update of the scales in torch operations
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    package = Anything("transformer_engine")
    package.__path__, package.__version__ = [f"{wheel()}/transformer_engine"], wheel().name.split("-")[1]
    package.__spec__ = importlib.machinery.ModuleSpec(package.__name__, None)
    sys.modules.update({module.__name__: module for module in (package, compiled_library())})
    sys.meta_path.insert(0, StandIns())

    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    torch.compile = lambda function=None, **_: function or (lambda function: function)  # would search for Triton again
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_device = lambda: 0
    import transformer_engine.debug.pytorch.debug_state as debug
    import transformer_engine.pytorch.quantization as quantization

    torch.cuda.is_available = lambda: True
    debug.TEDebugState.initialize = classmethod(lambda cls: None)
    quantization.FP8GlobalStateManager.is_fp8_available = classmethod(lambda cls: (True, ""))
    state = quantization.DelayedScalingRecipeState
    on_cuda = state.__init__
    state.__init__ = lambda self, *args, **options: on_cuda(self, *args, **options | {"device": torch.device("cpu")})


install()
