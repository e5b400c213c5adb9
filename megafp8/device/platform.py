"""CUDA or CPU behind one small interface, and how the ranks of a run find each other."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any, Optional

import psutil
import torch
import torch.distributed as dist


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
        return psutil.Process().memory_info().rss

    def free_cache(self) -> None:
        """Give cached device memory back to the driver."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()


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


def use_threads(num_threads: Optional[int]) -> int:
    """Share this machine's cores among its ranks (or use `num_threads`), and return the threads of this rank."""
    cores = len(os.sched_getaffinity(0))
    threads = num_threads or max(1, cores // local_world_size())
    torch.set_num_threads(threads)
    return threads


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


def join_ranks(platform: Platform, timeout_minutes: int) -> None:
    """Start torch.distributed, with the launcher's rendezvous or alone in one process. Does nothing if it runs.

    A lone process needs no network and no port: its store is in memory.
    """
    if platform.kind == "cuda":
        torch.cuda.set_device(platform.device)
    if dist.is_initialized():
        return
    options: dict[str, Any] = {"timeout": datetime.timedelta(minutes=timeout_minutes)}
    if platform.backend == "nccl":
        options["device_id"] = platform.device
    if world_size() == 1:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(platform.backend, **options)


def leave_ranks() -> None:
    """Stop torch.distributed if it runs."""
    if dist.is_initialized():
        dist.destroy_process_group()
