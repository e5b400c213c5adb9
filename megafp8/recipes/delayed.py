"""Delayed scaling: one scale per tensor, from its amax history, which `quantization/delayed_scaling.py` keeps."""

from __future__ import annotations

import dataclasses

from megafp8.recipes.base import (
    ANY_LATER,
    DelayedOptions,
    LinearRecipe,
    OperandRule,
    Recipe,
    ScaleRule,
    linear_recipe,
    operand_formats,
)


def build(
    number_format: str,
    *,
    fp8_margin: int = 0,
    fp8_amax_history_len: int = 1,
    fp8_amax_compute_algo: str = "most_recent",
    tp_only_amax_red: bool = False,
) -> LinearRecipe:
    """The rules and the options of delayed scaling."""
    formats = operand_formats(number_format)
    options = DelayedOptions(
        history_len=fp8_amax_history_len,
        algorithm=fp8_amax_compute_algo,
        margin=fp8_margin,
        is_reduced_over_data=not tp_only_amax_red,
    )
    rules = linear_recipe(
        RECIPE.name, lambda operand, _: OperandRule(format=formats[operand], scale_rule=ScaleRule.DELAYED)
    )
    return dataclasses.replace(rules, delayed=options)


RECIPE = Recipe(
    name="delayed",
    description="one scale per tensor, from the amaxes of previous steps (delayed scaling)",
    build=build,
    option_names=("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "tp_only_amax_red"),
    # Transformer Engine's defaults. Megatron-LM's flags alone give a history of one step.
    tested_options=(("fp8_amax_history_len", 1024), ("fp8_amax_compute_algo", "max")),
    run_option_names=("fp8_delayed_start",),
    resume_option_names=("fp8_margin", "fp8_amax_compute_algo"),
    native_capabilities=(((8, 9), ANY_LATER),),  # Transformer Engine 2.20, check_fp8_support
    te_recipe_class="DelayedScaling",
    te_quantizer=("float8_tensor", "Float8Quantizer"),
    te_switches=(("NVTE_UNFUSED_FP8_UPDATE", "amax histories are also updated for missing tensors"),),
    fuses_swiglu=True,
    supports_userbuffers=True,
    supports_fp8_attention=True,
    supports_op_fuser=True,
    output_layer_recipe="tensorwise",
    exported_as="tensorwise",
    grouped_gemm_formats=("e4m3", "hybrid"),
    fallbacks=(("tensorwise", ", whose scales come from the current tensor"),),
)
