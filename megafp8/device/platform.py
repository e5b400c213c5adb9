"""The platform of a rank: CUDA or CPU behind one interface, its environment, and torch.distributed setup."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import logging
import os
import warnings
from dataclasses import dataclass
from typing import Any, Optional

import psutil
import torch
import torch.distributed as dist

from megafp8.config.schema import LoggingConfig, ParallelConfig
from megafp8.device.nccl_buffers import prefer_copy_engines
from megafp8.device.rendezvous import join_store

# Time for the first rank of a machine to raise the same error as another one.
FIRST_RANK_TIMEOUT_S = 5.0
# torch reads its number of threads from these when it is imported.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
BF16_CPU_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16"))  # the last one is Arm's


@dataclass(frozen=True)
class Platform:
    """The device that one rank computes on.

    Attributes:
        kind: `cuda` or `cpu`.
        name: the device's name according to the driver or the kernel.
        backend: `nccl` or `gloo`.
    """

    kind: str
    device: torch.device
    name: str
    backend: str

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory_bytes(self) -> int:
        """Peak memory: allocated by torch on a GPU, resident for a CPU process."""
        if self.kind == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return peak_resident_bytes()

    def reset_peak_memory(self) -> None:
        """Free cached memory and reset the peak, as far as the system allows it for a CPU process."""
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="utf-8") as control:
            control.write("5")  # proc(5)

    def total_memory_bytes(self) -> int:
        """Memory of the GPU or the machine."""
        if self.kind == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        return psutil.virtual_memory().total

    def free_memory_bytes(self) -> int:
        """Memory that a rank can use: its GPU's, or its share of the machine's free memory."""
        if self.kind == "cuda":
            return self.total_memory_bytes()
        return psutil.virtual_memory().available // local_world_size()

    def has_bf16_units(self) -> bool:
        """Whether the device multiplies BF16 in hardware: GPUs since Ampere, CPUs with AVX512-BF16, AMX or Arm's BF16.

        Other devices emulate it, more slowly than they multiply FP32.
        """
        if self.kind == "cuda":
            return torch.cuda.get_device_capability(self.device) >= (8, 0)
        return not BF16_CPU_FLAGS.isdisjoint(cpu_info("flags", "Features").split())

    def free_cache(self) -> None:
        """Return cached device memory to the driver."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()


def resident_bytes() -> int:
    """Resident memory of this process."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """Peak resident memory of this process. getrusage would include the time before its exec."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(peak) * 1024


def cpu_name() -> str:
    """The CPU's model name according to the kernel, or `CPU`."""
    return cpu_info("model name") or "CPU"


def cpu_info(*names: str) -> str:
    """The first value in /proc/cpuinfo under one of some names; empty if there is none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            fields = (line.partition(":") for line in lines)
            return next((value.strip() for name, _, value in fields if name.strip() in names), "")
    except OSError:
        return ""


def detect_platform(distributed_backend: Optional[str] = None) -> Platform:
    """The platform of this process: the GPU of its local rank, or else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank())
        return Platform("cuda", device, torch.cuda.get_device_name(device), distributed_backend or "nccl")
    return Platform("cpu", torch.device("cpu"), cpu_name(), distributed_backend or "gloo")


def has_cuda_device() -> bool:
    """Whether there is a GPU. CUDA is not initialized, so that processes may be forked afterwards."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.is_available()


def rank() -> int:
    """Rank of this process; 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Number of ranks of this run; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    """Rank of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    """Number of ranks of this run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def set_num_threads(num_threads: Optional[int], useful_threads: int) -> None:
    """Set the number of CPU threads of this rank.

    Args:
        num_threads: `--num-threads`. None: torch's number from OMP_NUM_THREADS or MKL_NUM_THREADS, or without those an
            even share of the machine's cores.
        useful_threads: limit on such a share.
    """
    if num_threads is None and not any(os.environ.get(name) for name in THREAD_VARIABLES):
        num_threads = min(cores_per_rank(), useful_threads)
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def cores_per_rank() -> int:
    """An even share of the CPU cores that this process may use, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size())


def silence_other_ranks(settings: LoggingConfig) -> None:
    """Switch off Python's and logged warnings on all ranks but 0, which would repeat those of rank 0.

    Errors are still logged. `--verbose` and `--logging-level` keep everything.
    """
    if rank() != 0 and not settings.verbose and settings.logging_level is None:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")


def limit_device_connections(tensor_model_parallel_size: int) -> None:
    """Make CUDA launch kernels in program order, which megatron-core's tensor-parallel overlap relies on.

    Must be called before the first use of CUDA. A value that the user has set stays.
    """
    if tensor_model_parallel_size > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def enable_determinism() -> None:
    """Use deterministic algorithms in torch, cuBLAS, NCCL and Transformer Engine.

    Must be called before the first use of CUDA. Values that the user has set in the environment stay.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    torch.use_deterministic_algorithms(True)


def init_distributed(platform: Platform, parallel: ParallelConfig, store: Optional[dist.Store] = None) -> None:
    """Initialize torch.distributed, unless it already is. A single process uses a store in memory, without network.

    Args:
        store: replaces the launcher's store.

    Raises:
        PeerLost: not all ranks arrived at the launcher's store in time.
    """
    if platform.kind == "cuda":
        torch.cuda.set_device(platform.device)
    prefer_copy_engines(parallel)
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(minutes=parallel.distributed_timeout_minutes)
    options: dict[str, Any] = {"device_id": platform.device} if platform.backend == "nccl" else {}
    if store is None and world_size() == 1:
        store = dist.HashStore()
    elif store is None:
        store = join_store(rank(), world_size(), parallel.rendezvous_timeout_s)
        store.set_timeout(timeout)
    dist.init_process_group(
        platform.backend, store=store, rank=rank(), world_size=world_size(), timeout=timeout, **options
    )


def is_reported_by_first_rank(text: str) -> bool:
    """Whether this machine's first rank ends with the same error text; False on that rank and in a single process.

    Before the ranks are connected they have only looked at folders, which all ranks of a machine see.

    Every rank that ends with an error calls it. It is not a collective: other ranks wait for the first rank for
    `FIRST_RANK_TIMEOUT_S` at most.
    """
    if not dist.is_initialized():
        return local_rank() != 0
    store, key = dist.distributed_c10d._get_default_store(), f"megafp8/last_words/{rank() - local_rank()}"
    try:
        if local_rank() == 0:
            store.set(key, text)
            return False
        store.wait([key], datetime.timedelta(seconds=FIRST_RANK_TIMEOUT_S))
        return store.get(key) == text.encode()
    except RuntimeError:  # the first rank has not reported an error, or the store ended with it
        return False


def shutdown_distributed() -> None:
    """Shut down torch.distributed if it is initialized."""
    if dist.is_initialized():
        dist.destroy_process_group()
