"""An external recipe: no file of the package has its name. `MEGAFP8_RECIPES` adds it.

Weights have one scale per output channel for both GEMMs that read them, so that they can be gathered as codes.
Activations and gradients have blocks of 64 along the sum.
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
        block = (1, FULL_DIM) if operand is Operand.WEIGHT else along_sum(64, operand, gemm)
        return OperandRule(format=formats[operand], block=block, scale_rule=ScaleRule.POWER_OF_TWO)

    return linear_recipe(RECIPE.name, rule)


RECIPE = Recipe(
    name="channels",
    description="one scale a channel of weights, 64 values of activations and gradients",
    build=build,
    default_format="e4m3",
    export_form=ExportForm(
        scale_suffix="weight_scale", quantization_config=compressed_tensors("channel"), excluded_key="ignore"
    ),
)
