"""Rowwise scaling: one scale per token of activations and gradients, and one per output channel of weights.

Each operand has one scale per vector along the contracted dimension of the GEMM, so that the scales can be applied to
the output. Scales are powers of two. The two uses of an operand are quantized separately from high precision. Source:
torchao's `Float8LinearRecipeName.ROWWISE` and `tensor_to_scale`.
"""

from __future__ import annotations

from megafp8.recipes.base import (
    FULL_DIM,
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
from megafp8.recipes.export_form import ExportForm, compressed_tensors


def build(number_format: str) -> LinearRecipe:
    """The rules."""
    formats = operand_formats(number_format)

    def rule(operand: Operand, gemm: Gemm) -> OperandRule:
        block = along_sum(FULL_DIM, operand, gemm)
        return OperandRule(format=formats[operand], block=block, scale_rule=ScaleRule.POWER_OF_TWO)

    return linear_recipe(RECIPE.name, rule)


RECIPE = Recipe(
    name="rowwise",
    description="one power-of-two scale per token, and per output channel of weights",
    build=build,
    default_format="e4m3",
    scaled_mm_capabilities=(((9, 0), (9, 1)),),  # only Hopper was tested
    grouped_gemm_formats=("e4m3", "hybrid"),
    export_form=ExportForm(
        scale_suffix="weight_scale", quantization_config=compressed_tensors("channel"), excluded_key="ignore"
    ),
)
