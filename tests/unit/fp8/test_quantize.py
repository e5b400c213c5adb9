"""Quantize and dequantize: shapes, the blocked path, error bound."""

import pytest
import torch

from megafp8.fp8 import quantize as module
from megafp8.fp8.formats import E4M3, E5M2, Format
from megafp8.fp8.quantize import dequantize, quantize
from megafp8.fp8.recipes import OperandRule

RULE = OperandRule(format=E4M3)


@pytest.mark.parametrize("shape", [(0,), (0, 16), (1,), (3, 5, 7), ()])
def test_shape_is_kept(shape: tuple[int, ...]) -> None:
    quantized = quantize(torch.ones(shape), RULE)
    assert quantized.codes.shape == shape
    assert quantized.codes.dtype == torch.float8_e4m3fn
    assert quantized.dequant_scale.shape == ()
    assert dequantize(quantized).shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors_take_blocks_to_the_same_codes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(37, 50).to(dtype)
    whole = quantize(x, RULE)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 64)
    blocked = quantize(x, RULE)
    assert torch.equal(whole.codes.view(torch.uint8), blocked.codes.view(torch.uint8))
    transposed = quantize(x.t(), RULE)
    assert torch.equal(whole.codes.view(torch.uint8).t(), transposed.codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_input_is_left_alone(dtype: torch.dtype) -> None:
    x = torch.randn(8, 8).to(dtype) * 1e4
    before = x.clone()
    quantize(x, RULE)
    assert torch.equal(x, before)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_error_is_half_a_step(fmt: Format) -> None:
    x = torch.randn(64, 64)
    quantized = quantize(x, OperandRule(format=fmt))
    half_step = torch.maximum(
        x.abs() * 2.0 ** -(fmt.mantissa_bits + 1), fmt.min_subnormal / 2 * quantized.dequant_scale
    )
    assert ((dequantize(quantized) - x).abs() <= half_step * (1 + 1e-5)).all()
