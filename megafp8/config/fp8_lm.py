"""The levels of FP8-LM (`--fp8-lm-level`) as values of other settings.

Source: arXiv:2310.18313, section 2, and its code MS-AMP. A level contains those before it. Its values are defaults:
`--config` files and flags override them one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Optional

from megafp8.config.schema import RunConfig
from megafp8.config.settings import Setting, settings_by_name, value_of
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
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "precision.grad_reduce_in_fp8": ("precision.grad_reduce_fp8_scaling",),
    "optimizer.use_precision_aware_optimizer": (
        "optimizer.exp_avg_dtype",
        "optimizer.exp_avg_sq_dtype",
        "optimizer.main_params_dtype",
    ),
}
"""Switches of the levels, and the settings that have no effect without each."""


def level_values(level: Optional[str], own: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The settings of a level; none without one, or for an unknown one, which another check reports.

    Args:
        own: values that replace those of the level. A switch that they turn off takes the level's options of it along.
    """
    if level is None or level not in _ADDED:
        return {}
    names = list(_ADDED)
    values = {name: value for added in names[: names.index(level) + 1] for name, value in _ADDED[added].items()}
    unused = {option for switch, options in _OPTIONS.items() if own.get(switch) is False for option in options}
    return {name: value for name, value in values.items() if name not in unused}


def remaining_values(from_file: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a `--config` file without those that flags take back.

    These are the values of its level, if flags name another one, and the options of a switch that flags turn off.
    """
    dropped = {option for switch, options in _OPTIONS.items() if flags.get(switch) is False for option in options}
    if LEVEL in flags and flags[LEVEL] != from_file.get(LEVEL):
        level = level_values(from_file.get(LEVEL))
        dropped |= {name for name, value in level.items() if from_file.get(name) == value}
    return {name: value for name, value in from_file.items() if name not in dropped}


def level_warning(config: RunConfig) -> Optional[str]:
    """What the level of a configuration stands for, and what other settings changed of it; None without a level."""
    level = config.precision.fp8_lm_level
    values = level_values(level)
    if not values:
        return None
    settings = settings_by_name()
    unchanged = [settings[name].as_flag(value) for name, value in values.items() if value_of(config, name) == value]
    changed = [
        f"{settings[name].as_flag(value)} (here {name} = {value_of(config, name)})"
        for name, value in values.items()
        if value_of(config, name) != value
    ]
    text = f"--fp8-lm-level {level} stands for {' '.join(unchanged)}"
    return f"{text}; replaced by your own settings: {', '.join(changed)}" if changed else text


def with_origins(problems: Iterable[str], config: RunConfig) -> list[str]:
    """The problems; those of a flag that the configuration's level sets also say so, and what turns it off."""
    level, settings = config.precision.fp8_lm_level, settings_by_name()
    origins = {
        settings[name].as_flag(value): _origin(level, settings[name], settings[name].as_flag(value))
        for name, value in level_values(level).items()
        if value_of(config, name) == value != settings[name].default
    }
    return [
        "; ".join([text, *(origin for flag, origin in origins.items() if is_blamed(flag, text))]) for text in problems
    ]


def is_blamed(flag: str, problem: str) -> bool:
    """Whether a problem is of a flag. What it needs or recommends stands after `needs`, a colon or a semicolon."""
    return bool(re.search(rf"{flag}(?![\w-])", re.split(r"[:;]| needs? ", problem)[0]))


def _origin(level: Optional[str], setting: Setting, flag: str) -> str:
    """That a level sets a flag, and what to give so that it does not."""
    names = list(_ADDED)
    lower = names.index(next(name for name in names if setting.name in _ADDED[name])) - 1
    fixes = [f"give {setting.off[0]}"] if setting.off else []
    if setting.type is not bool:
        fixes = [f"give {setting.as_flag(setting.default or 'none')}"]
    if lower >= 0:
        fixes.append(f"use --fp8-lm-level {names[lower]}")
    return f"--fp8-lm-level {level} sets {flag}: to turn it off, {' or '.join(fixes) or 'remove the level'}"
