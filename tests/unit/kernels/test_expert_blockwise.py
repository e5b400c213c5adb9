"""Casts of experts with a scale for each block against emulated linears, and the GEMMs that multiply these codes.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence

import interpreter
import pytest
import torch
from interpreter import DEVICE, IS_INTERPRETED
from torch import Tensor

interpreter.skip_without_kernels()

from test_expert_casts import EXPERTS, TOKENS, by_expert, drawn, live, routed, weighted_swiglu

from megafp8.kernels import expert_casts
from megafp8.kernels.expert_blockwise import ALIGNMENT, BlockwiseCasts
from megafp8.kernels.expert_scales import CurrentScale, RowColumnCodes
from megafp8.kernels.expert_wgrad import add_wgrad
from megafp8.kernels.rounding import format_spec
from megafp8.kernels.routed_rows import RoutedRows, route, values_of_rows
from megafp8.quantization import grouped_linear
from megafp8.quantization.quantize import quantize_by_torch
from megafp8.recipes import registry
from megafp8.recipes.base import Gemm, Operand
from megafp8.recipes.formats import E4M3, E5M2

pytestmark = pytest.mark.usefixtures("exact")

WIDTH, OUTPUTS, LENGTH = 256, 384, 128
SPEC = format_spec(E4M3)
ROUTINGS = ("spread", "an expert without tokens", "all tokens to two experts")
each_scale = pytest.mark.parametrize("is_power_of_two", [True, False], ids=["powers of two", "FP32 scales"])


def aligned(kind: str) -> tuple[Tensor, RoutedRows, Tensor]:
    """Routing map, rows in multiples of a block, and the rows' probabilities."""
    chosen, _, probs = routed(kind)
    rows = route(chosen, 2, alignment=ALIGNMENT)
    assert all(end % ALIGNMENT == 0 for end in rows.ends.tolist())
    return chosen, rows, values_of_rows(probs, rows)


def expected(values: Sequence[Tensor], operand: Operand, gemm: Gemm, is_power_of_two: bool) -> list[tuple[Tensor, ...]]:
    """Codes and dequantization scales of each expert's values, as emulated linears make them for a GEMM."""
    rules = registry.get("blockwise").build("e4m3", fp8_block_scaling_fp32_scales=not is_power_of_two)
    rule = rules.rule(operand, gemm)
    assert rule is not None
    found = [quantize_by_torch(each, rule.for_shape((each.shape[0], each.shape[1]))) for each in values]
    return [(each.codes.view(torch.uint8), each.dequant_scale) for each in found]


