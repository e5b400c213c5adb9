"""The model of Hopper's FP8 units: its corner cases, and the tolerances that follow from it."""

import pytest
import torch
from golden import selected
from tensor_core import PROMOTED_AFTER, STEP, hopper_product
from tolerances import LINEAR_EQUAL_FRACTION, TENSOR_CORE_PEAK, TENSOR_CORE_RMS

from megafp8.quantization.quantize import quantize
from megafp8.quantization.rounding import decode
from megafp8.recipes.base import OperandRule
from megafp8.recipes.formats import E4M3, E5M2, Format


def product(
    a: list[float], b: list[float], formats: tuple[Format, Format] = (E4M3, E4M3), promoted_after: int | None = None
) -> float:
    """Of two rows, padded with zeros to 64."""
    rows = (torch.tensor([each + [0.0] * (64 - len(each))], dtype=torch.float64) for each in (a, b))
    return hopper_product(*rows, formats, promoted_after).item()


def test_short_sums_are_exact() -> None:
    a = torch.arange(-32, 32, dtype=torch.float64).view(2, 32)
    assert torch.equal(hopper_product(a, a, (E4M3, E5M2), None), (a @ a.t()).float())


def test_bits_far_below_the_largest_addend_are_truncated() -> None:
    tiny = 2.0**-7  # squared 2^-14
    assert product([1, tiny], [1, tiny]) == 1
    assert product([-1, -tiny], [1, tiny]) == -1
    assert product([1, 1.5 * tiny], [1, 1.5 * tiny]) == 1 + 2.0**-13


def test_fp32_keeps_bits_that_a_step_truncates() -> None:
    row = [1, *[0.0] * 31, 2.0**-7]
    assert product(row, row) == 1
    assert product(row, row, promoted_after=STEP) == 1 + 2.0**-14


def test_the_exponent_of_a_product_is_that_of_its_factors() -> None:
    """1.5 x 1.5 = 2.25 counts as 2^0 among the addends. The sum is cut by its own exponent, 1."""
    assert product([1.5, 2.0**-7], [1.5, 2.0**-6]) == 2.25
    assert product([1.5, 1, 2.0**-7], [1.5, -1, 2.0**-6]) == 1.25 + 2.0**-13


def test_subnormal_factors_have_the_exponent_of_the_smallest_normal() -> None:
    """Assumed: 2^-9 counts as 2^-6 in E4M3. 2^-20 is more than 13 places below it and is cut."""
    assert product([2.0**-9, 2.0**-6], [1, 2.0**-14], (E4M3, E5M2)) == 2.0**-9


RECORDED = selected()


@pytest.mark.parametrize("case", sorted({key.split("/")[1] for key in RECORDED if key.startswith("product/")}))
def test_sums_equal_an_h200(case: str) -> None:
    """In FP32, and in BF16 with a bias."""
    names = ("a", "b", "a_scale_inv", "b_scale_inv", "bias", "sums", "results")
    arrays = (torch.from_numpy(RECORDED[f"product/{case}/{each}"]) for each in names)
    a, b, a_scale, b_scale, bias, sums, results = arrays
    formats = (E5M2 if "e5m2" in case else E4M3, E4M3)
    a, b = (decode(codes, fmt, torch.float32).double() for codes, fmt in zip((a, b), formats, strict=True))
    promoted_after = None if "fast" in case else PROMOTED_AFTER
    if case.startswith("block"):
        scales = [each.repeat_interleave(128, dim=1) for each in (a_scale, b_scale)]
        found = hopper_product(a, b, formats, promoted_after, scales)
    else:
        found = hopper_product(a, b, formats, promoted_after) * (a_scale * b_scale)
    assert torch.equal(found, sums)
    assert torch.equal((found + bias).bfloat16(), results.bfloat16())


def operands(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of activations, whose columns differ in size, and of weights, as numbers."""
    generator = torch.Generator().manual_seed(length)
    columns = torch.exp2(4 * torch.rand(length, generator=generator))
    tensors = torch.randn(64, length, generator=generator) * columns, torch.randn(64, length, generator=generator)
    a, b = (decode(quantize(tensor, OperandRule(format=E4M3)).codes, E4M3, torch.float32) for tensor in tensors)
    return a.double(), b.double()


@pytest.mark.parametrize("gemm, promoted_after, lengths", [
    ("fprop", None, (512, 2048)), ("wgrad", PROMOTED_AFTER, (256, 512)),
])  # fmt: skip
def test_tolerances_follow_from_the_model(gemm: str, promoted_after: int | None, lengths: tuple[int, int]) -> None:
    for length in lengths:
        a, b = operands(length)
        exact, magnitude = a @ b.t(), a.abs() @ b.abs().t()
        found = hopper_product(a, b, (E4M3, E4M3), promoted_after)
        error = (found - exact) / magnitude
        rms, allowed = error.square().mean().sqrt(), TENSOR_CORE_RMS["tensorwise"][gemm]
        assert allowed / 2 < rms <= allowed
        assert error.abs().max() <= TENSOR_CORE_PEAK["tensorwise"][gemm]
        if length <= 512:
            assert (found.bfloat16() == exact.bfloat16()).double().mean() > LINEAR_EQUAL_FRACTION
