"""A linear whose GEMMs have different recipes: each GEMM is bitwise that of its own recipe."""

import pytest
import torch
from test_linear import tensors
from torch import Tensor

from megafp8.config.precision_map import GemmChoice, LinearChoice, build_linear_recipe
from megafp8.config.schema import PrecisionConfig
from megafp8.quantization.delayed_scaling import DelayedScale, DelayedScales
from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan
from megafp8.quantization.nvfp4 import RoundingNoise
from megafp8.recipes.base import UNQUANTIZED, Gemm, LinearRecipe, Operand

# Power-of-two scales of mxfp8 and blockwise would give the same codes in one format.
CHOICES = (
    GemmChoice("tensorwise", "hybrid"), GemmChoice("mxfp8", "e4m3"), GemmChoice(), GemmChoice("delayed", "e4m3"),
    GemmChoice("blockwise", "hybrid"), GemmChoice("nvfp4", "e2m1"),
)  # fmt: skip
SCALES = {Operand.INPUT: 3.0, Operand.WEIGHT: 40.0, Operand.GRAD_OUTPUT: 5.0}
TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def recipe_of(*choices: GemmChoice) -> LinearRecipe | None:
    chosen = LinearChoice(*(choices * 3 if len(choices) == 1 else choices))
    return build_linear_recipe(PrecisionConfig(), chosen)


def run(recipe: LinearRecipe | None, dtype: torch.dtype) -> dict[Gemm, Tensor]:
    """The results of the three GEMMs. None is the plain linear. Random draws restart."""
    x, w, b, dy = tensors(dtype)
    if recipe is None:
        y = torch.matmul(x, w.t()) + b
    else:
        noted = {operand: torch.zeros(()) for operand in Operand}
        scales = (DelayedScale(torch.tensor(SCALES[operand]), noted[operand]) for operand in Operand)
        noise = RoundingNoise("mixed") if recipe.is_stochastic else None
        y = emulated_linear(x, w, b, LinearPlan(recipe=recipe, delayed=DelayedScales(*scales), noise=noise))
    y.backward(dy)
    assert b.grad is not None
    return {Gemm.FPROP: y.detach(), Gemm.DGRAD: x.grad, Gemm.WGRAD: w.grad}


@TYPES
@pytest.mark.parametrize("first", range(len(CHOICES)))
def test_each_gemm_uses_its_own_recipe(first: int, dtype: torch.dtype) -> None:
    choices = [CHOICES[(first + index) % len(CHOICES)] for index in range(3)]
    mixed = run(recipe_of(*choices), dtype)
    for gemm, choice in zip(Gemm, choices, strict=True):
        # nvfp4 draws for grad_output once per GEMM: with it in wgrad alone, the draw is the first.
        alone = [GemmChoice(), GemmChoice(), choice] if choice.recipe == "nvfp4" and gemm is Gemm.WGRAD else [choice]
        own = run(recipe_of(*alone), dtype)[gemm]
        assert torch.equal(mixed[gemm], own), (gemm, choice)


@TYPES
def test_high_precision_for_all_is_the_plain_linear(dtype: torch.dtype) -> None:
    ours, plain = run(UNQUANTIZED, dtype), run(None, dtype)
    for gemm in Gemm:
        assert torch.equal(ours[gemm], plain[gemm]), gemm


def test_recipes_differ_so_that_the_comparison_can_fail() -> None:
    results = [run(recipe_of(choice), torch.bfloat16) for choice in CHOICES]
    for gemm in Gemm:
        assert len({result[gemm].float().sum().item() for result in results}) == len(CHOICES), gemm


def test_the_high_precision_copy_is_kept_only_where_wgrad_needs_it() -> None:
    """fprop in BF16 and wgrad in FP8: codes of the input are saved."""
    x, w, _, _ = tensors(torch.bfloat16)
    y = emulated_linear(
        x, w, None, LinearPlan(recipe=recipe_of(GemmChoice(), GemmChoice(), GemmChoice("tensorwise", "e4m3")))
    )
    kinds = {tensor.dtype for tensor in y.grad_fn.saved_tensors if tensor is not None and tensor.numel() > 1}
    assert kinds == {torch.float8_e4m3fn}


def test_names_of_mixed_recipes() -> None:
    assert recipe_of(CHOICES[0]).name == "tensorwise"
    assert recipe_of(CHOICES[0], GemmChoice(), GemmChoice()).name == "tensorwise/high/high"
    assert recipe_of(GemmChoice()) is None
