"""Tokens that are sent to the ranks of their experts, at addresses that need no counts: results and gradients of one
process, for any routing. CPU ranks have the same rows at the same places by collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from megafp8.models.peer_exchange import exchange_of, from_experts, to_experts

TOKENS, WIDTH, EXPERTS, TOP_K = 6, 8, 4, 2
CASES = ("random", "one expert", "one rank", "few")


def inputs(rank: int, case: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, scores, map, and the gradient of the result, of one rank."""
    generator = torch.Generator().manual_seed(rank)
    rows, gradient = (torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    if case == "one expert":
        chosen[:, 3] = True
    elif case == "one rank":  # all tokens are of the first rank's experts
        chosen[:, : EXPERTS // 2] = True
    else:
        chosen.scatter_(1, scores.topk(TOP_K).indices, True)
    if case == "few":  # a token without experts, as a capacity leaves one, and a score of 0
        chosen[0] = False
        scores[1] = 0.0
    return rows.requires_grad_(), scores.requires_grad_(), chosen, gradient


def experts(rows: Tensor, probs: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Each token's weighted sum over its experts; rows of tokens without an expert are not read."""
    result = torch.zeros_like(rows)
    for index, weight in enumerate(weights):
        tokens = chosen[:, index].nonzero().flatten()
        result = result.index_add(0, tokens, probs[tokens, index, None].double() * torch.tanh(rows[tokens] @ weight))
    return result


def expert_weights() -> Tensor:
    generator = torch.Generator().manual_seed(100)
    return torch.randn(EXPERTS, WIDTH, WIDTH, generator=generator, dtype=torch.float64)


def exchanged(case: str) -> list[Any]:
    """Result and gradients on a rank whose experts are divided, twice in a row as in two layers."""
    group, rank = dist.group.WORLD, dist.get_rank()
    local = EXPERTS // dist.get_world_size()
    weights = expert_weights()[rank * local : (rank + 1) * local].requires_grad_()
    rows, scores, chosen, gradient = inputs(rank, case)
    exchange, result = exchange_of(group, local), rows
    for _ in range(2):
        arrived = to_experts(exchange, result, scores, chosen)
        result = from_experts(exchange, experts(arrived.rows, arrived.probs, arrived.routing_map, weights), arrived)
    result.backward(gradient)
    return [tensor.detach().tolist() for tensor in (result, rows.grad, scores.grad, weights.grad)]


def received(case: str) -> int:
    group, rank = dist.group.WORLD, dist.get_rank()
    rows, scores, chosen, _ = inputs(rank, case)
    exchange = exchange_of(group, EXPERTS // dist.get_world_size())
    return int(to_experts(exchange, rows, scores, chosen).num_from_others(exchange))


def expected(world_size: int, case: str) -> list[tuple[Tensor, ...]]:
    """The same in one process."""
    weights, found = expert_weights().requires_grad_(), []
    for rank in range(world_size):
        rows, scores, chosen, gradient = inputs(rank, case)
        result = experts(experts(rows, scores, chosen, weights), scores, chosen, weights)
        result.backward(gradient)
        found.append((result.detach(), rows.grad, scores.grad))
    return [(*each, part) for each, part in zip(found, weights.grad.chunk(world_size), strict=True)]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_one_process(world_size: int, case: str) -> None:
    for found, reference in zip(run_ranks(world_size, exchanged, case), expected(world_size, case), strict=True):
        for mine, theirs in zip(found, reference, strict=True):
            torch.testing.assert_close(torch.tensor(mine, dtype=theirs.dtype), theirs, rtol=1e-5, atol=1e-6)


def test_rows_of_other_ranks_are_counted() -> None:
    """Each token counts once on a rank, however many experts it has there."""
    assert run_ranks(2, received, "one rank") == [TOKENS, 0]
    chosen = [inputs(rank, "random")[2].view(TOKENS, 2, -1).any(-1).sum(0).tolist() for rank in range(2)]
    assert run_ranks(2, received, "random") == [chosen[1][0], chosen[0][1]]
