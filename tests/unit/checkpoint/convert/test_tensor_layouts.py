"""Layouts compared with plain loops, and as inverses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.checkpoint.convert.tensor_mapping import (
    FusedTransposedQKV,
    GatedPair,
    GroupedQKV,
    Identity,
    PaddedVocab,
    StackedExperts,
    TensorLayout,
    Transposed,
)

LAYOUTS = (Identity(), Transposed(), GatedPair(), GroupedQKV(3, 4), FusedTransposedQKV(GroupedQKV(4, 3)))


def numbered(rows: int, *columns: int) -> Tensor:
    return torch.arange(rows * (columns[0] if columns else 1)).reshape(rows, *columns)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: type(layout).__name__)
@pytest.mark.parametrize("shape", [(36, 5), (36,)], ids=["weight", "bias"])
def test_joined_parts_equal_the_full_tensor(layout: TensorLayout, shape: tuple[int, ...]) -> None:
    whole = numbered(*shape)
    assert torch.equal(layout.join(layout.split(whole)), whole)


def test_query_groups_row_by_row() -> None:
    groups, queries, channels = 2, 3, 4
    whole, row = numbered(groups * (queries + 2) * channels, 2), 0
    parts: dict[str, list[Tensor]] = {"query": [], "key": [], "value": []}
    for _group in range(groups):
        for name in ("query",) * queries + ("key", "value"):
            for _channel in range(channels):
                parts[name].append(whole[row])
                row += 1
    for part, rows in zip(GroupedQKV(groups, channels).split(whole), parts.values(), strict=True):
        assert torch.equal(part, torch.stack(rows))


def test_fused_query_groups_are_queries_then_keys_then_values() -> None:
    groups = GroupedQKV(4, 3)
    whole = numbered(36, 5)
    (fused,) = FusedTransposedQKV(groups).split(whole)
    assert fused.shape == (5, 36)
    for part, mine in zip(fused.split(12, dim=1), groups.split(whole), strict=True):
        assert torch.equal(part, mine.t())


def test_experts_one_by_one() -> None:
    layout, stack = StackedExperts(3, GatedPair(), 2), torch.arange(3 * 4 * 2).reshape(3, 4, 2)
    parts = layout.split(stack)
    assert len(parts) == 6 and torch.equal(parts[3], stack[1, 2:]) and torch.equal(layout.join(iter(parts)), stack)


def test_the_gate_comes_before_the_up_projection() -> None:
    gate, up = GatedPair().split(numbered(8, 2))
    assert gate[0, 0] == 0 and up[0, 0] == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_rows_have_little_probability_for_any_hidden_state(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = (torch.randn(50, 8, generator=generator) - 1.5).to(dtype)
    padded = PaddedVocab(50, 64).join([tokens])
    assert torch.equal(PaddedVocab(50, 64).split(padded)[0], tokens) and padded.shape == (64, 8)
    hidden = 4 * torch.randn(500, 8, generator=generator)
    probability = (hidden @ padded.float().t()).softmax(-1)
    rounding = 1.0001 if dtype == torch.float32 else 1.1  # of the mean
    assert (probability[:, 50:].amax(-1) <= probability[:, :50].sum(-1) / 50 * rounding).all()
    zeros = torch.cat((tokens.float(), torch.zeros(14, 8)))
    assert (hidden @ zeros.t()).softmax(-1)[:, 50:].amax() > 0.05  # the purpose of the mean


def test_a_vocabulary_without_padding_is_unchanged() -> None:
    rows = numbered(6, 2).float()
    assert torch.equal(PaddedVocab(6, 6).join([rows]), rows)
