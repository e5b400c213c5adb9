"""Optimizer state that is rounded to what FP8 and FP16 codes with scales hold."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megafp8.optimizer.emulated_state import rounded_master, rounded_moment
from megafp8.quantization.scaling import master_dequant_scale, moment_dequant_scale

E4M3_MAX, FP16_RANGE = 448.0, 65504 / 2


def drawn(size: int = 4096, seed: int = 0) -> Tensor:
    """Values over twelve orders of magnitude, of both signs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * torch.logspace(-9, 3, size)


def nearest(value: float, mantissa_bits: int, min_exponent: int) -> float:
    """Nearest number with this many mantissa bits, ties to even, in FP64."""
    if value == 0:
        return 0.0
    spacing = 2.0 ** (max(math.frexp(value)[1] - 1, min_exponent) - mantissa_bits)
    return round(value / spacing) * spacing


@pytest.mark.parametrize(
    ("dtype", "largest", "mantissa_bits", "min_exponent"), [("fp8", E4M3_MAX, 3, -6), ("fp16", FP16_RANGE, 10, -14)]
)
def test_a_moment_is_a_code_times_the_scale_of_its_tensor(
    dtype: str, largest: float, mantissa_bits: int, min_exponent: int
) -> None:
    """Against Python's FP64, up to the rounding of FP32 products; and nothing saturates."""
    values = drawn()
    scale = float(values.abs().max()) / largest
    found = rounded_moment(values, dtype)
    expected = torch.tensor([nearest(value / scale, mantissa_bits, min_exponent) * scale for value in values.tolist()])
    # A quotient beside a tie may round the other way, to a neighbour.
    close = torch.isclose(found, expected, rtol=2**-18, atol=0.0)
    assert close.float().mean() > 0.999
    assert torch.allclose(found, expected, rtol=2.0**-mantissa_bits, atol=scale * 2.0 ** (min_exponent - mantissa_bits))
    assert found.abs().max() == pytest.approx(float(values.abs().max()), rel=2**-18)


def test_a_bf16_moment_is_rounded_without_a_scale() -> None:
    assert torch.equal(rounded_moment(drawn(), "bf16"), drawn().bfloat16().float())


@pytest.mark.parametrize("dtype", ["fp8", "fp16", "bf16", "master"])
def test_rounding_twice_changes_nothing(dtype: str) -> None:
    """So a state that is saved in FP32 and stored again is the same to the bit."""
    for seed in range(50):
        once = rounded_master(drawn(64, seed)) if dtype == "master" else rounded_moment(drawn(64, seed), dtype)
        again = rounded_master(once) if dtype == "master" else rounded_moment(once, dtype)
        assert torch.equal(once, again)


@pytest.mark.parametrize("dtype", ["fp8", "fp16", "bf16", "master"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_bad_values_stay_and_hide_nothing(dtype: str, bad: float) -> None:
    values = torch.tensor([1.0, bad, 0.25])
    found = rounded_master(values) if dtype == "master" else rounded_moment(values, dtype)
    assert torch.equal(found.isfinite(), values.isfinite())
    torch.testing.assert_close(found[[0, 2]], values[[0, 2]])


@pytest.mark.parametrize("size", [0, 3])
@pytest.mark.parametrize("dtype", ["fp8", "fp16", "bf16"])
def test_zeros_and_empty_shards_stay(dtype: str, size: int) -> None:
    zeros = torch.zeros(size)
    assert torch.equal(rounded_moment(zeros, dtype), zeros) and torch.equal(rounded_master(zeros), zeros)
    assert moment_dequant_scale(torch.zeros(()), FP16_RANGE).reciprocal().isfinite()


def test_a_master_weight_has_eleven_bits_below_a_power_of_two() -> None:
    values = drawn()
    exponent = math.frexp(float(values.abs().max()))[1] - 15
    expected = torch.tensor([nearest(value / 2.0**exponent, 10, -14) * 2.0**exponent for value in values.tolist()])
    assert torch.equal(rounded_master(values), expected)
    assert torch.equal(rounded_master(values.bfloat16().float())[-2048:], values.bfloat16().float()[-2048:])


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [(1.0, -14), (1.5, -14), (2.0, -13), (2 - 2**-10, -14), (2 - 2**-11, -13), (2.0**-126, -126), (2.0**127, 113)],
)
def test_the_scale_of_masters_is_a_power_of_two(amax: float, exponent: int) -> None:
    """A largest weight that FP16 rounds up to a power of two gets the scale of that power."""
    assert master_dequant_scale(torch.tensor(amax)).item() == 2.0**exponent
