"""Quartet II (arXiv:2601.22813): NVFP4 with an unbiased backward pass of less error than stochastic rounding."""

from __future__ import annotations

from megafp8.recipes.base import (
    FP4_FORMATS,
    Gemm,
    LinearRecipe,
    Operand,
    OperandRule,
    Recipe,
    ScaleRule,
    along_sum,
    linear_recipe,
)
from megafp8.recipes.formats import FORMATS

LENGTH = 16


def build(number_format: str) -> LinearRecipe:
    """The rules. fprop: four-over-six. dgrad and wgrad: MS-EDEN, of weight and input from their codes for fprop.

    Args:
        number_format: "e2m1".
    """

    def rule(operand: Operand, gemm: Gemm) -> OperandRule:
        is_backward = gemm is not Gemm.FPROP
        return OperandRule(
            format=FORMATS[number_format],
            block=along_sum(LENGTH, operand, gemm),
            scale_rule=ScaleRule.EDEN if is_backward else ScaleRule.FOUR_OVER_SIX,
            is_transformed=is_backward,
            is_stochastic=is_backward,
            is_requantized=is_backward and operand is not Operand.GRAD_OUTPUT,
        )

    return linear_recipe(RECIPE.name, rule)


RECIPE = Recipe(
    name="quartet2",
    description="nvfp4 with four-over-six scales forward and an unbiased backward pass (MS-EDEN), emulated only",
    family="fp4",
    formats=FP4_FORMATS,
    default_format="e2m1",
    build=build,
    gemm_alignment=128,  # of the Hadamard transform
    fallbacks=(("mxfp8", ", which has eight bits instead of four"),),
)
