"""Quantize and dequantize: shapes, the blocked path, error bound."""

import math
from dataclasses import replace

import pytest
import torch

from megafp8.quantization import quantize as module
from megafp8.quantization.quantize import dequantize, quantize
from megafp8.recipes.base import OperandRule, ScaleRule
from megafp8.recipes.formats import E2M1, E4M3, E5M2, Format

RULE = OperandRule(format=E4M3)
BLOCK_RULES = [
    OperandRule(format=E4M3, block=block, scale_rule=ScaleRule.POWER_OF_TWO)
    for block in ((1, 128), (128, 1), (128, 128), (1, 4), (4, 1))
]
BLOCK_RULES += [OperandRule(format=E4M3, block=block, scale_rule=ScaleRule.E8M0) for block in ((1, 32), (32, 1))]
FP4_RULES = [
    OperandRule(format=E2M1, block=block, scale_rule=ScaleRule.TWO_LEVEL) for block in ((1, 16), (16, 1), (16, 16))
]
each_rule = pytest.mark.parametrize("rule", [RULE, *BLOCK_RULES, *FP4_RULES], ids=str)


@pytest.mark.parametrize("shape", [(0,), (0, 16), (1,), (3, 5, 7), ()])
def test_shape_is_kept(shape: tuple[int, ...]) -> None:
    quantized = quantize(torch.ones(shape), RULE)
    assert quantized.codes.shape == shape
    assert quantized.codes.dtype == torch.float8_e4m3fn
    assert quantized.dequant_scale.shape == ()
    assert dequantize(quantized).shape == shape


@pytest.mark.parametrize("rule", BLOCK_RULES, ids=str)
@pytest.mark.parametrize("shape", [(0, 16), (1, 1), (3, 5, 7), (129, 257), (4, 64, 128)])
def test_shape_is_kept_in_blocks(shape: tuple[int, ...], rule: OperandRule) -> None:
    quantized = quantize(torch.ones(shape), rule)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    assert quantized.codes.shape == shape
    assert quantized.dequant_scale.shape == (math.ceil(rows / rule.block[0]), math.ceil(columns / rule.block[1]))
    assert torch.equal(dequantize(quantized), torch.ones(shape))


@each_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors_are_quantized_in_parts_with_equal_codes(
    dtype: torch.dtype, rule: OperandRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(300, 50).to(dtype)
    whole = quantize(x, rule)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 64)
    in_parts = quantize(x, rule)
    assert torch.equal(whole.codes.view(torch.uint8), in_parts.codes.view(torch.uint8))


@each_rule
def test_blocks_of_columns_are_those_of_the_transposed_tensor(rule: OperandRule) -> None:
    x = torch.randn(300, 50)
    turned = replace(rule, block=rule.block and rule.block[::-1])
    ours, theirs = quantize(x, rule), quantize(x.t(), turned)
    assert torch.equal(dequantize(ours).t(), dequantize(theirs))
    assert torch.equal(ours.dequant_scale.float().t(), theirs.dequant_scale.float())


@pytest.mark.parametrize("rule", BLOCK_RULES, ids=str)
def test_an_outlier_stays_in_its_block(rule: OperandRule) -> None:
    x = torch.randn(256, 256).clamp_(-2, 2)
    spoilt = x.clone()
    spoilt[200, 100] = 1e30
    plain, other = (dequantize(quantize(each, rule)) for each in (x, spoilt))
    row, column = (index // length * length for index, length in zip((200, 100), rule.block, strict=True))
    outside = torch.ones(256, 256, dtype=torch.bool)
    outside[row : row + rule.block[0], column : column + rule.block[1]] = False
    assert torch.equal(plain[outside], other[outside])
    assert other[200, 100] != 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_input_is_unchanged(dtype: torch.dtype) -> None:
    x = torch.randn(8, 8).to(dtype) * 1e4
    before = x.clone()
    quantize(x, RULE)
    assert torch.equal(x, before)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_error_is_at_most_half_a_quantization_step(fmt: Format) -> None:
    x = torch.randn(64, 64)
    quantized = quantize(x, OperandRule(format=fmt))
    half_step = torch.maximum(
        x.abs() * 2.0 ** -(fmt.mantissa_bits + 1), fmt.min_subnormal / 2 * quantized.dequant_scale
    )
    assert ((dequantize(quantized) - x).abs() <= half_step * (1 + 1e-5)).all()
