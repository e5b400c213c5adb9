"""Environment variables that decide about memory registered with NCCL (`--use-nccl-ub`)."""

from __future__ import annotations

import os

COPY_ENGINES = {"NCCL_CTA_POLICY": "2"}
"""NCCL's zero-CTA policy (2.28): registered memory is gathered by copy engines, and GEMMs keep all multiprocessors."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def prefer_copy_engines() -> None:
    """Set `COPY_ENGINES`, before the first communicator is made. A value that the user has set stays."""
    for name, value in COPY_ENGINES.items():
        os.environ.setdefault(name, value)


def expandable_segments() -> str:
    """The setting with which torch's allocator has no memory pools for NCCL; empty if it is off."""
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            return f"{name}={os.environ[name]}"
    return ""
