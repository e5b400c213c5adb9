"""SwiGLU into FP8 against the formula in FP64.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/model`.
"""

from __future__ import annotations

import interpreter
import pytest
import torch
from interpreter import DEVICE
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.model.swiglu_kernel import swiglu, swiglu_backward  # noqa: E402

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Triton's interpreter rounds numbers just below a power of two to the power below.
FORMATS = (torch.float32, *FP8) if DEVICE == "cuda" else (torch.float32,)
# Half a step of the format, relative, and half its smallest step; of FP32, a few roundings on the way.
STEP = {torch.float32: 2**-20, torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}
SMALLEST = {torch.float32: 2**-20, torch.float8_e4m3fn: 2**-10, torch.float8_e5m2: 2**-17}
CANCELLED = 2e-5  # where FP32 terms of size 64 nearly cancel
ROUNDING = 1.001  # the tie may be decided by FP32's rounding
SIZES = ((130, 66), (64, 128))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def check(rows: Tensor, columns: Tensor, amax: Tensor, scale_inv: Tensor, expected: Tensor, scale: float) -> None:
    assert torch.equal(rows.float(), columns.float().t())
    largest = torch.finfo(rows.dtype).max
    scaled = (expected * scale).clamp(-largest, largest)
    error = (rows.double() - scaled).abs()
    allowed = ROUNDING * (scaled.abs() * STEP[rows.dtype]).clamp(min=SMALLEST[rows.dtype]) + CANCELLED
    assert (error <= allowed).all(), (error - allowed).max()
    torch.testing.assert_close(amax.double(), expected.abs().max().reshape(1), rtol=1e-5, atol=0)
    assert scale_inv.item() == 1 / scale


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_both_ways_against_the_formula(format: torch.dtype, tokens: int, width: int) -> None:
    """Also at sizes that no block divides; the largest results are beyond the format and saturate."""
    scale = 64.0
    inputs, gradients = drawn(tokens, 2 * width), drawn(tokens, width, seed=1)
    slow = inputs.double().requires_grad_()
    a, b = slow.chunk(2, dim=1)
    expected = torch.nn.functional.silu(a) * b
    expected.backward(gradients.double())
    given = torch.tensor([scale], device=DEVICE)

    def results(columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        empty = torch.zeros(tokens, columns, device=DEVICE)
        amax, scale_inv = torch.zeros(2, 1, device=DEVICE)
        return empty.to(format), empty.t().contiguous().to(format), given, amax, scale_inv

    rows, columns, _, amax, scale_inv = forward = results(width)
    swiglu(inputs, *forward)
    check(rows, columns, amax, scale_inv, expected.detach(), scale)
    rows, columns, _, amax, scale_inv = backward = results(2 * width)
    swiglu_backward(gradients, inputs, *backward)
    check(rows, columns, amax, scale_inv, slow.grad, scale)


def test_amax_only_rises_and_the_transpose_can_be_left_out() -> None:
    inputs = drawn(64, 128)
    rows, amax, scale_inv = torch.zeros(64, 64, device=DEVICE), torch.full((1,), 99.0), torch.zeros(1)
    amax, scale_inv = amax.to(DEVICE), scale_inv.to(DEVICE)
    swiglu(inputs, rows, None, torch.ones(1, device=DEVICE), amax, scale_inv)
    assert amax.item() == 99.0 and rows.float().abs().max() > 0
