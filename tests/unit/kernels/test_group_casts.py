"""Casts with an E8M0 scale for each group, and back, in one launch each, against torch operations: every bit.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

import interpreter
import pytest
import torch
from interpreter import DEVICE
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.kernels.group_casts import BLOCK_SIZE, cast_groups, decode_groups
from megafp8.kernels.rounding import format_spec
from megafp8.quantization.quantize import decode_values_by_torch, quantize_by_torch
from megafp8.recipes.base import OperandRule, ScaleRule
from megafp8.recipes.formats import E4M3, E5M2, Format

pytestmark = pytest.mark.usefixtures("exact")


def drawn(dtype: torch.dtype, width: int) -> Tensor:
    """Groups of very different size, with zeros and special values in some of them; the last program is not full."""
    x = torch.randn(5, 27, width, generator=torch.Generator().manual_seed(5))
    x *= torch.logspace(-30, 30, 27)[:, None]
    x[0, 3], x[1, 4, 5], x[2, 6, 7], x[3, 8, :16] = 0, torch.nan, -torch.inf, torch.nan
    x[4, 9, 3] = 3e38
    x[0, :, :16] = torch.tensor([2.0**power * 448 for power in range(-13, 14)])[:, None]  # amaxes that need no rounding
    assert x.numel() // 16 % BLOCK_SIZE
    return x.to(dtype).to(DEVICE)


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_scales_and_values(dtype: torch.dtype, fmt: Format, group: int) -> None:
    x = drawn(dtype, 64)
    codes, scales = cast_groups(x, format_spec(fmt), group)
    expected = quantize_by_torch(x, OperandRule(format=fmt, block=(1, group), scale_rule=ScaleRule.E8M0))
    assert torch.equal(codes, expected.codes.view(torch.uint8))
    assert torch.equal(scales, expected.dequant_scale.view(torch.uint8).view(-1))
    values = decode_groups(codes, scales, format_spec(fmt), group, dtype)
    torch.testing.assert_close(values, decode_values_by_torch(expected, dtype), rtol=0, atol=0, equal_nan=True)
