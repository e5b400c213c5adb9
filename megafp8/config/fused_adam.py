"""Which runs use the one-pass optimizer (`optimizer.fused_adam`)."""

from __future__ import annotations

from typing import Optional

from megafp8.config.mixture import expert_ranks_flag, expert_tensor_size, has_expert_ranks
from megafp8.config.schema import RunConfig
from megafp8.recipes import registry


def fused_adam_problem(config: RunConfig) -> Optional[str]:
    """The setting that prevents the one-pass optimizer; None if it can be used."""
    settings, precision = config.optimizer, config.precision
    problems = (
        (not settings.one_pass_optimizer, "--no-one-pass-optimizer"),
        (settings.optimizer != "adam", f"--optimizer {settings.optimizer}"),
        (not config.parallel.shards_optimizer, "no --use-distributed-optimizer"),
        # The norm tells copies on tensor-parallel ranks by the ranks of dense layers, which those of experts are not.
        (
            has_expert_ranks(config)
            and max(config.parallel.tensor_model_parallel_size, expert_tensor_size(config.parallel)) > 1,
            f"tensor-parallel ranks with {expert_ranks_flag(config)}",
        ),
        (precision.fp16, "--fp16"),
        (settings.loss_scale is not None, f"--loss-scale {settings.loss_scale}"),
        (settings.main_params_dtype != "fp32", f"--main-params-dtype {settings.main_params_dtype}"),
        (
            settings.use_precision_aware_optimizer
            and precision.fp8_param_gather
            and registry.get(precision.fp8_recipe).is_stateful,
            "--use-precision-aware-optimizer with --fp8-param-gather under delayed scaling, which keeps no FP32 "
            "master weights",
        ),
    )
    return next((text for is_there, text in problems if is_there), None)
