"""The levels of FP8-LM (`--fp8-lm-level`) as values of other settings.

Source: arXiv:2310.18313, section 2, and its code MS-AMP. A level contains those before it. Its values are defaults:
`--config` files and flags override them one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from megafp8.config.schema import RunConfig
from megafp8.config.settings import settings_by_name, value_of
from megafp8.recipes import registry

LEVEL = "precision.fp8_lm_level"
_ADDED: Mapping[str, Mapping[str, Any]] = {
    "O1": {
        "precision.bf16": True,
        "precision.fp8_format": "hybrid",
        "precision.fp8_recipe": registry.DEFAULT_FP8,
        "precision.grad_reduce_in_fp8": True,
        "precision.grad_reduce_fp8_scaling": "tensor",
    },
    "O2": {
        "parallel.use_distributed_optimizer": True,
        "optimizer.use_precision_aware_optimizer": True,
        "optimizer.exp_avg_dtype": "fp8",
        "optimizer.exp_avg_sq_dtype": "fp16",
    },
    "O3": {"precision.fp8_param_gather": True, "optimizer.main_params_dtype": "fp16"},
}


def level_values(level: Optional[str]) -> dict[str, Any]:
    """The settings of a level; none without one, or for an unknown one, which another check reports."""
    if level is None or level not in _ADDED:
        return {}
    names = list(_ADDED)
    return {name: value for added in names[: names.index(level) + 1] for name, value in _ADDED[added].items()}


def level_notice(config: RunConfig) -> Optional[str]:
    """What the level of a configuration stands for, and what other settings changed of it; None without a level."""
    level = config.precision.fp8_lm_level
    values = level_values(level)
    if not values:
        return None
    settings = settings_by_name()
    kept = [settings[name].as_flag(value) for name, value in values.items() if value_of(config, name) == value]
    changed = [
        f"{settings[name].as_flag(value)} (here {name} = {value_of(config, name)})"
        for name, value in values.items()
        if value_of(config, name) != value
    ]
    text = f"--fp8-lm-level {level} stands for {' '.join(kept)}"
    return f"{text}; replaced by your own settings: {', '.join(changed)}" if changed else text
