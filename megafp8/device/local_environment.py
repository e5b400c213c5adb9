"""What the settings need of this machine's packages and environment variables; a dry run reports it as notices."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from megafp8.config import mixture
from megafp8.config.schema import LoggingConfig, RunConfig


def package_problems(logging: LoggingConfig) -> list[str]:
    """Requested packages that are not installed on this machine."""
    if logging.wandb_project and importlib.util.find_spec("wandb") is None:
        return [
            f"--wandb-project {logging.wandb_project}: the package wandb is not installed; pip install wandb, or "
            "remove the flag (records.jsonl and TensorBoard have the same values)"
        ]
    return []


def offloading_problems(config: RunConfig) -> list[str]:
    """What this machine's environment lacks for activation offloading: Transformer Engine reads it on import."""
    variable = "NVTE_CPU_OFFLOAD_V1"
    if not config.training.fine_grained_activation_offloading or os.environ.get(variable) == "1":
        return []
    return [
        f"--fine-grained-activation-offloading: Transformer Engine 2.10 and newer would copy weights to the host, too; "
        f"set the environment variable {variable}=1"
    ]


def exchange_library_problems(config: RunConfig) -> list[str]:
    """The library of `--moe-token-dispatcher-type flex`, if it is not installed on this machine."""
    library = mixture.exchange_library(config)
    if library is None or has_exchange_library(library):
        return []
    branch = " (branch hybrid-ep)" if library == "HybridEP" else ""
    return [
        f"--moe-token-dispatcher-type flex: {library} is not installed; build the package deep_ep of "
        f"github.com/deepseek-ai/DeepEP{branch}, or use --moe-token-dispatcher-type alltoall"
    ]


def has_exchange_library(library: str) -> bool:
    """Whether the package deep_ep has the class that megatron-core imports. It is read, since its import needs a GPU.

    Args:
        library: `DeepEP` or `HybridEP`.
    """
    spec = importlib.util.find_spec("deep_ep")
    if spec is None or spec.origin is None:
        return False
    name = {"DeepEP": "Buffer", "HybridEP": "HybridEPBuffer"}[library]
    return re.search(rf"\b{name}\b", Path(spec.origin).read_text(encoding="utf-8")) is not None
