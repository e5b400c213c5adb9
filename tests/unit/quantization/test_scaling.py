"""Amax and scale of special values. tests/conformance compares the bytes with Transformer Engine."""

import math

import pytest
import torch

from megafp8.quantization.scaling import FP32_MAX, compute_amax, quant_scale_of
from megafp8.recipes.base import ScaleRule
from megafp8.recipes.formats import E4M3, E5M2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax_is_an_exact_fp32_scalar(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.5, -3.25], [1.0, 2.0]], dtype=dtype)
    assert compute_amax(x).dtype == torch.float32
    assert compute_amax(x).shape == ()
    assert compute_amax(x) == 3.25


@pytest.mark.parametrize(
    "values, expected",
    [
        ([1.0, math.nan, -2.0], 2.0),
        ([math.nan, -math.inf], math.inf),
        ([math.nan, math.nan], 0.0),
        ([-0.0, -0.0], 0.0),
        ([], 0.0),
    ],
)
def test_amax_of_special_values(values: list[float], expected: float) -> None:
    found = compute_amax(torch.tensor(values))
    assert found == expected
    assert not found.signbit()


def test_amax_does_not_change_its_argument() -> None:
    x = torch.tensor([math.nan, -1.0])
    compute_amax(x)
    assert x[0].isnan()
    assert x[1] == -1.0


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize(
    "largest, expected", [(0.0, 1.0), (math.inf, 1.0), (math.nan, 1.0), (1e-40, FP32_MAX), (2.0, None)]
)
def test_quant_scale(fmt: object, largest: float, expected: float) -> None:
    scale = quant_scale_of(torch.tensor(largest), fmt, ScaleRule.FP32)
    assert scale == (fmt.max / 2 if expected is None else expected)


def test_power_of_two_scale_is_rounded_down() -> None:
    scales = quant_scale_of(torch.tensor([1.0, 7.0, 1e-40, 0.0]), E4M3, ScaleRule.POWER_OF_TWO)
    assert scales.tolist() == [256.0, 64.0, 2.0**127, 1.0]


def test_overflow_value_is_an_argument() -> None:
    assert quant_scale_of(torch.tensor(1e-40), E4M3, ScaleRule.FP32, on_overflow=65504.0) == 65504.0
