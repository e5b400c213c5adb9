"""What the settings need of this machine's packages and environment variables; a dry run reports it as notices."""

from __future__ import annotations

import importlib.util
import os

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
