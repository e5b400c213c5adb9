"""Rows of tokens between the memories of GPUs that reach each other: written to their experts, and added up from them.

Buffers of all ranks have the rows [ranks x T]: those of rank r's tokens begin at r x T on every rank. So a row has an
address that needs no exchange of numbers, and the rows of tokens without an expert on a rank are neither sent nor read.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

NO_EXPERT = tl.constexpr(-1.0)
"""In place of the score of an expert that a token does not have. Scores are not negative."""


@triton.jit
def rows_of_peer(addresses, peer, like):
    """The pointer to a peer's buffer, whose numbers have the type of those that `like` points to."""
    return tl.multiple_of(tl.load(addresses + peer).to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def scores_of_peer(scores, token, peer, PEERS: tl.constexpr, NUM_LOCAL: tl.constexpr, EXPERTS: tl.constexpr):
    """A token's scores of a peer's experts [EXPERTS], and whether it has one of them."""
    at = tl.arange(0, EXPERTS)
    found = tl.load(scores + (token * PEERS + peer) * NUM_LOCAL + at, mask=at < NUM_LOCAL, other=NO_EXPERT)
    # A score that is NaN differs from the mark, too: its token has the expert.
    return found, tl.max((found != NO_EXPERT).to(tl.int32)) > 0


@triton.jit
def send_rows_kernel(
    rows, scores, peer_rows, peer_scores, first, width, PEERS: tl.constexpr, NUM_LOCAL: tl.constexpr,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write each row [T, W] to the peers that have an expert of its token, and its scores to all. A program has one
    token."""
    token = tl.program_id(0).to(tl.int64)
    at, experts = tl.arange(0, WIDTH), tl.arange(0, EXPERTS)
    x = tl.load(rows + token * width + at, mask=at < width, other=0.0)
    for peer in range(PEERS):
        found, is_sent = scores_of_peer(scores, token, peer, PEERS, NUM_LOCAL, EXPERTS)
        to = rows_of_peer(peer_rows, peer, rows) + (first + token) * width + at
        tl.store(to, x, mask=(at < width) & is_sent)
        if peer_scores is not None:
            to = rows_of_peer(peer_scores, peer, scores) + (first + token) * NUM_LOCAL + experts
            tl.store(to, found, mask=experts < NUM_LOCAL)


@triton.jit
def add_rows_kernel(
    scores, peer_rows, peer_values, results, values, first, width, PEERS: tl.constexpr, NUM_LOCAL: tl.constexpr,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sums [T, W], in FP32, of a token's rows on the peers that have an expert of it, and the peers' values of all
    experts [T, E]. A program has one token."""
    token = tl.program_id(0).to(tl.int64)
    at, experts = tl.arange(0, WIDTH), tl.arange(0, EXPERTS)
    total = tl.zeros([WIDTH], tl.float32)
    for peer in range(PEERS):
        _, is_read = scores_of_peer(scores, token, peer, PEERS, NUM_LOCAL, EXPERTS)
        row = rows_of_peer(peer_rows, peer, results) + (first + token) * width + at
        total += tl.load(row, mask=(at < width) & is_read, other=0.0).to(tl.float32)
        if peer_values is not None:
            of_peer = rows_of_peer(peer_values, peer, values) + (first + token) * NUM_LOCAL + experts
            found = tl.load(of_peer, mask=experts < NUM_LOCAL, other=0.0)
            tl.store(values + (token * PEERS + peer) * NUM_LOCAL + experts, found, mask=experts < NUM_LOCAL)
    tl.store(results + token * width + at, total.to(results.dtype.element_ty), mask=at < width)


def send_rows(
    rows: Tensor, scores: Tensor, peer_rows: Tensor, peer_scores: Optional[Tensor], rank: int, num_local: int
) -> None:
    """Send the rows of a rank's tokens to the peers that have an expert of them, and the scores to all.

    Args:
        rows: [T, W], contiguous.
        scores: FP32 [T, E of all ranks]; `NO_EXPERT` where a token does not have the expert.
        peer_rows: int64 [ranks], addresses of the buffers [ranks x T, W].
        peer_scores: of the buffers [ranks x T, E of a rank]; None sends none.
        num_local: E of a rank.
    """
    num_tokens, width = rows.shape
    send_rows_kernel[(num_tokens,)](
        rows, scores, peer_rows, peer_scores, rank * num_tokens, width, **_sizes(len(peer_rows), num_local, width)
    )


def add_rows(
    scores: Tensor, peer_rows: Tensor, peer_values: Optional[Tensor], like: Tensor, rank: int, num_local: int
) -> tuple[Tensor, Optional[Tensor]]:
    """Add the rows of each of a rank's tokens over the peers that have an expert of it, in FP32.

    Args:
        scores: as for `send_rows`.
        peer_rows: addresses of the buffers [ranks x T, W].
        peer_values: of the buffers FP32 [ranks x T, E of a rank]; None: there are none.
        like: has W columns, and the dtype of the rows.

    Returns:
        [T, W], and the values of all experts [T, E].
    """
    results = like.new_empty(len(scores), like.shape[1])
    values = None if peer_values is None else torch.empty_like(scores)
    add_rows_kernel[(len(scores),)](
        scores, peer_rows, peer_values, results, values, rank * len(scores), like.shape[1],
        **_sizes(len(peer_rows), num_local, like.shape[1]),
    )  # fmt: skip
    return results, values


def _sizes(num_peers: int, num_local: int, width: int) -> dict[str, int]:
    return {
        "PEERS": num_peers, "NUM_LOCAL": num_local, "EXPERTS": triton.next_power_of_2(num_local),
        "WIDTH": triton.next_power_of_2(width),
    }  # fmt: skip
