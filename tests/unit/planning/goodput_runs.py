"""Inputs of goodput tests: one node, saves that take no time and no faults, unless a test says otherwise."""

from __future__ import annotations

from typing import Any

from megafp8.planning.goodput_inputs import GoodputInputs

PEACE: dict[str, Any] = {
    "num_gpus": 1, "num_nodes": 1, "days": 1.0, "step_s": 1.0, "tokens_per_step": 1.0, "stall_s": 0.0, "write_s": 0.0,
    "load_s": 0.0, "gpu_failures_per_s": 0.0, "node_failures_per_s": 0.0, "hang_fraction": 0.0,
    "hardware_fraction": 0.0, "restart_s": 0.0, "save_interval": 100,
}  # fmt: skip


def small_inputs(**changes: Any) -> GoodputInputs:
    """`PEACE` with changes."""
    return GoodputInputs(**PEACE | changes)
