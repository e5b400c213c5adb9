"""Attention in the packed format, also over context-parallel ranks, equals attention with a mask of documents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist

from megafp8.mcore import cpu_patches

cpu_patches.install()

from packed_kernel import each_document
from ranks import run_ranks
from torch import Tensor

from megafp8.mcore.zigzag import to_ranks, to_sequence, zigzag_positions
from megafp8.models.attention import document_numbers, explicit_attention, visible_keys
from megafp8.te.packed_sequences import attend_exchanged, attend_gathered, attend_packed, cut, keys_without_queries

LENGTH, BATCH, HEADS, GROUPS, CHANNELS, VALUE_CHANNELS = 16, 3, 8, 4, 6, 4
TOKENS = BATCH * LENGTH
BORDERS = {
    "one a sequence": (0, 16, 32, 48),
    "many": (0, 5, 8, 9, 16, 17, 32, 34, 35, 36, 47, 48),
    "room for more": (0, 1, 15, 16, 20, 31, 32, 48, 48, 48),
    "one token each": tuple(range(TOKENS + 1)),
}
ATTEND: dict[str, Callable[..., Tensor]] = {"a2a": attend_exchanged, "p2p": attend_gathered}


def inputs() -> list[Tensor]:
    """Query, key, value, and weights of the output."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((HEADS, CHANNELS), (GROUPS, CHANNELS), (GROUPS, VALUE_CHANNELS), (HEADS * VALUE_CHANNELS,))
    return [torch.randn(LENGTH, BATCH, *shape, generator=generator) for shape in shapes]


def masked(ends: Tensor, window: Optional[int]) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients by brute force."""
    *leaves, weights = inputs()
    tokens = torch.arange(LENGTH)
    mask = visible_keys(tokens, tokens, window, document_numbers(ends, BATCH, LENGTH))
    heads_first = (leaf.requires_grad_().permute(1, 2, 0, 3) for leaf in leaves)
    output = explicit_attention(*heads_first, mask, CHANNELS**-0.5).permute(2, 0, 1, 3).flatten(2)
    (output * weights).sum().backward()
    return output.detach(), [leaf.grad for leaf in leaves]  # type: ignore[misc]


def check(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("borders", BORDERS)
def test_one_rank(borders: str, window: Optional[int]) -> None:
    *leaves, weights = inputs()
    ends = torch.tensor(BORDERS[borders], dtype=torch.int32)
    output = attend_packed(partial(each_document, window=window), *(leaf.requires_grad_() for leaf in leaves), ends)
    assert output.is_contiguous()
    (output * weights).sum().backward()
    check((output, [leaf.grad for leaf in leaves]), masked(ends, window))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("comm_type", ATTEND)
def test_context_parallel_ranks(comm_type: str, size: int) -> None:
    cases = [(torch.tensor(ends, dtype=torch.int32), window) for ends in BORDERS.values() for window in (None, 3)]

    def on_rank() -> list[tuple[Tensor, list[Tensor]]]:
        found = []
        mine = zigzag_positions(dist.get_rank(), size, LENGTH // size, torch.device("cpu"))
        for ends, window in cases:
            *leaves, weights = (x[mine] for x in inputs())
            attend = partial(each_document, window=window)
            output = ATTEND[comm_type](attend, *(leaf.requires_grad_() for leaf in leaves), ends, dist.group.WORLD)
            assert output.is_contiguous()
            (output * weights).sum().backward()
            found.append((output.detach(), [leaf.grad for leaf in leaves]))
        return found

    ranks = run_ranks(size, on_rank)
    for (ends, window), parts in zip(cases, zip(*ranks, strict=True), strict=True):
        output, gradients = masked(ends, window)
        check(to_sequence(torch.cat([part[0] for part in parts]), size), output)
        for index, gradient in enumerate(gradients):
            check(to_sequence(torch.cat([part[1][index] for part in parts]), size), gradient)


@pytest.mark.parametrize("borders", BORDERS)
def test_borders_of_a_piece_and_the_keys_before_it(borders: str) -> None:
    ends = torch.tensor(BORDERS[borders], dtype=torch.int32)
    numbers = document_numbers(ends, BATCH, LENGTH)
    for start, end in ((0, 4), (4, 8), (8, 16), (12, 16), (0, 16)):
        of_piece, up_to_end = cut(ends, LENGTH, start, end), cut(ends, LENGTH, 0, end)
        for found, kept in ((of_piece, numbers[:, start:end]), (up_to_end, numbers[:, :end])):
            lengths = torch.bincount(kept.flatten(), minlength=len(ends) - 1)
            assert found.ends.tolist() == [0, *lengths.cumsum(0).tolist()]
            assert found.longest == 64, "cuDNN takes multiples of 64 only"
        has_queries = (numbers[:, :, None] == numbers[:, None, start:end]).any(-1)[:, :end]
        assert torch.equal(~keys_without_queries(ends, BATCH, LENGTH, start)[:end].t(), has_queries)


def test_ranks_and_the_sequence() -> None:
    tokens = torch.arange(48).view(16, 3)
    ranks = to_ranks(tokens, 4)
    for rank in range(4):
        assert torch.equal(ranks[rank], tokens[zigzag_positions(rank, 4, 4, torch.device("cpu"))])
    assert torch.equal(to_sequence(ranks.flatten(0, 1), 4), tokens)
