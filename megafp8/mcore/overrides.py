"""`--override SECTION.FIELD=VALUE`: fields of megatron-core's configuration that have no flag, by name and type.

A field that a flag sets is that flag's: set behind its back, the run would be another than the one that its record,
its memory estimate and its checks describe.
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

# Fields that a flag of another name sets.
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

# Fields of what megafp8 does not have, by how they begin, and the flag whose refusal gives the reason.
REFUSED_PREFIXES: tuple[tuple[str, str], ...] = (
    ("moe_", "--num-experts"),
    ("num_moe_experts", "--num-experts"),
    ("expert_", "--num-experts"),
    ("mtp_", "--mtp-num-layers"),
    ("multi_latent_attention", "--multi-latent-attention"),
)


def parsed_overrides(config: RunConfig, section: str, kind: type) -> dict[str, Any]:
    """The `--override SECTION.FIELD=VALUE` entries of one section, converted to the fields' own types.

    Raises:
        ConfigError: a field that megatron-core does not have, one that a flag sets, one of a feature that is not
            there, or a value of another type; all of them.
    """
    types = typing.get_type_hints(kind)
    fields = {field.name for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    faults: list[str] = []
    for entry in config.overrides:
        path, _, text = entry.partition("=")
        owner, _, name = path.partition(".")
        if owner != section:
            continue
        if name not in fields:
            faults.append(f"--override {entry}: megatron-core's {kind.__name__} has no field {name}")
            continue
        reason = not_to_override(name)
        if reason is not None:
            faults.append(f"--override {entry}: {reason}")
            continue
        try:
            values[name] = converted(text, types[name])
        except ValueError:
            faults.append(f"--override {entry}: {text!r} is not of type {type_text(types[name])}")
    if faults:
        raise ConfigError(faults)
    return values


def not_to_override(field: str) -> Optional[str]:
    """Why a field is not for `--override`, with what to give instead; None if it is."""
    flag = FLAG_OF_FIELD.get(field) or next(
        ((setting.flags or setting.off)[0] for setting in all_settings() if setting.field == field), None
    )
    if flag is not None:
        return f"{field} is set by {flag}: give that"
    refused = next((flag for prefix, flag in REFUSED_PREFIXES if field.startswith(prefix)), None)
    return megatron_flags.refusal(refused) if refused is not None else None


def converted(text: str, wanted: Any) -> Any:
    """The value that a text means for a field of type `wanted`: `true`, `8`, `1e-5`, `none`, `[1, 2]`, `bf16`, `flash`.

    Raises:
        ValueError: it means none.
    """
    try:
        value: Any = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = {"true": True, "false": False, "none": None}.get(text.lower(), text)
    try:
        return as_type(value, wanted)
    except ValueError:
        return as_type(text, wanted)  # a string that looks like a number


def as_type(value: Any, wanted: Any) -> Any:
    """A Python value as an annotation wants it; an integer serves as a float, a list as a tuple, a name as an enum's.

    Raises:
        ValueError: it does not fit.
    """
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is typing.Union:
        for choice in arguments:
            with contextlib.suppress(ValueError):
                return as_type(value, choice)
    elif origin is typing.Literal and value in arguments:
        return value
    elif origin in (list, tuple) and isinstance(value, (list, tuple)):
        kinds = arguments if origin is tuple else arguments * len(value)
        if len(kinds) == len(value):
            return origin(as_type(item, kind) for item, kind in zip(value, kinds, strict=True))
    elif wanted is torch.dtype and str(value) in DTYPES:
        return DTYPES[value]
    elif isinstance(wanted, type) and issubclass(wanted, enum.Enum) and str(value) in wanted.__members__:
        return wanted[value]
    elif wanted is float and type(value) is int:
        return float(value)
    elif wanted in (int, float, bool, str, type(None)) and type(value) is wanted:
        return value
    raise ValueError(f"{value!r} is not of type {wanted}")


def type_text(wanted: Any) -> str:
    """A type as a message names it, with its values if they are few."""
    if wanted is torch.dtype:
        return f"dtype ({', '.join(DTYPES)})"
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return f"{wanted.__name__} ({', '.join(wanted.__members__)})"
    return wanted.__name__ if isinstance(wanted, type) else str(wanted).replace("typing.", "")
