"""NVFP4 (arXiv:2509.25149): FP4 operands in blocks of 16, with E4M3 block scales and an FP32 scale per tensor."""

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
OPTIONS = ("fp4_hadamard", "fp4_stochastic_rounding", "fp4_2d_weights", "fp4_four_over_six")


def build(
    number_format: str,
    *,
    fp4_hadamard: bool = True,
    fp4_stochastic_rounding: bool = True,
    fp4_2d_weights: bool = True,
    fp4_four_over_six: bool = False,
) -> LinearRecipe:
    """The rules.

    Args:
        number_format: "e2m1".
        fp4_hadamard: Hadamard-transform both operands of wgrad.
        fp4_stochastic_rounding: round grad_output stochastically.
        fp4_2d_weights: quantize weights in 16 x 16 blocks, so that fprop and dgrad read the same codes; otherwise in
            blocks along the contracted dimension.
        fp4_four_over_six: four-over-six scaling (arXiv:2512.02010) of blocks that are rounded to nearest: their amax is
            mapped to 4 or to 6, whichever has the smaller error. Stochastically rounded operands are left out, because
            a choice by the error of the draw would bias them (arXiv:2601.22813, section 4).
    """

    def rule(operand: Operand, gemm: Gemm) -> OperandRule:
        is_square = fp4_2d_weights and operand is Operand.WEIGHT
        is_stochastic = fp4_stochastic_rounding and operand is Operand.GRAD_OUTPUT
        is_adaptive = fp4_four_over_six and not is_stochastic
        return OperandRule(
            format=FORMATS[number_format],
            block=(LENGTH, LENGTH) if is_square else along_sum(LENGTH, operand, gemm),
            scale_rule=ScaleRule.FOUR_OVER_SIX if is_adaptive else ScaleRule.TWO_LEVEL,
            is_transformed=fp4_hadamard and gemm is Gemm.WGRAD,
            is_stochastic=is_stochastic,
        )

    return linear_recipe(RECIPE.name, rule)


RECIPE = Recipe(
    name="nvfp4",
    description="one E4M3 scale per 16 values along the contracted dimension, 16 x 16 for weights",
    family="fp4",
    formats=FP4_FORMATS,
    default_format="e2m1",
    build=build,
    option_names=OPTIONS,
    resume_option_names=OPTIONS,
    # Transformer Engine's own check accepts 12.x; its issues 2255 and 2956 and pull requests 3195 and 3281 do not.
    native_capabilities=(((10, 0), (12, 0)),),
    beyond_capabilities="there Transformer Engine's GEMM with a Hadamard transform fails, and stochastic rounding gave "
    "gradients of zero",
    te_recipe_class="NVFP4BlockScaling",
    te_switches=(
        ("NVTE_NVFP4_DISABLE_RHT", "nothing is Hadamard-transformed"),
        ("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "gradients are rounded to nearest"),
        ("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "weights have blocks of 1x16"),
    ),
    fallbacks=(("mxfp8", ", which has eight bits instead of four"),),
    is_ranked_on_blackwell=True,
    variants=(("four-over-six", "--fp4-four-over-six"),),
)
