"""The facts that checks read. Whatever could not be found out is None or empty, never a guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Optional


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as the driver or torch sees it."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine.

    Attributes:
        packages: versions of the installed distributions, by their names in lower case with dashes.
        import_errors: what importing a module gave, None where it worked. A module that was not tried is not there.
        slow_imports: the module whose import was given up, with the seconds that it had; `CUDA` for torch's first use
            of the driver. Those after it were not tried.
        load_per_core: of the machine when an import was given up.
        has_other_apex: whether `apex` is installed and not NVIDIA's.
        has_te_torch_part: whether Transformer Engine's extension for torch lies where it belongs.
        driver: version of NVIDIA's driver.
        driver_error: what nvidia-smi did instead of an answer; None where it answered, or is not there.
        driver_gpus: GPUs that the driver shows.
        gpus: GPUs that torch can use.
        cuda_error: why torch can use none.
        torch_cuda: CUDA version that torch was built for; None for a build without.
        cudnn_version: of the library that torch loaded, as 91900.
        wheel_cudnn: folder of the cuDNN that came with torch.
        found_cudnn: folder of the unversioned libcudnn.so that Transformer Engine finds first, and what led there.
        loaded_cudnn: folders that cuDNN was loaded from once everything was imported.
        links: connections between the GPUs by `nvidia-smi topo`: NV18, PIX, SYS.
    """

    python: tuple[int, int, int]
    packages: Mapping[str, str] = field(default_factory=dict)
    import_errors: Mapping[str, Optional[str]] = field(default_factory=dict)
    slow_imports: Mapping[str, float] = field(default_factory=dict)
    load_per_core: Optional[float] = None
    has_other_apex: bool = False
    has_te_torch_part: bool = False
    torch_version: Optional[str] = None
    torch_cuda: Optional[str] = None
    nccl_version: Optional[str] = None
    cudnn_version: Optional[int] = None
    cuda_error: Optional[str] = None
    driver: Optional[str] = None
    driver_error: Optional[str] = None
    driver_gpus: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    links: tuple[str, ...] = ()
    wheel_cudnn: Optional[str] = None
    found_cudnn: Optional[tuple[str, str]] = None
    loaded_cudnn: tuple[str, ...] = ()
    compiler: Optional[str] = None
    has_python_headers: bool = False
    shared_memory_bytes: Optional[int] = None
    open_files: Optional[int] = None
    folder: str = "."
    disk_free_bytes: Optional[int] = None
    disk_bytes_per_s: Optional[float] = None
    disk_error: Optional[str] = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def cuda_major(self) -> Optional[int]:
        """Of torch's CUDA."""
        return int(self.torch_cuda.split(".")[0]) if self.torch_cuda else None

    @property
    def has_gpu(self) -> bool:
        """Whether anything knows of a GPU, also one that torch cannot use."""
        return bool(self.gpus or self.driver or self.driver_error)

    def works(self, module: str) -> bool:
        """Whether a module was imported."""
        return self.import_errors.get(module, "not tried") is None
