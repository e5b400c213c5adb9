"""Import check of libraries that may be broken, run by its path in a separate process; prints one JSON object a line.

This way a library that ends the process, or whose import never returns, becomes a result. Imports only the standard
library and `device/cuda_libraries.py`, which does as well.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[3]))  # of a checkout that is not installed
from megafp8.device.cuda_libraries import cuda_library_versions  # noqa: E402


def report(**facts: Any) -> None:
    """Print one line for the parent process and flush it before anything else can fail."""
    print(json.dumps(facts), flush=True)


def try_import(name: str) -> bool:
    """Import a module, report the result, and return whether it worked."""
    report(begin=name)
    try:
        importlib.import_module(name)
    except BaseException as error:  # also SystemExit, which some libraries raise
        report(module=name, error=f"{type(error).__name__}: {error}")
        return False
    report(module=name, error=None)
    return True


def torch_facts() -> dict[str, Any]:
    """torch's version and libraries, and the GPUs that it can use."""
    torch = sys.modules["torch"]
    facts: dict[str, Any] = {"torch_version": torch.__version__, "torch_cuda": torch.version.cuda}
    if torch.version.cuda is None:
        return facts
    facts["cudnn_version"] = torch.backends.cudnn.version()
    facts["library_versions"] = cuda_library_versions()
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except Exception as error:
            facts["cuda_error"] = str(error).splitlines()[0]
        return facts
    facts["gpus"] = [
        {"name": gpu.name, "memory_bytes": gpu.total_memory, "compute_capability": [gpu.major, gpu.minor]}
        for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    return facts


LIBRARIES = {"cuBLASLt": "libcublasLt", "cuDNN": "libcudnn", "NCCL": "libnccl", "NVSHMEM": "libnvshmem_host"}
"""Files of the CUDA libraries of which a process may have only one."""


def loaded_libraries() -> dict[str, list[str]]:
    """Folders from which this process has loaded each CUDA library, according to /proc/self/maps."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as lines:
            text = lines.read()
    except OSError:
        return {}
    found = {name: sorted(set(re.findall(rf"(/\S*)/{file}\S*\.so", text))) for name, file in LIBRARIES.items()}
    return {name: folders for name, folders in found.items() if folders}


def main() -> None:
    """Import the modules on the command line; after torch, also report its facts."""
    for name in sys.argv[1:]:
        if try_import(name) and name == "torch":
            report(begin="CUDA")
            try:
                report(**torch_facts())
                report(module="CUDA", error=None)
            except Exception as error:
                report(module="CUDA", error=f"{type(error).__name__}: {error}")
    report(loaded=loaded_libraries())


if __name__ == "__main__":
    main()
