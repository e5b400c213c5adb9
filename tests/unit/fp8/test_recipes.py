"""Recipes are built from the precision section, and describe themselves."""

import copy
import pickle

import pytest

from megafp8.config.schema import PrecisionConfig
from megafp8.errors import CapabilityError
from megafp8.fp8.formats import E4M3, E5M2
from megafp8.fp8.recipes import Gemm, Operand, build_recipe, describe
from megafp8.fp8.scaling import ScaleRule


def test_no_format_is_no_recipe() -> None:
    assert build_recipe(PrecisionConfig()) is None


@pytest.mark.parametrize("fp8_format, backward", [("hybrid", E5M2), ("e4m3", E4M3)])
def test_tensorwise_formats(fp8_format: str, backward: object) -> None:
    recipe = build_recipe(PrecisionConfig(fp8_format=fp8_format, fp8_recipe="tensorwise"))
    for operand, gemm, rule in recipe.rules:
        assert rule.format is (backward if operand is Operand.GRAD_OUTPUT else E4M3), (operand, gemm)
        assert rule.scale_rule is ScaleRule.FP32
    assert len(recipe.rules) == 6


def test_tensorwise_options() -> None:
    precision = PrecisionConfig(
        fp8_format="hybrid", fp8_recipe="tensorwise", fp8_power_2_scale=True, fp8_wgrad=False
    )
    recipe = build_recipe(precision)
    assert recipe.rule(Operand.INPUT, Gemm.FPROP).scale_rule is ScaleRule.POWER_OF_TWO
    assert [recipe.is_quantized(gemm) for gemm in Gemm] == [True, True, False]
    assert recipe.rule(Operand.GRAD_OUTPUT, Gemm.WGRAD) is None


@pytest.mark.parametrize("name", ["delayed"])
def test_recipe_that_is_not_emulated_names_the_way_out(name: str) -> None:
    with pytest.raises(CapabilityError, match=f"--fp8-recipe {name} is not emulated.*tensorwise.*transformer_engine"):
        build_recipe(PrecisionConfig(fp8_format="hybrid", fp8_recipe=name))


def test_rule_of_an_operand_that_a_gemm_does_not_have() -> None:
    recipe = build_recipe(PrecisionConfig(fp8_format="e4m3", fp8_recipe="tensorwise"))
    with pytest.raises(KeyError, match="weight is no operand of wgrad"):
        recipe.rule(Operand.WEIGHT, Gemm.WGRAD)


def test_recipe_survives_copy_and_pickle() -> None:
    """It travels in layer specs, which get copied."""
    recipe = build_recipe(PrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise"))
    assert copy.deepcopy(recipe) == recipe == pickle.loads(pickle.dumps(recipe))
    assert hash(recipe) == hash(pickle.loads(pickle.dumps(recipe)))


def test_description() -> None:
    recipe = build_recipe(PrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise", fp8_wgrad=False))
    assert describe(recipe) == [
        ("fprop", "input e4m3 x weight e4m3", "tensor", "fp32"),
        ("dgrad", "grad_output e5m2 x weight e4m3", "tensor", "fp32"),
        ("wgrad", "grad_output x input", "high precision", "-"),
    ]
    assert {row.granularity for row in describe(None)} == {"high precision"}