def check(
    found: RowColumnCodes, values: list[Tensor], rows: RoutedRows, is_power_of_two: bool, others: float = 0.0
) -> None:
    """All codes and scales of rows in use, up to a fraction of codes that may be others."""
    at = live(rows)
    of_rows = expected(values, Operand.INPUT, Gemm.FPROP, is_power_of_two)
    of_columns = expected(values, Operand.INPUT, Gemm.WGRAD, is_power_of_two)
    assert (found.rows[at] != torch.cat([codes for codes, _ in of_rows])).float().mean() <= others
    assert (found.columns[:, at].t() != torch.cat([codes for codes, _ in of_columns])).float().mean() <= others
    num_columns, num_blocks = found.rows.shape[1], len(at) // LENGTH
    row_scales = torch.cat([scales.view(-1, num_columns // LENGTH) for _, scales in of_rows])
    column_scales = torch.cat([scales.view(-1, num_columns) for _, scales in of_columns])
    assert (found.row_scale_inv[:, at].t() != row_scales).float().mean() <= others
    assert (found.column_scale_inv[:num_blocks, 0] != column_scales).float().mean() <= others


@each_scale
@pytest.mark.parametrize("kind", ROUTINGS)
def test_gathered_tokens(kind: str, is_power_of_two: bool) -> None:
    chosen, rows, _ = aligned(kind)
    x = drawn(TOKENS, WIDTH) * torch.logspace(-3, 3, TOKENS, device=DEVICE).bfloat16()[:, None]
    x[3, 5], x[7, 6], x[9] = torch.nan, torch.inf, 0
    infinities = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    found = BlockwiseCasts(is_power_of_two).gather_codes(x, rows, chosen, SPEC, scale=CurrentScale(infinities))
    values = by_expert(expert_casts.gather(x, rows), rows)
    check(found, [each for each in values if len(each)], rows, is_power_of_two)
    assert infinities.tolist() == chosen[7].tolist()


@each_scale
def test_weights(is_power_of_two: bool) -> None:
    weights = drawn(EXPERTS, OUTPUTS, WIDTH) * torch.logspace(-2, 2, OUTPUTS, device=DEVICE).bfloat16()[:, None]
    weights[1, 2, 3], weights[2, 4, 5], weights[3, :, 7] = torch.nan, -torch.inf, 0
    infinities = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    found = BlockwiseCasts(is_power_of_two).weight_codes(weights, SPEC, CurrentScale(infinities))
    for expert, (codes, scales) in enumerate(expected(list(weights), Operand.WEIGHT, Gemm.FPROP, is_power_of_two)):
        scales = scales.view(OUTPUTS // LENGTH, WIDTH // LENGTH)
        assert torch.equal(found.rows[expert], codes) and torch.equal(found.columns[expert], codes.t())
        assert torch.equal(found.row_scale_inv[expert], scales)
        assert torch.equal(found.column_scale_inv[expert], scales.t())
    assert infinities.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("kind", ROUTINGS)
def test_weighted_swiglu_and_its_gradients(kind: str) -> None:
    """SwiGLU's results are not rounded to BF16 before the cast, its gradients are."""
    casts, (_, rows, p) = BlockwiseCasts(is_power_of_two=True), aligned(kind)
    h, dy = drawn(len(p), 2 * WIDTH), drawn(len(p), WIDTH, seed=1)
    y, h_grad, p_grad = weighted_swiglu(h, p, dy)
    codes = casts.swiglu_codes(h, p, rows, SPEC)
    gradient_codes, dp = casts.swiglu_backward_codes(dy, h, p, rows, SPEC)
    torch.testing.assert_close(dp[live(rows)], p_grad[live(rows)], rtol=1e-5, atol=1e-4)
    # A value next to the middle of two codes may be rounded to either.
    for found, values in ((codes, y), (gradient_codes, h_grad.bfloat16().float())):
        check(found, [each for each in by_expert(values, rows) if len(each)], rows, True, others=2e-3)


def decoded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes [M, K] with a scale for each block, scales [M / a, K / b]."""
    down, across = (size // num for size, num in zip(codes.shape, scales.shape, strict=True))
    return codes.view(dtype).double() * scales.double().repeat_interleave(down, 0).repeat_interleave(across, 1)


@pytest.mark.parametrize("gradients", [E4M3, E5M2], ids=["e4m3", "hybrid"])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_products_are_those_of_the_decoded_blocks(kind: str, gradients: type) -> None:
    casts, (chosen, rows, _) = BlockwiseCasts(is_power_of_two=True), aligned(kind)
    spread = torch.logspace(-3, 3, TOKENS, device=DEVICE).bfloat16()[:, None]
    weights = casts.weight_codes(drawn(EXPERTS, OUTPUTS, WIDTH, seed=2), SPEC)
    x = casts.gather_codes(drawn(TOKENS, WIDTH) * spread, rows, chosen, SPEC)
    dz = casts.gather_codes(drawn(TOKENS, OUTPUTS, seed=1) * spread, rows, chosen, format_spec(gradients))
    # FP8 tensor cores add with 13 bits of fraction, and BF16 results have 8 bits.
    bound = 2e-3 if IS_INTERPRETED else 4e-3
    main_grad = torch.full((EXPERTS, OUTPUTS, WIDTH), 3.0, device=DEVICE)
    add_wgrad(main_grad, dz.transposed, x.transposed, rows, is_overwritten=False)
    y, dx = grouped_linear.fp8_fprop(x, weights, rows), grouped_linear.fp8_dgrad(dz, weights, rows)
    ends = [0, *rows.ends.tolist()]
    for expert, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        w = decoded(weights.rows[expert], weights.row_scale_inv[expert], weights.dtype)
        at, blocks = slice(start, end), slice(start // LENGTH, end // LENGTH)
        for found, codes, weight in ((y, x, w.t()), (dx, dz, w)):
            wanted = decoded(codes.rows[at], codes.row_scale_inv[:, at].t(), codes.dtype) @ weight if end > start else 0
            assert end == start or (found[at].double() - wanted).norm() <= bound * wanted.norm()
        if end > start:
            left, right = (
                decoded(each.columns[:, at], each.column_scale_inv[blocks, 0].t(), each.dtype) for each in (dz, x)
            )
            wanted = left @ right.t()
            assert (main_grad[expert].double() - 3.0 - wanted).norm() <= bound * wanted.norm()
        else:
            assert (main_grad[expert] == 3.0).all()
