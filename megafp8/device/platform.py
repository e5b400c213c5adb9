"""CUDA or CPU behind one small interface, and how the ranks of a run find each other."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import os
from dataclasses import dataclass
from typing import Any, Optional

import psutil
import torch
import torch.distributed as dist

from megafp8.config.schema.model import ParallelConfig
from megafp8.device.rendezvous import meet

# For the first rank of a machine to come to the same error as another one.
LAST_WORDS_S = 5.0
# Of these torch takes its number of threads when it is imported.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Platform:
    """The device that one rank computes on.

    Attributes:
        kind: `cuda` or `cpu`.
        device: the torch device of this rank.
        name: what the driver or the kernel calls the device.
        backend: `nccl` or `gloo`.
    """

    kind: str
    device: torch.device
    name: str
    backend: str

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory_bytes(self) -> int:
        """Most bytes held at once: allocated on a GPU, resident for a CPU process."""
        if self.kind == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return peak_resident_bytes()

    def forget_peak_memory(self) -> None:
        """Give back what is cached, and begin the peak anew (where the system lets a CPU process do that)."""
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="utf-8") as control:
            control.write("5")  # proc(5)

    def total_memory_bytes(self) -> int:
        """Memory of the GPU, or of the machine."""
        if self.kind == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        return psutil.virtual_memory().total

    def free_memory_bytes(self) -> int:
        """What a rank may count on: its GPU, or its share of the memory that the machine has free."""
        if self.kind == "cuda":
            return self.total_memory_bytes()
        return psutil.virtual_memory().available // local_world_size()

    def free_cache(self) -> None:
        """Give cached device memory back to the driver."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()


def resident_bytes() -> int:
    """Memory that this process has now."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """Most memory that this process had at once. Not getrusage's, which counts what a process was before its exec."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(peak) * 1024


def cpu_name() -> str:
    """The processor's name as the kernel tells it, or `CPU`."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else "CPU"


def detect_platform(distributed_backend: Optional[str] = None) -> Platform:
    """The platform of this process: the GPU of its local rank where there is one, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank())
        return Platform("cuda", device, torch.cuda.get_device_name(device), distributed_backend or "nccl")
    return Platform("cpu", torch.device("cpu"), cpu_name(), distributed_backend or "gloo")


def rank() -> int:
    """This process's rank as its launcher set it; 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Number of processes of this run; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    """This process's place on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    """Number of processes of this run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def use_threads(num_threads: Optional[int], useful_threads: int) -> None:
    """Set the CPU threads of this rank.

    Args:
        num_threads: what the user asked for (`--num-threads`). None leaves the number to OMP_NUM_THREADS or
            MKL_NUM_THREADS, as torch has read them, and without those to this machine: an even share of its cores.
        useful_threads: the most that such a share may be.
    """
    if num_threads is None and not any(os.environ.get(name) for name in THREAD_VARIABLES):
        num_threads = min(cores_per_rank(), useful_threads)
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def cores_per_rank() -> int:
    """An even share of the cores that this process may use, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size())


def order_kernels(tensor_model_parallel_size: int) -> None:
    """Have CUDA start kernels in the order they are given, which megatron-core's overlap of tensor-parallel
    communication counts on. Before the first use of CUDA; a value that the user set stays."""
    if tensor_model_parallel_size > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def compute_deterministically() -> None:
    """Use only what gives the same bits every time, in torch, cuBLAS, NCCL and Transformer Engine.

    Before the first use of CUDA. What the user set in the environment stays.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    torch.use_deterministic_algorithms(True)


def join_ranks(platform: Platform, parallel: ParallelConfig, store: Optional[dist.Store] = None) -> None:
    """Start torch.distributed, at the launcher's store or alone in one process. Does nothing if it runs.

    A lone process needs no network and no port: its store is in memory.

    Args:
        store: where the ranks meet instead.

    Raises:
        PeerLost: not all ranks reached the launcher's store in time.
    """
    if platform.kind == "cuda":
        torch.cuda.set_device(platform.device)
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(minutes=parallel.distributed_timeout_minutes)
    options: dict[str, Any] = {"device_id": platform.device} if platform.backend == "nccl" else {}
    if store is None and world_size() == 1:
        store = dist.HashStore()
    elif store is None:
        store = meet(rank(), world_size(), parallel.rendezvous_timeout_s)
        store.set_timeout(timeout)
    dist.init_process_group(
        platform.backend, store=store, rank=rank(), world_size=world_size(), timeout=timeout, **options
    )


def is_said_by_first_rank(text: str) -> bool:
    """Whether this machine's first rank ends with the same words; False on that rank itself, and without other ranks.

    Every rank that ends so calls it. It is no collective: a rank that ends alone waits `LAST_WORDS_S` for the first.
    """
    if not dist.is_initialized():
        return False
    store, key = dist.distributed_c10d._get_default_store(), f"megafp8/last_words/{rank() - local_rank()}"
    try:
        if local_rank() == 0:
            store.set(key, text)
            return False
        store.wait([key], datetime.timedelta(seconds=LAST_WORDS_S))
        return store.get(key) == text.encode()
    except RuntimeError:  # the first rank has said nothing, or took the store with it
        return False


def leave_ranks() -> None:
    """Stop torch.distributed if it runs."""
    if dist.is_initialized():
        dist.destroy_process_group()
