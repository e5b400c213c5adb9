"""Casts of experts with a scale for each row, and for each column of an expert, against emulated linears: every bit.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence

import interpreter
import pytest
import torch
from interpreter import DEVICE
from torch import Tensor

interpreter.skip_without_kernels()

from test_expert_casts import (
    EXPERTS,
    ROUTINGS,
    SPEC,
    TOKENS,
    WIDTH,
    by_expert,
    check_flags,
    drawn,
    live,
    routed,
    weighted_swiglu,
)

from megafp8.kernels import expert_casts, expert_rowwise
from megafp8.kernels.expert_scales import RowColumnCodes
from megafp8.kernels.routed_rows import RoutedRows, values_of_rows
from megafp8.quantization.quantize import quantize_by_torch
from megafp8.recipes import registry
from megafp8.recipes.base import Gemm, Operand

pytestmark = pytest.mark.usefixtures("exact")

RULES = registry.get("rowwise").rules("e4m3")


def expected(values: Sequence[Tensor], operand: Operand, gemm: Gemm) -> tuple[list[Tensor], list[Tensor]]:
    """Codes and dequantization scales of each expert's values, as emulated linears make them for a GEMM."""
    rule = RULES.rule(operand, gemm)
    assert rule is not None
    found = [quantize_by_torch(each, rule.for_shape((each.shape[0], each.shape[1]))) for each in values]
    return [each.codes.view(torch.uint8) for each in found], [each.dequant_scale.view(-1) for each in found]


def check(found: RowColumnCodes, values: Sequence[Tensor], rows: RoutedRows, others: float = 0.0) -> None:
    """All codes and scales of rows in use, up to a fraction of codes that may be others."""
    for operand, gemm in ((Operand.INPUT, Gemm.FPROP), (Operand.GRAD_OUTPUT, Gemm.DGRAD)):
        codes, scales = expected(values, operand, gemm)
        assert (found.rows[live(rows)] != torch.cat(codes)).float().mean() <= others
        assert torch.equal(found.row_scale_inv[live(rows)], torch.cat(scales))
    for operand in (Operand.INPUT, Operand.GRAD_OUTPUT):
        codes, scales = expected(values, operand, Gemm.WGRAD)
        assert (found.columns[:, live(rows)].t() != torch.cat(codes)).float().mean() <= others
        for of_expert, of_columns in zip(found.column_scale_inv, scales, strict=True):
            assert torch.equal(of_expert, of_columns if len(of_columns) else torch.ones_like(of_expert))


@pytest.mark.parametrize("kind", ROUTINGS)
def test_gathered_tokens(kind: str) -> None:
    chosen, rows, _ = routed(kind)
    x = drawn(TOKENS, 2 * WIDTH) * torch.logspace(-3, 3, TOKENS, device=DEVICE).bfloat16()[:, None]
    x[3, 5], x[7, 6], x[9] = torch.nan, torch.inf, 0
    found = expert_rowwise.gather_codes(x, rows, chosen, SPEC)
    check(found, by_expert(expert_casts.gather(x, rows), rows), rows)


def test_weights() -> None:
    weights = drawn(EXPERTS, 256, WIDTH) * torch.logspace(-2, 2, 256, device=DEVICE).bfloat16()[:, None]
    weights[1, 2, 3], weights[2, 4, 5], weights[3, :, 7] = torch.nan, -torch.inf, 0
    found = expert_rowwise.weight_codes(weights, SPEC)
    codes, scales = expected(list(weights), Operand.WEIGHT, Gemm.FPROP)
    assert torch.equal(found.rows, torch.stack(codes)) and torch.equal(found.row_scale_inv, torch.stack(scales))
    codes, scales = expected(list(weights), Operand.WEIGHT, Gemm.DGRAD)
    assert torch.equal(found.columns.transpose(1, 2), torch.stack(codes))
    assert torch.equal(found.column_scale_inv, torch.stack(scales))


@pytest.mark.parametrize("kind", ROUTINGS)
def test_weighted_swiglu_and_its_gradients(kind: str) -> None:
    """Rows behind the last expert's raise no amax. Results are not rounded to BF16 before the cast."""
    _, rows, probs = routed(kind)
    p = values_of_rows(probs, rows)
    h, dy = drawn(len(p), 2 * WIDTH), drawn(len(p), WIDTH, seed=1)
    h[int(rows.ends[-1]) :] = 1e30
    y, h_grad, p_grad = weighted_swiglu(h, p, dy)
    codes = expert_rowwise.swiglu_codes(h, p, rows, SPEC)
    gradient_codes, dp = expert_rowwise.swiglu_backward_codes(dy, h, p, rows, SPEC)
    torch.testing.assert_close(dp[live(rows)], p_grad[live(rows)], rtol=1e-5, atol=1e-4)
    # A value next to the middle of two codes may be rounded to either.
    check(codes, by_expert(y, rows), rows, others=2e-3)
    check(gradient_codes, by_expert(h_grad, rows), rows, others=2e-3)


def test_infinite_amaxes_are_flagged() -> None:
    check_flags(expert_rowwise, torch.int64)
