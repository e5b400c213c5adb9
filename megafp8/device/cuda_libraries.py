"""Versions of the CUDA libraries that torch has loaded, and of the driver: each says its own.

Speed and last bits depend on them, and a wheel's metadata may be that of another copy. Imports only the standard
library and torch, because the doctor's import check runs it where the other libraries may be broken.
"""

from __future__ import annotations

import ctypes
import os
from typing import Optional

NVML = "libnvidia-ml.so.1"
NVML_VERSION_BYTES = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE


def cuda_library_versions() -> dict[str, Optional[str]]:
    """Versions of cuBLASLt, cuDNN, NCCL, NVSHMEM and the driver, by these names; None where one is absent.

    No library is loaded for this but the driver's NVML. It may initialize CUDA: later forks cannot use a GPU.
    """
    return {
        "cuBLASLt": _cublaslt(),
        "cuDNN": _cudnn(),
        "NCCL": _nccl(),
        "NVSHMEM": _nvshmem(),
        "driver": _driver(),
    }


def _loaded(file: str) -> Optional[ctypes.CDLL]:
    """A library if this process has loaded it."""
    try:
        return ctypes.CDLL(file, mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def _dotted(number: int) -> str:
    """13.1.0 for 130100."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _cublaslt() -> Optional[str]:
    import torch

    cuda = torch.version.cuda
    library = _loaded(f"libcublasLt.so.{cuda.split('.')[0]}") if cuda else None
    if library is None:
        return None
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return _dotted(library.cublasLtGetVersion())


def _cudnn() -> Optional[str]:
    import torch

    number = torch.backends.cudnn.version() if torch.version.cuda else None
    return _dotted(number) if number else None


def _nccl() -> Optional[str]:
    import torch

    if not (torch.version.cuda and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _nvshmem() -> Optional[str]:
    library = _loaded("libnvshmem_host.so.3")
    if library is None or not hasattr(library, "nvshmemx_vendor_get_version_info"):
        return None
    numbers = [ctypes.c_int() for _ in range(3)]
    library.nvshmemx_vendor_get_version_info(*map(ctypes.byref, numbers))
    return ".".join(str(number.value) for number in numbers)


def _driver() -> Optional[str]:
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return None
    if nvml.nvmlInit_v2():  # a status other than 0: no driver that works
        return None
    try:
        text = ctypes.create_string_buffer(NVML_VERSION_BYTES)
        return None if nvml.nvmlSystemGetDriverVersion(text, NVML_VERSION_BYTES) else text.value.decode()
    finally:
        nvml.nvmlShutdown()  # counted: the session of another caller stays
