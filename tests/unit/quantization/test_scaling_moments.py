"""Scales of moments: a moment read from a checkpoint is stored again with the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.quantization.scaling import MIN_MOMENT_SCALE, MOMENT_FORMAT_MAX, moment_dequant_scale

CASTS = {torch.uint8: torch.float8_e4m3fn, torch.float16: torch.float16}


def stored(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tensors of values [tensors, values], and their factors. FP8's is the inverse of the inverse."""
    scale = moment_dequant_scale(values.abs().amax(dim=1, keepdim=True), MOMENT_FORMAT_MAX[dtype])
    return (values * (1 / scale)).to(CASTS[dtype]), 1 / (1 / scale) if dtype == torch.uint8 else scale


@pytest.mark.parametrize("dtype", CASTS)
def test_moments_read_and_stored_are_bit_equal(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20_000, 16, generator=generator) * 10 ** (40 * torch.rand(20_000, 1, generator=generator) - 25)
    codes, scale = stored(values, dtype)
    again, scale_again = stored(codes.float() * scale, dtype)
    assert torch.equal(scale_again, scale)
    assert torch.equal(again.float(), codes.float())
    assert (codes.float().abs().amax(dim=1) == MOMENT_FORMAT_MAX[dtype]).all()


@pytest.mark.parametrize("largest", [1e-45, 1e-38, 3.0, 448.0, 3e38])
@pytest.mark.parametrize("dtype", CASTS)
def test_scale_is_largest_over_the_formats(dtype: torch.dtype, largest: float) -> None:
    scale = moment_dequant_scale(torch.tensor([largest]), MOMENT_FORMAT_MAX[dtype])
    expected = torch.tensor([max(largest / MOMENT_FORMAT_MAX[dtype], MIN_MOMENT_SCALE)])
    torch.testing.assert_close(scale, expected, rtol=2**-20, atol=0)


@pytest.mark.parametrize("dtype", CASTS)
def test_no_scale_is_zero_nor_its_inverse_infinite(dtype: torch.dtype) -> None:
    codes, scale = stored(torch.zeros(1, 8), dtype)
    assert scale.item() == MIN_MOMENT_SCALE and torch.isfinite(1 / scale).all()
    assert not codes.float().any()


@pytest.mark.parametrize("bits", [0x7F800000, 0x7FC00000, 0x7FFFFFFF])
def test_nonfinite_moments_stay_nonfinite(bits: int) -> None:
    """Infinity, a CPU's NaN, and a GPU's NaN."""
    largest = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert moment_dequant_scale(largest, MOMENT_FORMAT_MAX[torch.uint8]).item() == torch.inf
