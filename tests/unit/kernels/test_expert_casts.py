"""Gather, weighted SwiGLU and sums on the rows of experts, against torch: values, codes, scales and gradients.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import interpreter
import pytest
import torch
from interpreter import DEVICE
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.kernels import expert_casts
from megafp8.kernels.expert_scales import CurrentScale
from megafp8.kernels.rounding import format_spec
from megafp8.kernels.routed_rows import ALIGNMENT, RoutedRows, route, values_of_rows
from megafp8.quantization.delayed_scaling import DelayedScale
from megafp8.quantization.prequantized import codes_of_experts
from megafp8.quantization.quantize import quantize
from megafp8.quantization.rounding import cast
from megafp8.quantization.scaling import quant_scale_of
from megafp8.recipes.base import OperandRule, ScaleRule
from megafp8.recipes.formats import E4M3

pytestmark = pytest.mark.usefixtures("exact")

TOKENS, EXPERTS, TOP_K, WIDTH = 48, 4, 2, 128
SPEC = format_spec(E4M3)
ROUTINGS = ("spread", "an expert without tokens", "all tokens to two experts")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def routed(kind: str) -> tuple[Tensor, RoutedRows, Tensor]:
    """Routing map, rows and probabilities."""
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1))
    scores[:, 1] -= 2.0 * (kind == ROUTINGS[1])
    scores[:, 2:] -= 2.0 * (kind == ROUTINGS[2])
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, scores.topk(TOP_K).indices, True).to(DEVICE)
    return chosen, route(chosen, TOP_K), torch.where(chosen, scores.to(DEVICE).abs() + 0.1, 0.0)


def live(rows: RoutedRows) -> Tensor:
    """Indices of the rows in use, empty ones among them."""
    return torch.arange(int(rows.ends[-1]), device=DEVICE)


def gathered(inputs: Tensor, rows: RoutedRows) -> Tensor:
    """The token of each row in use, in FP32."""
    tokens = rows.token_of_row[live(rows)].long()
    return torch.where(tokens[:, None] < 0, 0.0, inputs.float()[tokens.clamp(min=0)])


def expected_codes(values: Tensor, rows: RoutedRows) -> tuple[Tensor, Tensor]:
    """Codes of rows in use, and dequantization scales, one for each expert, by plain operations."""
    experts = rows.expert_of_block.repeat_interleave(ALIGNMENT)[live(rows)].long()
    amaxes = torch.stack([
        values[experts == expert].abs().amax() if (experts == expert).any() else values.new_zeros(())
        for expert in range(EXPERTS)
    ])  # fmt: skip
    scales = quant_scale_of(amaxes, E4M3, ScaleRule.FP32)
    return cast(values * scales[experts][:, None], E4M3).view(torch.uint8), 1.0 / scales


def check_codes(codes: expert_casts.RoutedCodes, values: Tensor, rows: RoutedRows) -> None:
    expected, scale_inv = expected_codes(values, rows)
    assert torch.equal(codes.rows[live(rows)], expected)
    assert torch.equal(codes.columns[:, live(rows)], expected.t())
    assert torch.equal(codes.scale_inv, scale_inv)


def weighted_swiglu(h: Tensor, p: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p silu(a) b of h = (a, b), and the gradients of h and p, in FP32."""
    h_plain, p_plain = h.float().requires_grad_(), p.clone().requires_grad_()
    a, b = h_plain.chunk(2, 1)
    y = torch.nn.functional.silu(a) * b * p_plain[:, None]
    y.backward(dy.float())
    assert h_plain.grad is not None and p_plain.grad is not None
    return y.detach(), h_plain.grad, p_plain.grad


