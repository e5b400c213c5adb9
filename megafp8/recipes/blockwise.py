"""Blockwise scaling of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2), with Transformer Engine's scales."""

from __future__ import annotations

from megafp8.recipes.base import (
    ANY_LATER,
    Gemm,
    LinearRecipe,
    Operand,
    OperandRule,
    Recipe,
    ScaleRule,
    along_sum,
    linear_recipe,
    operand_formats,
)
from megafp8.recipes.export_form import ExportForm

LENGTH = 128


def build(number_format: str, *, fp8_block_scaling_fp32_scales: bool = False) -> LinearRecipe:
    """The rules; scales are powers of two, or FP32."""
    formats = operand_formats(number_format)
    scale_rule = ScaleRule.FP32 if fp8_block_scaling_fp32_scales else ScaleRule.POWER_OF_TWO

    def rule(operand: Operand, gemm: Gemm) -> OperandRule:
        block = (LENGTH, LENGTH) if operand is Operand.WEIGHT else along_sum(LENGTH, operand, gemm)
        return OperandRule(format=formats[operand], block=block, scale_rule=scale_rule)

    return linear_recipe(RECIPE.name, rule)


RECIPE = Recipe(
    name="blockwise",
    description="one scale per block: 1 x 128 for activations and gradients, 128 x 128 for weights",
    build=build,
    default_format="e4m3",
    option_names=("fp8_block_scaling_fp32_scales",),
    resume_option_names=("fp8_block_scaling_fp32_scales",),
    # On Blackwell Transformer Engine multiplies it as MXFP8, also on 12.x (its pull request 2157 and issue 2668).
    native_capabilities=(((9, 0), ANY_LATER),),
    te_recipe_class="Float8BlockScaling",
    te_quantizer=("float8_blockwise_tensor", "Float8BlockQuantizer"),
    te_switches=(("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "scales are FP32"),),
    is_faster_with_kernels=True,
    fuses_swiglu=True,
    grouped_gemm_formats=("e4m3", "hybrid"),
    supports_op_fuser=True,
    output_layer_recipe="blockwise",
    export_form=ExportForm(
        scale_suffix="weight_scale_inv",
        quantization_config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [LENGTH, LENGTH],
        },
        excluded_key="modules_to_not_convert",
    ),
    slow_gemm_until=(10, 0),  # Blackwell multiplies these blocks with its MXFP8 tensor cores
    slow_cast=True,
)
