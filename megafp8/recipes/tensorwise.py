"""Tensorwise current scaling: one scale per tensor, from the amax of the tensor itself."""

from __future__ import annotations

from megafp8.recipes.base import (
    ANY_LATER,
    LinearRecipe,
    OperandRule,
    Recipe,
    ScaleRule,
    linear_recipe,
    operand_formats,
)
from megafp8.recipes.export_form import ExportForm, compressed_tensors


def build(number_format: str, *, fp8_power_2_scale: bool = False, fp8_tensorwise_margin: int = 0) -> LinearRecipe:
    """The rules; scales are FP32, or rounded down to powers of two.

    Args:
        fp8_tensorwise_margin: quant_scales are divided by 2^margin. Transformer Engine has no margin here.
    """
    formats = operand_formats(number_format)
    scale_rule = ScaleRule.POWER_OF_TWO if fp8_power_2_scale else ScaleRule.FP32
    margin = fp8_tensorwise_margin
    return linear_recipe(
        RECIPE.name, lambda operand, _: OperandRule(format=formats[operand], scale_rule=scale_rule, margin=margin)
    )


RECIPE = Recipe(
    name="tensorwise",
    description="one scale per tensor, from its current amax (current scaling)",
    build=build,
    option_names=("fp8_power_2_scale", "fp8_tensorwise_margin"),
    resume_option_names=("fp8_power_2_scale", "fp8_tensorwise_margin"),
    native_capabilities=(((8, 9), ANY_LATER),),  # Transformer Engine 2.20, check_fp8_support
    te_recipe_class="Float8CurrentScaling",
    te_quantizer=("float8_tensor", "Float8CurrentScalingQuantizer"),
    te_switches=(("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "scales are powers of two"),),
    supports_userbuffers=True,
    supports_op_fuser=True,
    output_layer_recipe="tensorwise",
    export_form=ExportForm(
        scale_suffix="weight_scale", quantization_config=compressed_tensors("tensor"), excluded_key="ignore"
    ),
    is_ranked_on_blackwell=True,
    grouped_gemm_formats=("e4m3", "hybrid"),
)
