"""Memory registered with NCCL, its user buffers (`--use-nccl-ub`): where it is possible or chosen, and its environment.

`mcore/nccl_buffers.py` has the allocator.
"""

from __future__ import annotations

import os
from typing import Optional

from megafp8.config.schema import ParallelConfig

COPY_ENGINES = {"NCCL_CTA_POLICY": "2"}
"""NCCL's zero-CTA policy (2.28): registered memory is gathered by copy engines, and GEMMs keep all multiprocessors."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def problems(parallel: ParallelConfig, kind: str, device: str) -> list[str]:
    """What excludes registered buffers where the run has them.

    Args:
        kind: `cuda` or `cpu`.
        device: name of the device.
    """
    if not parallel.use_nccl_ub:
        return []
    if kind == "cpu":
        return [f"--use-nccl-ub: {device} has no CUDA device; remove the flag"]
    if parallel.distributed_backend == "gloo":
        return ["--use-nccl-ub needs NCCL: remove it, or --distributed-backend gloo"]
    if setting := expandable_segments():
        return [f"--use-nccl-ub: torch has no memory pools for NCCL with {setting}; unset it, or remove the flag"]
    return []


def choose(
    parallel: ParallelConfig, kind: str, num_replicas: int, reaches_peers: bool
) -> tuple[dict[str, bool], Optional[tuple[str, str, str]]]:
    """Register buffers where weights are gathered beside the forward pass, unless the flag decides.

    Args:
        num_replicas: ranks that share weights.
        reaches_peers: as `gpus.Gpu.reaches_peers`.

    Returns:
        The setting, and the choice as flag, value and reason where it is worth a word.
    """
    if parallel.use_nccl_ub is not None:
        return {}, None
    flag, name = "--use-nccl-ub", "parallel.use_nccl_ub"
    uses_nccl = kind == "cuda" and parallel.distributed_backend != "gloo"
    if not (parallel.overlap_param_gather and num_replicas > 1 and not parallel.shards_weights and uses_nccl):
        return {name: False}, None
    if not reaches_peers:
        return {name: False}, (flag, "off", "a kind of GPU whose links were not measured")
    if setting := expandable_segments():
        return {name: False}, (flag, "off", f"{setting} excludes it")
    return {name: True}, (flag, "on", "copy engines gather weights")


def prefer_copy_engines(parallel: ParallelConfig) -> None:
    """Set `COPY_ENGINES` for registered buffers, before the first communicator is made. A value that the user has set
    stays."""
    for name, value in COPY_ENGINES.items() if parallel.use_nccl_ub else ():
        os.environ.setdefault(name, value)


def expandable_segments() -> str:
    """The setting with which torch's allocator has no memory pools for NCCL; empty if it is off."""
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            return f"{name}={os.environ[name]}"
    return ""
