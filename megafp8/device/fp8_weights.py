"""What Transformer Engine's Adam does not support beside FP8 weights that it writes itself."""

from __future__ import annotations

from megafp8.config import derived
from megafp8.config.schema import RunConfig


def fp16_master_problems(config: RunConfig) -> list[str]:
    """Problem of FP16 master weights beside FP8 weights: Adam's own FP8 update knows delayed scaling only."""
    precision, dtype = config.precision, config.optimizer.main_params_dtype
    if dtype == "fp32" or not precision.fp8_param_gather or derived.is_stateful(precision):
        return []
    return [
        f"--main-params-dtype {dtype} with --fp8-param-gather and --fp8-recipe {precision.fp8_recipe}: Transformer "
        "Engine's Adam, which keeps such master weights, writes FP8 weights of delayed scaling only; remove "
        "--main-params-dtype, or use another recipe"
    ]
