"""Rows between the buffers of several ranks, all in one process, against the exchange by collectives."""

from __future__ import annotations

import interpreter
import pytest
import torch
from interpreter import DEVICE
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.kernels.peer_rows import NO_EXPERT as MARK
from megafp8.kernels.peer_rows import add_rows, send_rows
from megafp8.models.peer_exchange import NO_EXPERT

pytestmark = pytest.mark.usefixtures("exact")

TOKENS, WIDTH, LOCAL = 5, 24, 3
UNTOUCHED = 77.0


def addresses(buffers: list[Tensor]) -> Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=DEVICE)


def scores_of(ranks: int) -> list[Tensor]:
    """Of each rank's tokens: two experts for most, none for one, a score of 0 and one that is NaN."""
    found = []
    for rank in range(ranks):
        scores = torch.rand(TOKENS, ranks * LOCAL, generator=torch.Generator().manual_seed(rank))
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(2).indices, True)
        chosen[1] = False
        scores[2, chosen[2]] = torch.tensor([0.0, float("nan")])
        found.append(torch.where(chosen, scores, NO_EXPERT).to(DEVICE))
    return found


def parts_of(scores: Tensor, ranks: int) -> Tensor:
    """Which ranks have an expert of each token, [T, ranks]."""
    return (scores.view(TOKENS, ranks, LOCAL) != NO_EXPERT).any(-1)


def test_the_marks_are_one() -> None:
    assert MARK.value == NO_EXPERT


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_and_scores_arrive_at_the_ranks_of_their_experts(ranks: int) -> None:
    scores = scores_of(ranks)
    rows = [torch.randn(TOKENS, WIDTH).bfloat16().to(DEVICE) for _ in range(ranks)]
    buffers = [
        torch.full((ranks * TOKENS, WIDTH), UNTOUCHED, dtype=torch.bfloat16, device=DEVICE) for _ in range(ranks)
    ]
    arrived = [torch.full((ranks * TOKENS, LOCAL), UNTOUCHED, device=DEVICE) for _ in range(ranks)]
    for rank in range(ranks):
        send_rows(rows[rank], scores[rank], addresses(buffers), addresses(arrived), rank, LOCAL)
    for rank in range(ranks):
        for sender in range(ranks):
            part = slice(sender * TOKENS, (sender + 1) * TOKENS)
            is_sent = parts_of(scores[sender], ranks)[:, rank, None]
            assert torch.equal(buffers[rank][part], torch.where(is_sent, rows[sender], UNTOUCHED))
            expected = scores[sender].view(TOKENS, ranks, LOCAL)[:, rank]
            assert torch.equal(arrived[rank][part].nan_to_num(5.0), expected.nan_to_num(5.0))


@pytest.mark.parametrize("with_values", [False, True])
def test_sums_of_all_ranks_are_added_and_values_return(with_values: bool) -> None:
    ranks = 3
    scores = scores_of(ranks)
    sums = [torch.randn(ranks * TOKENS, WIDTH).bfloat16().to(DEVICE) for _ in range(ranks)]
    values = [torch.randn(ranks * TOKENS, LOCAL).to(DEVICE) for _ in range(ranks)]
    for rank in range(ranks):
        part = slice(rank * TOKENS, (rank + 1) * TOKENS)
        of_values = addresses(values) if with_values else None
        result, returned = add_rows(scores[rank], addresses(sums), of_values, sums[rank], rank, LOCAL)
        is_read = parts_of(scores[rank], ranks)
        expected = sum(torch.where(is_read[:, r, None], sums[r][part].float(), 0.0) for r in range(ranks))
        assert torch.equal(result, expected.bfloat16())
        if returned is not None:
            assert torch.equal(returned, torch.cat([values[r][part] for r in range(ranks)], dim=1))
