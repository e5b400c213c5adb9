"""Casts and SwiGLU into FP8 by a given scale, against torch operations: every code, the amax and the scale.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

import interpreter
import pytest
import torch
from interpreter import DEVICE
from swiglu_reference import swiglu_with_gradient
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.kernels import delayed
from megafp8.kernels.delayed import DelayedOutput
from megafp8.kernels.rounding import format_spec
from megafp8.quantization.rounding import cast
from megafp8.recipes.formats import E4M3, E5M2, Format

pytestmark = pytest.mark.usefixtures("exact")

TOKENS, WIDTH = 128, 256
SCALE = 48.0  # of which the largest results saturate
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


def drawn(tokens: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def empty_codes(tokens: int, width: int, fmt: Format, sides: str = "rows columns", amax: float = 0.0) -> DelayedOutput:
    return DelayedOutput(
        rows=torch.zeros(tokens, width, dtype=torch.uint8, device=DEVICE) if "rows" in sides else None,
        columns=torch.zeros(width, tokens, dtype=torch.uint8, device=DEVICE) if "columns" in sides else None,
        scale=torch.tensor([SCALE], device=DEVICE),
        amax=torch.tensor([amax], device=DEVICE),
        scale_inv=torch.zeros(1, device=DEVICE),
        spec=format_spec(fmt),
    )


def check_codes(codes: DelayedOutput, values: Tensor, fmt: Format) -> None:
    assert torch.equal(codes.rows, cast(values * SCALE, fmt).view(torch.uint8))
    assert torch.equal(codes.columns, codes.rows.t())
    assert torch.equal(codes.amax, values.abs().amax().reshape(1))
    assert torch.equal(codes.scale_inv, 1 / codes.scale)


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@FORMATS
@DTYPES
def test_a_cast(dtype: torch.dtype, fmt: Format) -> None:
    """Values from below the format's range to saturation, and zeros."""
    inputs = drawn(TOKENS, WIDTH).float() * torch.logspace(-6, 2, WIDTH, device=DEVICE)
    inputs[: TOKENS // 2, : WIDTH // 2] = 0
    codes = empty_codes(TOKENS, WIDTH, fmt)
    delayed.cast(inputs.to(dtype), codes)
    check_codes(codes, inputs.to(dtype).float(), fmt)


@FORMATS
@DTYPES
def test_forward_and_backward_where_the_sigmoid_is_exact(dtype: torch.dtype, fmt: Format) -> None:
    """At 0 the sigmoid is 1/2, and 1 from 64 on, so torch's products equal the kernels' bitwise. They are recorded and
    scaled in FP32, without rounding to the inputs' type."""
    gates = torch.randint(0, 128, (TOKENS, WIDTH), generator=torch.Generator().manual_seed(2)).float()
    gates = gates.where(gates >= 64, 0.0).to(DEVICE)
    inputs = torch.cat([gates, drawn(TOKENS, WIDTH, 3).float()], dim=1).to(dtype)
    gradients = drawn(TOKENS, WIDTH, 4).to(dtype)
    a, b = (x.float() for x in inputs.chunk(2, dim=1))
    s, dy = torch.sigmoid(a), gradients.float()
    forward, backward = empty_codes(TOKENS, WIDTH, fmt), empty_codes(TOKENS, 2 * WIDTH, fmt)
    delayed.swiglu(inputs, forward)
    check_codes(forward, a * s * b, fmt)
    delayed.swiglu_backward(gradients, inputs, backward)
    check_codes(backward, torch.cat([(a * (s * (1 - s)) + s) * dy * b, a * s * dy], dim=1), fmt)


def test_forward_and_backward_against_the_formula() -> None:
    """Within 0.5 steps of E4M3, FP32's rounding, and 0.5 of the smallest step."""
    inputs, gradients = drawn(TOKENS, 2 * WIDTH, 5), drawn(TOKENS, WIDTH, 6)
    result, gradient = swiglu_with_gradient(inputs, gradients)
    forward, backward = empty_codes(TOKENS, WIDTH, E4M3), empty_codes(TOKENS, 2 * WIDTH, E4M3)
    delayed.swiglu(inputs, forward)
    delayed.swiglu_backward(gradients, inputs, backward)
    for codes, values in ((forward, result), (backward, gradient)):
        scaled = (values * SCALE).clamp(-448, 448)
        error = (codes.rows.view(torch.float8_e4m3fn).double() - scaled).abs()
        assert (error <= 1.001 * (scaled.abs() * 2**-4).clamp(min=2**-10) + 2e-5).all()
        torch.testing.assert_close(codes.amax.double(), values.abs().amax().reshape(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("side", ["rows", "columns"])
def test_amax_never_decreases_and_a_copy_can_be_omitted(side: str) -> None:
    inputs = drawn(TOKENS, 2 * WIDTH)
    whole, own = empty_codes(TOKENS, WIDTH, E4M3), empty_codes(TOKENS, WIDTH, E4M3, side, amax=99.0)
    delayed.swiglu(inputs, whole)
    delayed.swiglu(inputs, own)
    assert torch.equal(getattr(own, side), getattr(whole, side)) and own.amax.item() == 99.0
