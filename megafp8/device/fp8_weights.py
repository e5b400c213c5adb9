"""What Transformer Engine does not support beside FP8 weights: FP16 master weights, and FSDP2."""

from __future__ import annotations

from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.recipes import registry
from megafp8.recipes.base import Gemm, Operand, Recipe


def fp16_master_problems(config: RunConfig) -> list[str]:
    """Problem of FP16 master weights beside FP8 weights: Adam's own FP8 update knows delayed scaling only."""
    precision, dtype = config.precision, config.optimizer.main_params_dtype
    is_used = precision.fp8_param_gather and precision.fp8_format is not None
    if dtype == "fp32" or not is_used or derived.is_stateful(precision):
        return []
    known = " or ".join(recipe.flag for recipe in registry.stateful())
    return [
        f"--main-params-dtype {dtype} with --fp8-param-gather and --fp8-recipe {precision.fp8_recipe}: Transformer "
        "Engine's Adam, which keeps such master weights, writes FP8 weights of delayed scaling only; remove "
        f"--main-params-dtype, or use {known}"
    ]


def fsdp_codes_problems(config: RunConfig) -> list[str]:
    """Problem of codes that FSDP2 gathers: scales from a history are made inside Transformer Engine, and
    block scales have a layout of its own. Emulated layers support both."""
    if not (config.parallel.use_torch_fsdp2 and config.precision.fp8_param_gather):
        return []
    known = ", ".join(
        recipe.name for recipe in registry.recipes() if recipe.te_recipe_class and has_current_tensor_scale(recipe)
    )
    return [
        f"--fp8-param-gather with --use-torch-fsdp2 and --fp8-recipe {recipe.name}: Transformer Engine's layers read "
        "gathered codes only where a weight has one scale, which follows from its present values, and this recipe has "
        f"{'scales from an amax history' if recipe.is_stateful else 'scales of blocks'}; remove --fp8-param-gather, or "
        f"use --fp8-recipe {known} or --transformer-impl emulated"
        for recipe in derived.used_recipes(config.precision)
        if not has_current_tensor_scale(recipe)
    ]


def has_current_tensor_scale(recipe: Recipe) -> bool:
    """Whether a weight has one scale, of its present values."""
    rule = recipe.rules().rule(Operand.WEIGHT, Gemm.FPROP)
    return rule is not None and rule.block is None and not recipe.is_stateful
