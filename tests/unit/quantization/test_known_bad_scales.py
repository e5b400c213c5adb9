"""Scale rules that exist only as known-bad controls: MXFP8 rounded down, and tensorwise with a negative margin."""

from __future__ import annotations

import math

import pytest
import torch

from megafp8.metrics.accumulators import accumulate
from megafp8.metrics.tensor_table import QUANTIZATION_SUMS
from megafp8.quantization.quantize import dequantize, quantize
from megafp8.quantization.scaling import can_saturate, e8m0_scales
from megafp8.recipes import mxfp8, tensorwise
from megafp8.recipes.base import Gemm, Operand
from megafp8.recipes.formats import E4M3, E5M2, Format


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_floor_scales_are_those_of_the_ocp_specification(fmt: Format) -> None:
    amax = torch.tensor([1.0, 1.5, 1.76, 1.99, 2.0, 3e-5, 447.0, 449.0, 1e30])
    exponents = [math.floor(math.log2(value)) - math.floor(math.log2(fmt.max)) for value in amax.tolist()]
    scales = e8m0_scales(amax, fmt, is_floor=True)
    assert scales.dequant.float().tolist() == [2.0**exponent for exponent in exponents]
    torch.testing.assert_close(scales.quant * scales.dequant.float(), torch.ones_like(amax), rtol=0, atol=0)


def test_floor_scales_of_zero_and_infinity_stay_in_range() -> None:
    scales = e8m0_scales(torch.tensor([0.0, torch.inf]), E4M3, is_floor=True)
    assert scales.dequant.view(torch.uint8).tolist() == [0, 254]


def test_floor_scales_saturate_what_rounded_up_scales_keep() -> None:
    block = torch.full((32, 32), 1.9)  # 1.75 to 2 times a power of two saturates
    rules = [mxfp8.build("e4m3", fp8_e8m0_floor=floor).rule(Operand.INPUT, Gemm.FPROP) for floor in (False, True)]
    assert None not in rules
    up, floor = (dequantize(quantize(block, rule)) for rule in rules if rule is not None)
    assert (up - 1.9).abs().max() < 0.07
    assert floor.unique().tolist() == [1.75]


def test_a_negative_margin_saturates_values_above_its_share_of_the_amax() -> None:
    rule = tensorwise.build("e4m3", fp8_tensorwise_margin=-3).rule(Operand.INPUT, Gemm.FPROP)
    assert rule is not None and can_saturate(rule)
    values = torch.linspace(-8, 8, 4096).view(64, 64)
    quantized = quantize(values, rule)
    assert dequantize(quantized).abs().max() == 1  # an eighth of the amax
    num_saturated = accumulate(values, quantized, is_known=True).sums[QUANTIZATION_SUMS.index("saturated")]
    assert num_saturated.item() / values.numel() == pytest.approx(7 / 8, abs=0.03)
