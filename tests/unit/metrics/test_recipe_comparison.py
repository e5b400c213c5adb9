"""The effect of recipes on tensors with known errors."""

from __future__ import annotations

import pytest
import torch

from megafp8.errors import DataError
from megafp8.metrics.recipe_comparison import (
    BOTH,
    FORMATS,
    QuantizationResult,
    element_scales,
    inspect_tensor,
    recipe_rules,
    sample_distribution,
)
from megafp8.quantization.quantize import quantize
from megafp8.recipes import registry
from megafp8.recipes.base import Operand

ONE_SCALE = ("tensorwise", "delayed")
RECIPES, FP8_RECIPES = registry.names(), registry.names("fp8")


def found(
    source: str, operand: Operand = Operand.INPUT, ratio: float = 1.0
) -> dict[tuple[str, str, str], QuantizationResult]:
    results = inspect_tensor(source, sample_distribution(source), operand, RECIPES, FORMATS, ratio)
    return {(each.recipe, each.format, each.orientation): each for each in results}


@pytest.fixture(scope="module")
def normal() -> dict[tuple[str, str, str], QuantizationResult]:
    return found("normal:512x512")


@pytest.mark.parametrize(
    ("recipe", "fmt", "sqnr_db"),
    [("tensorwise", "e4m3", 31.55), ("tensorwise", "e5m2", 25.57), ("blockwise", "e4m3", 31.49),
     ("mxfp8", "e4m3", 31.49), ("nvfp4", "e2m1", 20.44)],
)  # fmt: skip
def test_known_error_of_normal_numbers(normal, recipe: str, fmt: str, sqnr_db: float) -> None:
    """Figures of an independent computation on large tensors."""
    results = [each for (name, form, _), each in normal.items() if (name, form) == (recipe, fmt)]
    assert results
    for each in results:
        assert each.stats.sqnr_db == pytest.approx(sqnr_db, abs=0.03)
        # Only a scale that is rounded to E4M3 can be too small.
        assert (each.stats.saturated_fraction == 0) == (recipe != "nvfp4")


def test_delayed_with_the_tensor_in_its_history_is_tensorwise(normal) -> None:
    for fmt in FORMATS:
        assert normal["delayed", fmt, BOTH].stats == normal["tensorwise", fmt, BOTH].stats


def test_every_recipe_format_and_direction_appears_once(normal) -> None:
    assert set(normal) == {
        (recipe, fmt, along)
        for recipe in RECIPES
        for fmt in (FORMATS if recipe in FP8_RECIPES else ("e2m1",))
        for along in ((BOTH,) if recipe in ONE_SCALE else ("row", "column"))
    }


def test_block_scales_are_better_with_outliers() -> None:
    results = found("outliers:256x1024")
    tensorwise = results["tensorwise", "e4m3", BOTH].stats
    for recipe in ("blockwise", "mxfp8"):
        for along in ("row", "column"):
            blocks = results[recipe, "e4m3", along].stats
            assert blocks.local_sqnr_db > tensorwise.local_sqnr_db + 4
            assert blocks.underflow_fraction < tensorwise.underflow_fraction / 10
            assert blocks.scale_spread_octaves > 10
    assert tensorwise.scale_spread_octaves == 0


def test_smaller_blocks_contain_an_outlier_better() -> None:
    results = found("outliers:256x1024")
    fractions = [
        results[recipe, "e4m3", along].stats.underflow_fraction
        for recipe, along in (("tensorwise", BOTH), ("blockwise", "row"), ("mxfp8", "row"))
    ]
    assert fractions == sorted(fractions, reverse=True)
    assert len(set(fractions)) == 3


def test_a_tensor_that_has_grown_saturates_under_delayed_scaling() -> None:
    results = found("normal:128x256", ratio=0.5)
    stats, unaware = results["delayed", "e4m3", BOTH].stats, results["tensorwise", "e4m3", BOTH].stats
    values = sample_distribution("normal:128x256").abs()
    assert stats.saturated_fraction == pytest.approx((values > values.max() / 2).double().mean().item())
    assert unaware.saturated_fraction == 0
    assert stats.scale_max == pytest.approx(unaware.scale_max / 2)


