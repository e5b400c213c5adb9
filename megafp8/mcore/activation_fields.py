"""Fields of megatron-core's configuration for activations that are recomputed or offloaded to the host."""

from __future__ import annotations

from typing import Any

from megafp8.config import derived
from megafp8.config.schema import RunConfig


def recompute_fields(config: RunConfig, implementation: str) -> dict[str, Any]:
    """Fields of activation recomputation.

    Args:
        implementation: only the experts of `transformer_engine` recompute their activation; runs on other layers are
            refused with it.
    """
    training = config.training
    on_te = implementation == "transformer_engine"
    granularity = derived.recompute_granularity(training)
    if granularity is None:
        return {}
    fields: dict[str, Any] = {
        "recompute_granularity": granularity,
        "recompute_method": training.recompute_method,
        "recompute_num_layers": training.recompute_num_layers,
        "distribute_saved_activations": training.distribute_saved_activations,
    }
    if granularity == "selective":
        known = [each for each in derived.recompute_modules(training) if each != "moe_act" or on_te]
        fields["recompute_modules"] = known
    return fields


def offloading_fields(config: RunConfig) -> dict[str, Any]:
    """Fields of activation offloading, which megatron-core's layers and schedules do."""
    training = config.training
    if not training.fine_grained_activation_offloading:
        return {}
    return {
        "fine_grained_activation_offloading": True,
        "offload_modules": list(training.offload_modules),
        "min_offloaded_tensor_size": training.min_offloaded_tensor_size,
    }
