"""The linears that `--fp8-guard` watches, by the precision map.

Statistics of an input say what its quantization loses, so that only inputs that are quantized count. Routed experts are
left out: in a microbatch one may have few tokens or none, and experts in one launch per GEMM call no linear.
"""

from __future__ import annotations

from megafp8.config.precision_map import EXPERTS, OUTPUT_LAYER, resolve
from megafp8.config.schema import ModelConfig, PrecisionConfig

SWIGLU_OUTPUT = "linear_fc2"


def watched_linears(model: ModelConfig, precision: PrecisionConfig) -> tuple[str, ...]:
    """Names of the linears whose inputs are watched, those of shared experts included; empty in high precision."""
    return tuple(
        name
        for name, choice in resolve(model, precision).items()
        if (choice.fprop.recipe or choice.wgrad.recipe) and name != OUTPUT_LAYER and not is_of_routed_experts(name)
    )


def is_of_routed_experts(name: str) -> bool:
    """Whether a linear is one of routed experts: `layers.3.experts.linear_fc1`."""
    return f".{EXPERTS}" in name