def test_nvfp4_is_compared_with_all_its_options() -> None:
    tensor = sample_distribution("outliers:64x64:100")
    row, column = inspect_tensor("x", tensor, Operand.GRAD_OUTPUT, ["nvfp4"], FORMATS)
    assert (row.orientation, row.extras) == ("row", "stochastic rounding")
    assert (column.orientation, column.extras) == ("column", "Hadamard and stochastic rounding")
    assert 15 < column.stats.sqnr_db < 20, "compared with the transformed values"
    nearest, _ = inspect_tensor("x", tensor, Operand.INPUT, ["nvfp4"], FORMATS)
    assert nearest.stats.sqnr_db > row.stats.sqnr_db + 2
    again, _ = inspect_tensor("x", tensor, Operand.GRAD_OUTPUT, ["nvfp4"], FORMATS)
    assert again == row


@pytest.mark.parametrize("shape", [(15, 16), (16, 15)])
def test_nvfp4_names_an_unsupported_shape(shape: tuple[int, int]) -> None:
    with pytest.raises(DataError, match="x has .* nvfp4 needs a multiple of 16 rows and an even number of columns"):
        inspect_tensor("x", torch.ones(shape), Operand.INPUT, RECIPES, FORMATS)


def test_scales_of_both_levels_are_applied() -> None:
    """Block amaxes 6 x 448 and 6: their scales are 448 times and 1 times the tensor's."""
    tensor = torch.zeros(16, 32)
    tensor[0, 0], tensor[0, 16] = 6 * 448, 6
    row, _ = inspect_tensor("x", tensor, Operand.INPUT, ["nvfp4"], FORMATS)
    assert (row.stats.scale_min, row.stats.scale_max) == (1, 448)
    assert row.stats.max_abs_error == 0


def test_weights_have_square_blocks() -> None:
    weight = found("normal:256x256", Operand.WEIGHT)
    assert weight["blockwise", "e4m3", BOTH].granularity == "128x128"
    assert weight["mxfp8", "e4m3", "column"].granularity == "1x32"


@pytest.mark.parametrize("operand", Operand)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_blocks_lie_along_the_named_dim(recipe: str, operand: Operand) -> None:
    rules = recipe_rules(recipe, "e4m3", operand)
    for orientation, rule in rules.items():
        if orientation != BOTH:
            assert rule.block is not None
            assert (rule.block[0] == 1) == (orientation == "row")


@pytest.mark.parametrize("shape", [(64, 96), (50, 70), (1, 1), (130, 33)])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_element_scales_are_those_of_the_blocks(recipe: str, shape: tuple[int, int]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).exp()
    for rule in recipe_rules(recipe, "e4m3", Operand.INPUT).values():
        quantized = quantize(tensor, rule)
        scales = element_scales(quantized)
        assert scales.shape == tensor.shape
        height, width = rule.block or shape
        blocks = quantized.dequant_scale.float().reshape(-(-shape[0] // height), -(-shape[1] // width))
        for row in range(0, shape[0], 13):
            for column in range(shape[1]):
                assert scales[row, column] == blocks[row // height, column // width]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_infinities_and_other_dims(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, 3, 40, dtype=dtype)
    for each in inspect_tensor("zeros", tensor, Operand.INPUT, FP8_RECIPES, FORMATS):
        assert each.stats.sqnr_db is None
        assert each.stats.num_values == 240
    tensor[1, 2, 3], tensor[0, 0, 0], tensor[0, 0, 1] = torch.inf, torch.nan, 1.0
    for each in inspect_tensor("bad", tensor, Operand.INPUT, FP8_RECIPES, FORMATS):
        assert each.stats.num_non_finite == 2
        assert each.stats.amax == 1
