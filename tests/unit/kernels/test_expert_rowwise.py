"""Casts of experts with a scale for each row, and for each column of an expert, against emulated linears: every bit.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import interpreter
import pytest
import torch
from interpreter import DEVICE, IS_INTERPRETED
from torch import Tensor

interpreter.skip_without_kernels()

from test_expert_casts import EXPERTS, GRID, ROUTINGS, TOKENS, WIDTH, by_expert, drawn, live, routed

from megafp8.kernels import expert_casts, expert_rowwise
from megafp8.kernels.expert_rowwise import RowwiseCodes
from megafp8.kernels.expert_scales import CurrentScale
from megafp8.kernels.routed_rows import RoutedRows, values_of_rows
from megafp8.quantization.quantize import quantize_by_torch
from megafp8.recipes import registry
from megafp8.recipes.base import Gemm, Operand

RULES = registry.get("rowwise").rules("e4m3")


@pytest.fixture(autouse=IS_INTERPRETED)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.exact_bf16(monkeypatch)
    interpreter.constants_before_tensors(monkeypatch)


def expected(values: Sequence[Tensor], operand: Operand, gemm: Gemm) -> tuple[list[Tensor], list[Tensor]]:
    """Codes and dequantization scales of each expert's values, as emulated linears make them for a GEMM."""
    rule = RULES.rule(operand, gemm)
    assert rule is not None
    found = [quantize_by_torch(each, rule.for_shape((each.shape[0], each.shape[1]))) for each in values]
    return [each.codes.view(torch.uint8) for each in found], [each.dequant_scale.view(-1) for each in found]


def check(found: RowwiseCodes, values: Sequence[Tensor], rows: RoutedRows, others: float = 0.0) -> None:
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
    found = expert_rowwise.gather_codes(x, rows, chosen, GRID)
    check(found, by_expert(expert_casts.gather(x, rows), rows), rows)


def test_weights() -> None:
    weights = drawn(EXPERTS, 256, WIDTH) * torch.logspace(-2, 2, 256, device=DEVICE).bfloat16()[:, None]
    weights[1, 2, 3], weights[2, 4, 5], weights[3, :, 7] = torch.nan, -torch.inf, 0
    found = expert_rowwise.weight_codes(weights, GRID)
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
    h_plain, p_plain = h.float().requires_grad_(), p.clone().requires_grad_()
    a, b = h_plain.chunk(2, 1)
    y = torch.nn.functional.silu(a) * b * p_plain[:, None]
    y.backward(dy.float())
    assert h_plain.grad is not None and p_plain.grad is not None
    codes = expert_rowwise.swiglu_codes(h, p, rows, GRID)
    gradient_codes, dp = expert_rowwise.swiglu_backward_codes(dy, h, p, rows, GRID)
    torch.testing.assert_close(dp[live(rows)], p_plain.grad[live(rows)], rtol=1e-5, atol=1e-4)
    # A value next to the middle of two codes may be rounded to either.
    check(codes, by_expert(y.detach(), rows), rows, others=2e-3)
    check(gradient_codes, by_expert(h_plain.grad, rows), rows, others=2e-3)


def test_infinite_amaxes_are_flagged() -> None:
    chosen, rows, probs = routed(ROUTINGS[1])
    x, p = drawn(TOKENS, WIDTH), values_of_rows(probs, rows)
    x[3, 5], x[7, 6] = torch.nan, -torch.inf
    weights = drawn(EXPERTS, WIDTH, WIDTH)
    weights[0, 2, 3], weights[3, 127, 127] = torch.nan, torch.inf
    h, dy = drawn(len(p), 2 * WIDTH), drawn(len(p), WIDTH, seed=1)
    h[int(rows.ends[-1]) :] = torch.inf
    h[0, 5], h[0, WIDTH + 5], dy[int(rows.ends[1]), 7] = torch.inf, 1, torch.inf
    dy[0, 5] = 1

    def flags_of(cast: Callable[[CurrentScale], object]) -> list[int]:
        infinities = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
        cast(CurrentScale(infinities))
        return infinities.tolist()

    assert flags_of(lambda scale: expert_rowwise.gather_codes(x, rows, chosen, GRID, scale=scale)) == chosen[7].tolist()
    assert flags_of(lambda scale: expert_rowwise.weight_codes(weights, GRID, scale)) == [0, 0, 0, 1]
    assert flags_of(lambda scale: expert_rowwise.swiglu_codes(h, p, rows, GRID, scale)) == [1, 0, 0, 0]
    assert flags_of(lambda scale: expert_rowwise.swiglu_backward_codes(dy, h, p, rows, GRID, scale)) == [1, 0, 1, 0]
