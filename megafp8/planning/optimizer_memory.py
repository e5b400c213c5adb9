"""Bytes of optimizer state for each parameter of a shard, and of what an update has beside it for a time.

The one-pass update (`optimizer.fused_adam`) needs nothing beside the state. Transformer Engine's Adam, for what the
one-pass update does not have, turns FP8 and FP16 state into FP32 for all parameters at once
(`FusedAdam.get_unscaled_state`). The memory of activations and logits is free by then.
"""

from __future__ import annotations

from megafp8.config import derived
from megafp8.config.fused_adam import fused_adam_obstacle
from megafp8.config.schema import RunConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
SCALED = ("fp16", "fp8")
"""Dtypes whose tensors have a scale."""


def state_bytes(config: RunConfig) -> tuple[int, int, int]:
    """Bytes for each parameter of master weights, of moments, and of FP32 copies of low-precision gradients."""
    optimizer, precision = config.optimizer, config.precision
    params_dtype = derived.params_dtype(precision)
    if optimizer.use_precision_aware_optimizer:
        is_remainder = params_dtype == "bf16" and not precision.fp8_param_gather  # the 16 bits that BF16 weights lack
        master = BYTES["bf16" if is_remainder else optimizer.main_params_dtype]
        return master, BYTES[optimizer.exp_avg_dtype] + BYTES[optimizer.exp_avg_sq_dtype], 0
    master = 0 if params_dtype == "fp32" else BYTES["fp32"]
    moments = (2 if optimizer.optimizer == "adam" else 1) * BYTES["fp32"]
    return master, moments, 0 if derived.grad_dtype(precision) == "fp32" else BYTES["fp32"]


def update_bytes(config: RunConfig) -> int:
    """Bytes for each parameter of the FP32 copies that an update makes of its state."""
    optimizer = config.optimizer
    if not optimizer.use_precision_aware_optimizer or fused_adam_obstacle(config) is None:
        return 0
    dtypes = (optimizer.main_params_dtype, optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)
    return BYTES["fp32"] * sum(dtype in SCALED for dtype in dtypes)