def check_flags(casts: Any, dtype: torch.dtype) -> None:
    """The experts that have infinite values, and no others, are flagged; a NaN, or rows behind the last expert's, set
    no flag."""
    chosen, rows, probs = routed(ROUTINGS[1])
    x, p = drawn(TOKENS, WIDTH), values_of_rows(probs, rows)
    x[3, 5], x[7, 6] = torch.nan, -torch.inf
    weights = drawn(EXPERTS, WIDTH, WIDTH)
    weights[0, 2, 3], weights[3, 127, 127] = torch.nan, torch.inf
    h, dy = drawn(len(p), 2 * WIDTH), drawn(len(p), WIDTH, seed=1)
    h[int(rows.ends[-1]) :] = torch.inf
    of_first, of_third = 0, int(rows.ends[1])
    h[of_first, 5], h[of_first, WIDTH + 5], h[of_third, 2] = torch.inf, 1, torch.nan
    dy[of_first, 5], dy[of_third, 7] = 1, torch.inf

    def flags_of(cast: Callable[[CurrentScale], object]) -> list[int]:
        infinities = torch.zeros(EXPERTS, dtype=dtype, device=DEVICE)
        cast(CurrentScale(infinities))
        return infinities.tolist()

    assert flags_of(lambda scale: casts.gather_codes(x, rows, chosen, SPEC, scale=scale)) == chosen[7].tolist()
    assert flags_of(lambda scale: casts.weight_codes(weights, SPEC, scale)) == [0, 0, 0, 1]
    assert flags_of(lambda scale: casts.swiglu_codes(h, p, rows, SPEC, scale)) == [1, 0, 0, 0]
    # The gate's gradient of an infinite gate is NaN, but the other half has its result.
    assert flags_of(lambda scale: casts.swiglu_backward_codes(dy, h, p, rows, SPEC, scale)) == [1, 0, 1, 0]


