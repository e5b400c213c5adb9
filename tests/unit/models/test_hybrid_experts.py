"""Experts in one launch per GEMM with E5M2 output gradients: codes of dgrad and wgrad, and their products.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/models`.
"""

from __future__ import annotations

from typing import Any

import interpreter
import pytest
import torch
from interpreter import DEVICE, IS_INTERPRETED
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.kernels import expert_casts, expert_rowwise
from megafp8.kernels.expert_scales import ColumnCodes
from megafp8.kernels.rounding import format_spec
from megafp8.kernels.routed_rows import ALIGNMENT, RoutedRows, route
from megafp8.models import grouped_experts
from megafp8.models.grouped_experts import ExpertScales, cast_weights, experts
from megafp8.quantization import grouped_linear
from megafp8.quantization.delayed_scaling import DelayedScale
from megafp8.quantization.quantize import quantize_by_torch
from megafp8.recipes import registry
from megafp8.recipes.base import Gemm, Operand
from megafp8.recipes.formats import E4M3, E5M2

TOKENS, EXPERTS, TOP_K, HIDDEN, FFN = 96, 4, 2, 256, 128
# BF16 results have 8 bits; FP8 tensor cores add with 13 bits of fraction.
BOUND = 3e-3 if IS_INTERPRETED else 5e-3


@pytest.fixture(autouse=IS_INTERPRETED)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.make_exact(monkeypatch)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def expert_weight(*shape: int, seed: int) -> Any:
    weight: Any = (drawn(*shape, seed=seed) * shape[-1] ** -0.5).requires_grad_()
    weight.main_grad = torch.ones(shape, device=DEVICE)
    return weight


def parts(rows: RoutedRows) -> list[slice]:
    """The rows of each expert."""
    ends = [0, *rows.ends.tolist()]
    return [slice(start, end) for start, end in zip(ends, ends[1:], strict=False)]


def decoded(codes: Any, rows: RoutedRows) -> Tensor:
    """What the E5M2 codes by rows stand for, FP32 [R, N]."""
    assert codes.dtype == torch.float8_e5m2
    if hasattr(codes, "row_scale_inv"):
        scales = codes.row_scale_inv
    else:
        scales = codes.scale_inv[rows.expert_of_block.long()].repeat_interleave(ALIGNMENT)
    return codes.rows.view(torch.float8_e5m2).float() * scales[:, None]


def decoded_columns(codes: ColumnCodes, expert: int, of_expert: slice) -> Tensor:
    """What the transposed codes of one expert stand for, FP32 [rows, N]."""
    values = codes.codes[:, of_expert].view(codes.dtype).float().t()
    return values * codes.scale_inv[expert]


def near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found.float() - wanted).norm() <= BOUND * wanted.norm())


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_gradients_are_e5m2_in_dgrad_and_wgrad(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dgrads: list[tuple[Any, ...]] = []
    wgrads: list[tuple[Any, ...]] = []
    plain_dgrad, plain_wgrad = grouped_linear.fp8_dgrad, grouped_experts.add_wgrad

    def dgrad(*args: Any) -> Tensor:
        dgrads.append((*args[:2], plain_dgrad(*args)))
        return dgrads[-1][-1]

    def wgrad(*args: Any) -> Any:
        wgrads.append(args)
        return plain_wgrad(*args)

    monkeypatch.setattr(grouped_linear, "fp8_dgrad", dgrad)
    monkeypatch.setattr(grouped_experts, "add_wgrad", wgrad)
    fc1, fc2 = expert_weight(EXPERTS, 2 * FFN, HIDDEN, seed=0), expert_weight(EXPERTS, HIDDEN, FFN, seed=1)
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(TOP_K).indices, True)
    rows = route(chosen, TOP_K)
    inputs, grad = drawn(TOKENS, HIDDEN, seed=3).requires_grad_(), drawn(TOKENS, HIDDEN, seed=4)
    specs = format_spec(E4M3), format_spec(E5M2)
    codes = cast_weights(
        fc1.detach(),
        fc2.detach(),
        specs[0],
        gradient_spec=specs[1],
        casts=expert_rowwise if recipe == "rowwise" else expert_casts,
    )
    inner, outer = (DelayedScale(torch.full((EXPERTS,), scale, device=DEVICE), None) for scale in (64.0, 4096.0))
    scales = ExpertScales(inner, inner, outer, outer) if recipe == "delayed" else ExpertScales()
    experts(inputs, scores * chosen, fc1, fc2, chosen, rows, codes, scales=scales).backward(grad)

    rule = registry.get(recipe).rules("hybrid").rule(Operand.GRAD_OUTPUT, Gemm.DGRAD)
    assert rule is not None and rule.format == E5M2
    for (dz, weights, result), (weight, columns, x, *_) in zip(dgrads, wgrads, strict=True):
        values = decoded(dz, rows)
        assert columns.dtype == torch.float8_e5m2 and weights.dtype == x.dtype == torch.float8_e4m3fn
        transposed, weight_scales, _ = weights.transposed
        for expert, each in enumerate(parts(rows)):
            w = transposed[expert].view(torch.float8_e4m3fn).float() * weight_scales[expert].view(-1, 1)
            assert near(result[each], values[each] @ w.t())
            product = decoded_columns(columns, expert, each).t() @ decoded_columns(x, expert, each)
            assert near(weight.main_grad[expert] - 1.0, product)
    # The output gradient of fc2 is that of each row's token.
    dz, gathered = dgrads[0][0], grad[rows.token_of_row.clamp(min=0).long()]
    gathered = torch.where(rows.token_of_row[:, None] < 0, 0.0, gathered)
    for each in parts(rows):
        if recipe == "delayed":
            expected = (gathered[each].float() * 4096.0).clamp(-E5M2.max, E5M2.max).to(torch.float8_e5m2)
        else:
            expected = quantize_by_torch(gathered[each], rule.for_shape((each.stop - each.start, HIDDEN))).codes
        assert torch.equal(dz.rows[each], expected.view(torch.uint8))


def test_a_weight_without_a_gradient_buffer_gets_its_gradient() -> None:
    rows = route(torch.ones(32, 1, dtype=torch.bool, device=DEVICE), 1)
    codes = [
        ColumnCodes(drawn(128, 128, seed=seed).to(dtype).view(torch.uint8), torch.ones(1, device=DEVICE), dtype)
        for seed, dtype in enumerate((torch.float8_e5m2, torch.float8_e4m3fn))
    ]
    found = grouped_experts.add_wgrad(torch.empty(1, 128, 128, device=DEVICE), codes[0], codes[1], rows)
    assert found is not None and found.dtype == torch.bfloat16
    assert near(found[0], decoded_columns(codes[0], 0, slice(32)).t() @ decoded_columns(codes[1], 0, slice(32)))
