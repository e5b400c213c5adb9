"""The linears into which `--planted-fault` plants its fault, by the precision map."""

from __future__ import annotations

from megafp8.config.expert_layers import expert_layers
from megafp8.config.guarded_linears import is_of_routed_experts
from megafp8.config.planted_faults import (
    ALIGNED_SWIGLU,
    INFINITE_ACTIVATION,
    INFLATED_QK,
    MLP_FAULTS,
    OUTLIER_CHANNEL,
)
from megafp8.config.precision_map import linears_with_statistics
from megafp8.config.schema import ModelConfig, PrecisionConfig

LINEARS = {
    OUTLIER_CHANNEL: "linear_fc1", ALIGNED_SWIGLU: "linear_fc2", INFLATED_QK: "linear_qkv",
    INFINITE_ACTIVATION: "linear_fc2",
}  # fmt: skip
"""Kind of a fault to the linear of a layer that has it; others need none."""


def planted_linears(fault: str, model: ModelConfig, precision: PrecisionConfig) -> tuple[str, ...]:
    """Names of the linears that have a fault: the quantized ones, or all of a run in high precision.

    A gradual fault of an MLP is in those through which all tokens pass: a routed expert may have none in a step.
    """
    return tuple(
        name
        for name in linears_with_statistics(model, precision)
        if name.endswith(f".{LINEARS.get(fault)}") and not (fault in MLP_FAULTS and is_of_routed_experts(name))
    )


def has_mlp_of_all_tokens(model: ModelConfig) -> bool:
    """Whether the model has a dense MLP or a shared expert."""
    return not all(expert_layers(model)) or model.moe_shared_expert_intermediate_size is not None
