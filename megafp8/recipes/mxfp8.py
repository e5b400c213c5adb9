"""MXFP8: blocks of 32 along the contracted dimension, power-of-two scales rounded up (arXiv:2506.08027)."""

from __future__ import annotations

from megafp8.recipes.base import (
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

LENGTH = 32


def build(number_format: str, *, fp8_e8m0_floor: bool = False) -> LinearRecipe:
    """The rules.

    Args:
        fp8_e8m0_floor: round scales down, as the OCP specification does. The largest values of a block may saturate.
    """
    formats = operand_formats(number_format)
    scale_rule = ScaleRule.E8M0_FLOOR if fp8_e8m0_floor else ScaleRule.E8M0

    def rule(operand: Operand, gemm: Gemm) -> OperandRule:
        return OperandRule(format=formats[operand], block=along_sum(LENGTH, operand, gemm), scale_rule=scale_rule)

    return linear_recipe(RECIPE.name, rule)


RECIPE = Recipe(
    name="mxfp8",
    description="one power-of-two scale per 32 values along the contracted dimension",
    build=build,
    option_names=("fp8_e8m0_floor",),
    resume_option_names=("fp8_e8m0_floor",),
    default_format="e4m3",
    gemm_alignment=LENGTH,
    # Source: check_mxfp8_support of Transformer Engine 2.20, and cuBLAS 13.4's "Narrow Precision Data Types Usage".
    native_capabilities=(((10, 0), (12, 0)),),
    beyond_capabilities="there cuBLASLt multiplies blocks of 32 in one of the three layouts of training only",
    blackwell_note="with one scale per tensor, published steps of dense models are 1.04 to 1.14 times as fast; blocks "
    "are for accuracy",
    te_recipe_class="MXFP8BlockScaling",
    supports_userbuffers=True,
    is_ranked_on_blackwell=True,
)
