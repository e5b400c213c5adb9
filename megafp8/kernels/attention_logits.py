"""The largest attention logit of each head: queries times keys, and nothing else of attention."""

from __future__ import annotations

from typing import Optional

import triton
import triton.language as tl
from torch import Tensor

KEYS_BYTES = 16 * 1024  # of a block of keys
NUM_WARPS, NUM_STAGES = 8, 2  # blocks of queries and keys fit the 99 KiB of shared memory of the smallest GPUs


@triton.jit
def max_logits_kernel(
    query, key, positions, first_key, largest, num_queries, q_token, q_sequence, q_head, k_token, k_sequence, k_head,
    heads, per_group, scale, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    HAS_FIRST: tl.constexpr,
):  # fmt: skip
    """query (S, B, heads, CHANNELS) and key (K, B, groups, CHANNELS) by their strides, WIDTH a power of two.

    NaN is left out.
    """
    # The last queries have most keys: they begin first.
    rows = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES + tl.arange(0, QUERIES)
    is_query = rows < num_queries
    # int64: offsets may exceed 2^31.
    sequence, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    last = tl.load(positions + rows, mask=is_query, other=-1)
    end = tl.max(last) + 1
    first = tl.zeros_like(last)
    if HAS_FIRST:
        first = tl.load(first_key + sequence * num_queries + rows, mask=is_query, other=2147483647)
    channels = tl.arange(0, WIDTH)
    is_channel = channels < CHANNELS
    queries = query + rows.to(tl.int64)[:, None] * q_token + sequence * q_sequence + head * q_head + channels[None, :]
    q = tl.load(queries, mask=is_query[:, None] & is_channel[None, :], other=0.0)
    keys = key + sequence * k_sequence + (head // per_group) * k_head + channels[:, None]
    best = tl.full((QUERIES,), float("-inf"), tl.float32)
    for start in range(tl.min(first) // KEYS * KEYS, end, KEYS):
        columns = start + tl.arange(0, KEYS)
        of_block = keys + columns.to(tl.int64)[None, :] * k_token
        k = tl.load(of_block, mask=(columns < end)[None, :] & is_channel[:, None], other=0.0)
        logits = tl.dot(q, k, input_precision="ieee")
        is_visible = (columns[None, :] <= last[:, None]) & (columns[None, :] >= first[:, None])
        best = tl.maximum(best, tl.max(tl.where(is_visible, logits, float("-inf")), 1))
    tl.atomic_max(largest + head, tl.max(best) * scale)


def update_max_logits(
    largest: Tensor, query: Tensor, key: Tensor, positions: Tensor, first_key: Optional[Tensor], scale: float
) -> None:
    """Raise `largest` to the largest logits; arguments as for `models.attention_logits.update_max_logits`."""
    (num_queries, batch_size, heads, channels), groups = query.shape, key.shape[2]
    assert query.stride(3) == key.stride(3) == 1
    width = triton.next_power_of_2(max(16, channels))
    row_bytes = width * query.itemsize
    block = 128 if row_bytes <= 256 else 64
    max_logits_kernel[(triton.cdiv(num_queries, block), batch_size * heads)](
        query, key, positions, first_key, largest, num_queries, *query.stride()[:3], *key.stride()[:3], heads,
        heads // groups, scale, CHANNELS=channels, WIDTH=width, QUERIES=block,
        KEYS=min(128, max(16, KEYS_BYTES // row_bytes)), HAS_FIRST=first_key is not None, num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )  # fmt: skip
