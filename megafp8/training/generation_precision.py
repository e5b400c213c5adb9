"""The arithmetic in which a checkpoint generates: that of training, or high precision.

A key-value cache is for high precision only. With per-tensor scaling the scale of one token is not the scale of its
sequence, so that quantized GEMMs over single tokens would be neither the arithmetic of training nor faster.
"""

from __future__ import annotations

import dataclasses
from typing import Optional

from megafp8.config import derived, precision_map, precision_schedule
from megafp8.config.schema import PrecisionConfig, RunConfig
from megafp8.config.settings import with_values
from megafp8.errors import ConfigError
from megafp8.recipes import registry


def trained_config(saved: RunConfig, step: int) -> RunConfig:
    """The saved configuration with the arithmetic of a step: that of its phase of `--fp8-schedule`."""
    return dataclasses.replace(saved, precision=precision_schedule.precision_at(saved.precision, max(1, step)))


def generation_config(
    trained: RunConfig, precision: Optional[str], uses_cache: bool, has_bf16_units: bool
) -> RunConfig:
    """The configuration with the arithmetic to generate in.

    Args:
        precision: `checkpoint` for the arithmetic of training, `high` for the same without quantization. None is
            `checkpoint` without a cache. With a cache it is `high`; a quantized BF16 run then generates in FP32 on
            devices that emulate BF16. `bf16`, `fp32` or the name of a recipe compute
            in that, whatever the run trained in; a recipe is for use without a cache.
        has_bf16_units: the device multiplies BF16 in hardware.

    Raises:
        ConfigError: `checkpoint` with a cache for a quantized run, or a recipe whose scales need a history.
    """
    if precision in ("bf16", "fp32"):
        dtype = {"precision.bf16": precision == "bf16", "precision.fp16": False}
        return with_values(without_quantization(trained), dtype)
    if precision in registry.names():
        recipe = registry.get(precision)
        if recipe.is_stateful:
            raise ConfigError(
                f"--precision {precision}: its scales come from the amax history of training; for a run in this recipe "
                "use --precision checkpoint"
            )
        values = {
            f"precision.{recipe.family}_format": recipe.default_format,
            f"precision.{recipe.family}_recipe": precision,
            "precision.transformer_impl": "auto",  # the layers of a run in high precision may not quantize
        }
        return with_values(without_quantization(trained), values)
    if not precision_map.is_quantized(trained.precision):
        return trained
    if precision == "high":
        return without_quantization(trained)
    if not uses_cache:
        return trained
    if precision == "checkpoint":
        raise ConfigError(
            f"--precision checkpoint: the run trained in {', '.join(quantization_words(trained.precision))}, and a "
            "key-value cache is for high precision only: add --no-cache, or leave out --precision"
        )
    emulates_bf16 = trained.precision.bf16 and not has_bf16_units
    return with_values(without_quantization(trained), {"precision.bf16": False} if emulates_bf16 else {})


def cache_warning(trained: PrecisionConfig, chosen: PrecisionConfig) -> str:
    """How the arithmetic differs from that of training because of the cache, in words; empty if it does not."""
    if chosen == trained:
        return ""
    dtype = derived.params_dtype(chosen)
    reason = "" if dtype == derived.params_dtype(trained) else ", since this device emulates bf16"
    return (
        f"trained in {', '.join(quantization_words(trained))}; the key-value cache generates in {dtype}{reason}. "
        "--no-cache generates with the arithmetic of training"
    )


def without_quantization(config: RunConfig) -> RunConfig:
    """The configuration with all GEMMs in high precision."""
    return dataclasses.replace(config, precision=precision_schedule.without_recipes(config.precision))


def quantization_words(precision: PrecisionConfig) -> list[str]:
    """The format, recipe and precision map of a run, for messages; empty in high precision."""
    recipe = derived.quantization_recipe(precision)
    kind = f"FP4 {precision.fp4_format}" if precision.fp8_format is None else f"FP8 {precision.fp8_format}"
    words = [] if recipe is None else [f"{kind} {recipe}"]
    return words + ([" ".join(precision.precision_map)] if precision.precision_map else [])