@pytest.mark.parametrize("kind", ROUTINGS)
def test_each_token_has_its_rows(kind: str) -> None:
    chosen, rows, probs = routed(kind)
    counts = chosen.sum(0)
    assert rows.ends.tolist() == ((counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).cumsum(0).tolist()
    experts = rows.expert_of_block.repeat_interleave(ALIGNMENT)
    for token in range(TOKENS):
        mine = rows.rows_of_token[token].long()
        assert (rows.token_of_row[mine] == token).all()
        assert experts[mine].tolist() == chosen[token].nonzero().flatten().tolist()
    assert (rows.token_of_row >= 0).sum() == chosen.sum()
    of_rows = values_of_rows(probs, rows)
    assert of_rows[rows.token_of_row < 0].count_nonzero() == 0
    assert torch.equal(of_rows[rows.rows_of_token.long()].sum(1), probs.sum(1))


def test_a_token_with_fewer_experts_has_fewer_rows() -> None:
    chosen, _, _ = routed("spread")
    chosen[5] = False
    rows = route(chosen, TOP_K)
    assert rows.rows_of_token[5].tolist() == [-1, -1]
    x = drawn(len(rows.token_of_row), WIDTH)
    assert expert_casts.sum_rows(x, rows)[5].count_nonzero() == 0


@pytest.mark.parametrize("kind", ROUTINGS)
def test_gather_and_sum(kind: str) -> None:
    chosen, rows, _ = routed(kind)
    x = drawn(TOKENS, WIDTH)
    copies = expert_casts.gather(x, rows)
    assert torch.equal(copies[live(rows)].float(), gathered(x, rows))
    assert torch.equal(expert_casts.sum_rows(copies, rows), (x.float() * TOP_K).bfloat16())
    check_codes(expert_casts.gather_codes(x, rows, chosen, SPEC), gathered(x, rows), rows)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_weighted_swiglu_and_its_gradients(kind: str) -> None:
    _, rows, probs = routed(kind)
    p = values_of_rows(probs, rows)
    h, dy = drawn(len(p), 2 * WIDTH), drawn(len(p), WIDTH, seed=1)
    y, h_grad, p_grad = weighted_swiglu(h[live(rows)], p[live(rows)], dy[live(rows)])
    near = {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(expert_casts.swiglu(h, p, rows)[live(rows)].float(), y, **near)
    dh, dp = expert_casts.swiglu_backward(dy, h, p, rows)
    torch.testing.assert_close(dh[live(rows)].float(), h_grad, **near)
    torch.testing.assert_close(dp[live(rows)], p_grad, rtol=1e-5, atol=1e-4)
    codes = expert_casts.swiglu_codes(h, p, rows, SPEC)
    gradient_codes, dp_of_codes = expert_casts.swiglu_backward_codes(dy, h, p, rows, SPEC)
    assert torch.equal(dp_of_codes, dp)
    for found, values in ((codes, y), (gradient_codes, h_grad)):
        expected, scale_inv = expected_codes(values, rows)
        torch.testing.assert_close(found.scale_inv, scale_inv, rtol=1e-5, atol=0)
        assert torch.equal(found.rows[live(rows)], found.columns[:, live(rows)].t())
        # A value next to the middle of two codes may be rounded to either.
        assert (found.rows[live(rows)] != expected).float().mean() < 2e-3


def test_weights_have_a_scale_for_each_expert() -> None:
    weights = drawn(EXPERTS, 256, WIDTH) * torch.logspace(-2, 2, EXPERTS, device=DEVICE).bfloat16()[:, None, None]
    codes = expert_casts.weight_codes(weights, SPEC)
    amaxes = weights.float().abs().amax((1, 2))
    scales = quant_scale_of(amaxes, E4M3, ScaleRule.FP32)
    assert torch.equal(codes.rows, cast(weights.float() * scales[:, None, None], E4M3).view(torch.uint8))
    assert torch.equal(codes.columns, codes.rows.transpose(1, 2))
    assert torch.equal(codes.scale_inv, 1.0 / scales)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_infinite_amaxes_are_flagged(dtype: torch.dtype) -> None:
    check_flags(expert_casts, dtype)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_codes_that_arrived_are_kept(kind: str) -> None:
    """The rows of an expert as `quantization/prequantized.py` sends them: each once."""
    chosen, rows, _ = routed(kind)
    counts = chosen.sum(0)
    tokens = torch.cat([drawn(TOKENS, WIDTH)[chosen[:, expert]] for expert in range(EXPERTS)])
    of_one = torch.eye(EXPERTS, dtype=torch.bool, device=DEVICE).repeat_interleave(counts, dim=0)
    rows = route(of_one, 1)
    rule = OperandRule(format=E4M3, scale_rule=ScaleRule.FP32)
    numbers, scales = codes_of_experts(tokens, counts, rule)
    expected = expert_casts.gather_codes(tokens, rows, of_one, SPEC)
    found = expert_casts.gather_codes(numbers.to(tokens.dtype), rows, of_one, SPEC, scales.dequant_scale)
    assert torch.equal(found.rows[live(rows)], expected.rows[live(rows)])
    assert torch.equal(found.columns[:, live(rows)], expected.columns[:, live(rows)])
    assert torch.equal(found.scale_inv, expected.scale_inv)


DELAYED = OperandRule(format=E4M3, scale_rule=ScaleRule.DELAYED)


def known_scales(records_amax: bool = True) -> tuple[Tensor, Tensor | None]:
    """Scales, and amaxes of earlier microbatches, one of which is larger than any new one."""
    scales = torch.tensor([100.0, 0.37, 3.3e3, 64.0], device=DEVICE)
    return scales, torch.tensor([0.0, 0.1, 1e4, 0.0], device=DEVICE) if records_amax else None


def expected_delayed(values: list[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Codes of each expert's values as its emulated linear makes them, dequantization scales, and recorded amaxes."""
    scales, amaxes = known_scales()
    assert amaxes is not None
    of_experts = [DelayedScale(scale, amax) for scale, amax in zip(scales, amaxes, strict=True)]
    found = [quantize(each, DELAYED, delayed=scale) for each, scale in zip(values, of_experts, strict=True)]
    codes = [each.codes.view(torch.uint8) for each in found]
    return codes, torch.stack([each.dequant_scale for each in found]), amaxes


def by_expert(values: Tensor, rows: RoutedRows) -> list[Tensor]:
    """The rows in use of each expert."""
    experts = rows.expert_of_block.repeat_interleave(ALIGNMENT)[live(rows)]
    return [values[live(rows)][experts == expert] for expert in range(EXPERTS)]


@pytest.mark.parametrize("kind", ROUTINGS)
def test_known_scales_give_the_codes_of_emulated_linears(kind: str) -> None:
    chosen, rows, _ = routed(kind)
    x = drawn(TOKENS, WIDTH)
    x[3, 5], x[7, 6] = torch.nan, torch.inf
    scales, amaxes = known_scales()
    found = expert_casts.gather_codes(x, rows, chosen, SPEC, scale=(scales, amaxes))
    codes, scale_inv, expected_amaxes = expected_delayed(by_expert(expert_casts.gather(x, rows), rows))
    assert torch.equal(found.rows[live(rows)], torch.cat(codes))
    assert torch.equal(found.columns[:, live(rows)], torch.cat(codes).t())
    assert torch.equal(found.scale_inv, scale_inv)
    assert amaxes is not None and torch.equal(amaxes, expected_amaxes)
    unrecorded = expert_casts.gather_codes(x, rows, chosen, SPEC, scale=known_scales(records_amax=False))
    assert torch.equal(unrecorded.rows[live(rows)], found.rows[live(rows)])


def test_weights_with_known_scales() -> None:
    weights = drawn(EXPERTS, 256, WIDTH) * torch.logspace(-2, 2, EXPERTS, device=DEVICE).bfloat16()[:, None, None]
    scales, amaxes = known_scales()
    found = expert_casts.weight_codes(weights, SPEC, (scales, amaxes))
    codes, scale_inv, expected_amaxes = expected_delayed(list(weights))
    assert torch.equal(found.rows, torch.stack(codes)) and torch.equal(found.columns, found.rows.transpose(1, 2))
    assert torch.equal(found.scale_inv, scale_inv)
    assert amaxes is not None and torch.equal(amaxes, expected_amaxes)
    unrecorded = expert_casts.weight_codes(weights, SPEC, known_scales(records_amax=False))
    assert torch.equal(unrecorded.rows, found.rows)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_weighted_swiglu_and_its_gradients_with_known_scales(kind: str) -> None:
    """Rows behind the last expert's are not recorded. Results are not rounded to BF16 before the cast."""
    _, rows, probs = routed(kind)
    p = values_of_rows(probs, rows)
    h, dy = drawn(len(p), 2 * WIDTH), drawn(len(p), WIDTH, seed=1)
    h[int(rows.ends[-1]) :] = 1e30
    y, h_grad, p_grad = weighted_swiglu(h, p, dy)
    scales, amaxes = known_scales()
    gradient_amaxes = known_scales()[1]
    codes = expert_casts.swiglu_codes(h, p, rows, SPEC, (scales, amaxes))
    gradient_codes, dp = expert_casts.swiglu_backward_codes(dy, h, p, rows, SPEC, (scales, gradient_amaxes))
    torch.testing.assert_close(dp[live(rows)], p_grad[live(rows)], rtol=1e-5, atol=1e-4)
    for found, values, recorded in ((codes, y, amaxes), (gradient_codes, h_grad, gradient_amaxes)):
        expected, scale_inv, expected_amaxes = expected_delayed(by_expert(values, rows))
        assert torch.equal(found.scale_inv, scale_inv)
        torch.testing.assert_close(recorded, expected_amaxes, rtol=1e-5, atol=0)
        assert torch.equal(found.rows[live(rows)], found.columns[:, live(rows)].t())
        # A value next to the middle of two codes may be rounded to either.
        assert (found.rows[live(rows)] != torch.cat(expected)).float().mean() < 2e-3
    unrecorded = known_scales(records_amax=False)
    assert torch.equal(expert_casts.swiglu_codes(h, p, rows, SPEC, unrecorded).rows[live(rows)], codes.rows[live(rows)])
    again, _ = expert_casts.swiglu_backward_codes(dy, h, p, rows, SPEC, unrecorded)
    assert torch.equal(again.rows[live(rows)], gradient_codes.rows[live(rows)])
