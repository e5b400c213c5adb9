"""Where the tokens of each expert lie: the rows that grouped GEMMs multiply.

Each token has a row for each of its experts. The rows of an expert are consecutive, in the order of the tokens, and
padded with empty rows to a multiple of `ALIGNMENT`, or of more. Their number is known on the device only: the buffer
has as many rows as the worst case needs, and what lies behind the last expert's rows is never read. So the host waits
for nothing, and a CUDA graph can hold the step. Where tokens come from other ranks the worst case is too large, and
`Room` says how many rows there are.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Protocol

import torch
from torch import Tensor

from megafp8.utils.integers import round_up

ALIGNMENT = 16
"""Rows of an expert are a multiple of this: wgrad sums over them, and an FP8 GEMM loads 16 bytes at a time."""
TILE = 128


class RoutedRows(NamedTuple):
    """Rows of T tokens for E experts, K for each token. R is `num_rows`.

    Attributes:
        token_of_row: int32 [R]; -1 for an empty row.
        rows_of_token: int32 [T, K]; -1 where a token has fewer experts.
        ends: int32 [E], behind the last row of each expert.
        expert_of_block: int32 [R / ALIGNMENT], the expert of these rows.
    """

    token_of_row: Tensor
    rows_of_token: Tensor
    ends: Tensor
    expert_of_block: Tensor


class Room(Protocol):
    """Decides on a number of rows."""

    def size(self, needed: Tensor, worst: int) -> int:
        """A multiple of `TILE`; rows that exceed it are left out.

        Args:
            needed: int32 [1], on the device.
            worst: which always suffice.
        """


def num_rows(num_tokens: int, num_experts: int, top_k: int, alignment: int = ALIGNMENT) -> int:
    """Rows for the worst case, in complete tiles."""
    largest = num_tokens * top_k + num_experts * (alignment - 1)
    return round_up(largest, TILE)


def route(routing_map: Tensor, top_k: int, room: Optional[Room] = None, alignment: int = ALIGNMENT) -> RoutedRows:
    """Assign rows.

    Args:
        routing_map: bool [T, E], which experts each token has.
        top_k: K; a token with more than K experts loses the last ones.
        room: None: for the worst case.
        alignment: the rows of an expert are a multiple of this, which is one of `ALIGNMENT`.
    """
    num_tokens, num_experts = routing_map.shape
    rows, device = num_rows(num_tokens, num_experts, top_k, alignment), routing_map.device
    # A sum along the last dimension is one pass; along the first one it took 2.8 ms for 16,384 tokens on an H200.
    rank = routing_map.t().contiguous().cumsum(1, dtype=torch.int32).t()
    # The last element of each column is the number of the expert's tokens. Each is rounded up, so that the next
    # expert's rows start at a multiple of the alignment.
    padded = (rank[-1] + (alignment - 1)) // alignment * alignment
    ends = padded.cumsum(0, dtype=torch.int32)
    # `rank` counts from 1. Experts that a token does not have get the row after all others, which sorts last.
    row = rank + (ends - padded - 1)
    if room is not None:
        rows = room.size(ends[-1:], rows)
        row, ends = row.clamp(max=rows), ends.clamp(max=rows)
    row = torch.where(routing_map, row, rows)
    # An expert's rows lie behind those of the experts before it: ascending rows are ascending experts.
    of_token = row.topk(top_k, dim=1, largest=False, sorted=True).values
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)[:, None].expand(-1, top_k)
    # One element more than the buffer: tokens with fewer than K experts write there without a mask, and it is cut off.
    token_of_row = torch.full((rows + 1,), -1, dtype=torch.int32, device=device)
    token_of_row.scatter_(0, of_token.reshape(-1).long(), tokens.reshape(-1))
    token_of_row[rows:] = -1
    starts_of_blocks = torch.arange(0, rows, ALIGNMENT, dtype=torch.int32, device=device)
    block = torch.searchsorted(ends, starts_of_blocks, right=True, out_int32=True)
    return RoutedRows(
        token_of_row=token_of_row[:rows],
        rows_of_token=torch.where(of_token == rows, -1, of_token),
        ends=ends,
        # Blocks past the last expert would get index E, which is out of bounds for tables of scales.
        expert_of_block=block.clamp_(max=num_experts - 1),
    )


def values_of_rows(values: Tensor, rows: RoutedRows) -> Tensor:
    """Values [T, E] of each row's token and expert, [R]; 0 for an empty row. Differentiable."""
    return _ValuesOfRows.apply(values, rows)


class _ValuesOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: RoutedRows) -> Tensor:
        ctx.rows, ctx.shape = rows, values.shape
        experts = rows.expert_of_block.repeat_interleave(ALIGNMENT)
        index = rows.token_of_row.clamp(min=0) * values.shape[1] + experts
        # `where`, not a product: NaN of token 0 cannot reach an empty row.
        return torch.where(rows.token_of_row < 0, 0.0, values.reshape(-1)[index.long()])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Gathered by token. PyTorch's gradient of an index sorts, and adds the zeros of all empty rows to one element,
        # one after the other: with a fifth of the rows empty, 8 ms a layer on an H200.
        at, (num_tokens, num_experts) = ctx.rows.rows_of_token.long(), ctx.shape
        row = at.clamp(min=0)
        experts = torch.where(at < 0, num_experts, ctx.rows.expert_of_block[row // ALIGNMENT])
        # One column more: what a token with fewer experts writes there is cut off.
        return grad.new_zeros(num_tokens, num_experts + 1).scatter_(1, experts.long(), grad[row])[:, :-1], None
