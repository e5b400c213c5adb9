"""Rowwise scaling: one scale for a token of activations and gradients, and for an output channel of weights.

As torchao's `rowwise`: each operand has scales along what its GEMM sums over, so that they come out of the sums, and
scales are powers of two. Both uses of an operand are cast from high precision. Source: torchao's
`Float8LinearRecipeName.ROWWISE` and `tensor_to_scale`.
"""

from __future__ import annotations

from megafp8.recipes.base import (
    WHOLE,
    ExportForm,
    Gemm,
    LinearRecipe,
    Operand,
    OperandRule,
    Recipe,
    ScaleRule,
    along_sum,
    compressed_tensors,
    linear_recipe,
    operand_formats,
)


def build(number_format: str) -> LinearRecipe:
    """The rules."""
    formats = operand_formats(number_format)

    def rule(operand: Operand, gemm: Gemm) -> OperandRule:
        block = along_sum(WHOLE, operand, gemm)
        return OperandRule(format=formats[operand], block=block, scale_rule=ScaleRule.POWER_OF_TWO)

    return linear_recipe(RECIPE.name, rule)


RECIPE = Recipe(
    name="rowwise",
    description="one power-of-two scale for a token, and for an output channel of weights",
    build=build,
    default_format="e4m3",
    scaled_mm_capabilities=(((9, 0), (9, 1)),),  # what it was tried on
    export_form=ExportForm(
        scale_suffix="weight_scale", quantization_config=compressed_tensors("channel"), excluded_key="ignore"
    ),
)
