"""Parses `--override SECTION.FIELD=VALUE`, which sets fields of megatron-core's configuration that have no flag.

A field that a flag sets is refused: the run would differ from its recorded configuration, its memory estimate and its
checks.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Optional

import torch

from megafp8.config import megatron_flags
from megafp8.config.schema import RunConfig
from megafp8.config.settings import all_settings
from megafp8.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}

# Fields that are set by a flag with another name.
FLAG_OF_FIELD: Mapping[str, str] = MappingProxyType({
    "layernorm_epsilon": "--norm-epsilon",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "gated_linear_unit": "--swiglu",
    "activation_func": "--swiglu or --squared-relu",
    "virtual_pipeline_model_parallel_size": "--num-layers-per-virtual-pipeline-stage",
    "params_dtype": "--bf16 or --fp16",
    "pipeline_dtype": "--bf16 or --fp16",
    "fp8": "--fp8-format",
    "fp8_param": "--fp8-param-gather",
    "fp4": "--fp4-format",
    "grad_reduce_in_fp32": "--grad-reduce-in-bf16",
    "bucket_size": "--ddp-bucket-size",
    "average_in_collective": "--ddp-average-in-collective",
    "bias_activation_fusion": "--no-bias-swiglu-fusion or --no-bias-gelu-fusion",
})  # fmt: skip

# Prefixes of the fields of unsupported features, with the flag whose refusal gives the reason.
REFUSED_PREFIXES: tuple[tuple[str, str], ...] = (
    ("moe_", "--num-experts"),
    ("num_moe_experts", "--num-experts"),
    ("expert_", "--num-experts"),
    ("mtp_", "--mtp-num-layers"),
    ("multi_latent_attention", "--multi-latent-attention"),
)


def parsed_overrides(config: RunConfig, section: str, kind: type) -> dict[str, Any]:
    """The values of the `--override` entries of one section, converted to the types of their fields.

    Raises:
        ConfigError: lists all unknown fields, fields that a flag sets, fields of unsupported features, and values of a
            wrong type.
    """
    types = typing.get_type_hints(kind)
    fields = {field.name for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for entry in config.overrides:
        path, _, text = entry.partition("=")
        owner, _, name = path.partition(".")
        if owner != section:
            continue
        unknown = f"megatron-core's {kind.__name__} has no field {name}"
        reason = override_refusal(name) if name in fields else unknown
        if reason is not None:
            problems.append(f"--override {entry}: {reason}")
            continue
        try:
            values[name] = parse_value(text, types[name])
        except ValueError:
            problems.append(f"--override {entry}: {text!r} is not of type {describe_type(types[name])}")
    if problems:
        raise ConfigError(problems)
    return values


def override_refusal(field: str) -> Optional[str]:
    """Why `--override` must not set a field, and which flag does; None if it may."""
    flag = FLAG_OF_FIELD.get(field) or next(
        ((setting.flags or setting.off)[0] for setting in all_settings() if setting.field == field), None
    )
    if flag is not None:
        return f"{field} is set by {flag}: give that"
    refused = next((flag for prefix, flag in REFUSED_PREFIXES if field.startswith(prefix)), None)
    return megatron_flags.refusal_reason(refused) if refused is not None else None


def parse_value(text: str, target: Any) -> Any:
    """Parse a value of type `target`, such as `true`, `8`, `1e-5`, `none`, `[1, 2]`, `bf16` or `flash`.

    Raises:
        ValueError: the text is not of that type.
    """
    try:
        value: Any = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = {"true": True, "false": False, "none": None}.get(text.lower(), text)
    try:
        return convert_value(value, target)
    except ValueError:
        return convert_value(text, target)  # a string that looks like a number


def convert_value(value: Any, target: Any) -> Any:
    """Convert a Python value to an annotated type: integer to float, list to tuple, name to enum member or dtype.

    Raises:
        ValueError: the value cannot be converted.
    """
    origin, arguments = typing.get_origin(target), typing.get_args(target)
    if origin is typing.Union:
        for choice in arguments:
            with contextlib.suppress(ValueError):
                return convert_value(value, choice)
    elif origin is typing.Literal and value in arguments:
        return value
    elif origin in (list, tuple) and isinstance(value, (list, tuple)):
        kinds = arguments if origin is tuple else arguments * len(value)
        if len(kinds) == len(value):
            return origin(convert_value(item, kind) for item, kind in zip(value, kinds, strict=True))
    elif target is torch.dtype and str(value) in DTYPES:
        return DTYPES[value]
    elif isinstance(target, type) and issubclass(target, enum.Enum) and str(value) in target.__members__:
        return target[value]
    elif target is float and type(value) is int:
        return float(value)
    elif target in (int, float, bool, str, type(None)) and type(value) is target:
        return value
    raise ValueError(f"{value!r} is not of type {target}")


def describe_type(target: Any) -> str:
    """Name of a type for a message, with its values for dtypes and enums."""
    if target is torch.dtype:
        return f"dtype ({', '.join(DTYPES)})"
    if isinstance(target, type) and issubclass(target, enum.Enum):
        return f"{target.__name__} ({', '.join(target.__members__)})"
    return target.__name__ if isinstance(target, type) else str(target).replace("typing.", "")
