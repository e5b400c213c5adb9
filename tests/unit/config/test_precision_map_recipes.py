"""Recipes are built from the precision section, and describe themselves."""

import copy
import pickle

import pytest

from megafp8.config.precision_map import build_recipe
from megafp8.config.schema import PrecisionConfig
from megafp8.errors import ConfigError
from megafp8.recipes import registry
from megafp8.recipes.base import DelayedOptions, Gemm, Operand, ScaleRule
from megafp8.recipes.description import describe
from megafp8.recipes.formats import E2M1, E4M3, E5M2, Format


def test_without_a_format_there_is_no_recipe() -> None:
    assert build_recipe(PrecisionConfig()) is None


@pytest.mark.parametrize("fp8_format, backward", [("hybrid", E5M2), ("e4m3", E4M3)])
def test_tensorwise_formats(fp8_format: str, backward: object) -> None:
    recipe = build_recipe(PrecisionConfig(fp8_format=fp8_format, fp8_recipe="tensorwise"))
    for operand, gemm, rule in recipe.rules:
        assert rule.format is (backward if operand is Operand.GRAD_OUTPUT else E4M3), (operand, gemm)
        assert rule.scale_rule is ScaleRule.FP32
    assert len(recipe.rules) == 6


def test_tensorwise_options() -> None:
    precision = PrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise", fp8_power_2_scale=True, fp8_wgrad=False)
    recipe = build_recipe(precision)
    assert recipe.rule(Operand.INPUT, Gemm.FPROP).scale_rule is ScaleRule.POWER_OF_TWO
    assert [recipe.is_quantized(gemm) for gemm in Gemm] == [True, True, False]
    assert recipe.rule(Operand.GRAD_OUTPUT, Gemm.WGRAD) is None


def test_an_unknown_recipe_raises_and_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'float8' is not a recipe; recipes: tensorwise, delayed"):
        build_recipe(PrecisionConfig(fp8_format="hybrid", fp8_recipe="float8"))


@pytest.mark.parametrize("name", registry.names("fp8"))
@pytest.mark.parametrize(
    "fp8_format, forward, backward", [("e4m3", E4M3, E4M3), ("hybrid", E4M3, E5M2), ("e5m2", E5M2, E5M2)]
)
def test_every_recipe_has_every_format(name: str, fp8_format: str, forward: Format, backward: Format) -> None:
    recipe = build_recipe(PrecisionConfig(fp8_format=fp8_format, fp8_recipe=name))
    assert recipe.name == name
    for operand, _, rule in recipe.rules:
        assert rule.format is (backward if operand is Operand.GRAD_OUTPUT else forward)


@pytest.mark.parametrize(
    "name, length, squares", [("blockwise", 128, True), ("mxfp8", 32, False)], ids=["blockwise", "mxfp8"]
)
def test_blocks_lie_along_the_sum(name: str, length: int, squares: bool) -> None:
    recipe = build_recipe(PrecisionConfig(fp8_format="e4m3", fp8_recipe=name))
    row, column = (1, length), (length, 1)
    assert recipe.rule(Operand.INPUT, Gemm.FPROP).block == row
    assert recipe.rule(Operand.GRAD_OUTPUT, Gemm.DGRAD).block == row
    assert recipe.rule(Operand.INPUT, Gemm.WGRAD).block == recipe.rule(Operand.GRAD_OUTPUT, Gemm.WGRAD).block == column
    assert recipe.rule(Operand.WEIGHT, Gemm.FPROP).block == ((length, length) if squares else row)
    assert recipe.rule(Operand.WEIGHT, Gemm.DGRAD).block == ((length, length) if squares else column)


def test_nvfp4() -> None:
    recipe = build_recipe(PrecisionConfig(fp4_format="e2m1"))
    assert {rule.format for *_, rule in recipe.rules} == {E2M1}
    assert {rule.scale_rule for *_, rule in recipe.rules} == {ScaleRule.TWO_LEVEL}
    for operand, gemm, rule in recipe.rules:
        assert rule.is_transformed == (gemm is Gemm.WGRAD)
        assert rule.is_stochastic == (operand is Operand.GRAD_OUTPUT)
        assert (rule.block == (16, 16)) == (operand is Operand.WEIGHT)
    assert recipe.is_stochastic
    plain = build_recipe(
        PrecisionConfig(fp4_format="e2m1", fp4_hadamard=False, fp4_stochastic_rounding=False, fp4_2d_weights=False)
    )
    assert not any(rule.is_transformed or rule.is_stochastic for *_, rule in plain.rules)
    assert plain.rule(Operand.WEIGHT, Gemm.DGRAD).block == (16, 1)


def test_blockwise_scales() -> None:
    for requested, scale_rule in ((False, ScaleRule.POWER_OF_TWO), (True, ScaleRule.FP32)):
        precision = PrecisionConfig(fp8_format="e4m3", fp8_recipe="blockwise", fp8_block_scaling_fp32_scales=requested)
        assert {rule.scale_rule for *_, rule in build_recipe(precision).rules} == {scale_rule}


def test_delayed_options_have_megatrons_defaults() -> None:
    recipe = build_recipe(PrecisionConfig(fp8_format="hybrid"))
    assert recipe.delayed == DelayedOptions(history_len=1, algorithm="most_recent", margin=0)
    precision = PrecisionConfig(
        fp8_format="hybrid", fp8_amax_history_len=8, fp8_amax_compute_algo="max", fp8_margin=2, tp_only_amax_red=True
    )
    assert build_recipe(precision).delayed == DelayedOptions(
        history_len=8, algorithm="max", margin=2, is_reduced_over_data=False
    )


def test_rule_of_an_operand_that_a_gemm_does_not_have() -> None:
    recipe = build_recipe(PrecisionConfig(fp8_format="e4m3", fp8_recipe="tensorwise"))
    with pytest.raises(KeyError, match="weight is no operand of wgrad"):
        recipe.rule(Operand.WEIGHT, Gemm.WGRAD)


def test_recipe_survives_copy_and_pickle() -> None:
    """It is part of layer specs, which are copied."""
    recipe = build_recipe(PrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise"))
    assert copy.deepcopy(recipe) == recipe == pickle.loads(pickle.dumps(recipe))
    assert hash(recipe) == hash(pickle.loads(pickle.dumps(recipe)))


def test_description() -> None:
    recipe = build_recipe(PrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise", fp8_wgrad=False))
    assert describe(recipe) == [
        ("fprop", "input e4m3 x weight e4m3", "tensor", "fp32", True),
        ("dgrad", "grad_output e5m2 x weight e4m3", "tensor", "fp32", True),
        ("wgrad", "grad_output x input", "high precision", "-", False),
    ]
    assert not any(row.is_quantized for row in describe(None))


def test_description_of_blocks() -> None:
    recipe = build_recipe(PrecisionConfig(fp8_format="hybrid", fp8_recipe="blockwise"))
    assert [row.granularity for row in describe(recipe)] == ["1x128 x 128x128", "1x128 x 128x128", "1x128"]
    assert {row.scale for row in describe(recipe)} == {"power of two"}
