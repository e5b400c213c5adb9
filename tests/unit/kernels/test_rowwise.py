"""Casts with a scale per row and per column in two launches, against torch operations: every code and scale.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

import interpreter
import pytest
import torch
from interpreter import DEVICE
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.kernels import rowwise
from megafp8.kernels.rounding import format_spec
from megafp8.quantization.quantize import quantize_by_torch
from megafp8.recipes.base import OperandRule, ScaleRule
from megafp8.recipes.formats import E4M3, E5M2, Format

pytestmark = pytest.mark.usefixtures("exact")

TOKENS, WIDTH = 256, 384


def drawn(dtype: torch.dtype) -> Tensor:
    """Rows and columns of very different size, with special values in some of them."""
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))
    x *= torch.logspace(-5, 4, WIDTH) * torch.logspace(3, -3, TOKENS)[:, None]
    x[5], x[:, 7] = 0, 0
    x[9], x[:, 300] = x[9] * 1e-36, x[:, 300] * 1e-38
    x[40, 40], x[41] = torch.nan, torch.nan
    x[200, 130] = -torch.inf
    return x.to(dtype).to(DEVICE)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("scale_rule", [ScaleRule.POWER_OF_TWO, ScaleRule.FP32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_sets_of_codes(fmt: Format, scale_rule: ScaleRule, dtype: torch.dtype) -> None:
    x, num_non_finite = drawn(dtype), torch.ones((), dtype=torch.int64, device=DEVICE)
    rows, columns = rowwise.cast(
        x, format_spec(fmt), is_power_of_two=scale_rule is ScaleRule.POWER_OF_TWO, num_non_finite=num_non_finite
    )
    assert rows is not None and columns is not None
    assert num_non_finite.item() == 1 + torch.count_nonzero(~x.isfinite()).item() > WIDTH
    for block, found, codes in (((1, WIDTH), rows, rows.codes), ((TOKENS, 1), columns, columns.codes.t())):
        ours = quantize_by_torch(x, OperandRule(format=fmt, block=block, scale_rule=scale_rule))
        assert torch.equal(found.scale_inv, ours.dequant_scale.view(-1))
        assert torch.equal(codes, ours.codes.view(torch.uint8))


@pytest.mark.parametrize("side", ["rows", "columns"])
def test_one_set_of_codes_alone_is_the_same(side: str) -> None:
    x = drawn(torch.bfloat16)
    both = dict(zip(("rows", "columns"), rowwise.cast(x, format_spec(E4M3)), strict=True))
    alone = dict(zip(("rows", "columns"), rowwise.cast(
        x, format_spec(E4M3), rows=side == "rows", columns=side == "columns"
    ), strict=True))  # fmt: skip
    assert [name for name, found in alone.items() if found is not None] == [side]
    assert all(torch.equal(a, b) for a, b in zip(alone[side], both[side], strict=True))
