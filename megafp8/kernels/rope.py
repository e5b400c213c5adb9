"""Kernels of self-attention's QKV split and rotary position embedding: one launch forward, one backward.

For every token, `linear_qkv` returns G groups of R queries, a key and a value, each a head of D numbers. megatron-core
slices and copies them, rotates tensor by tensor, and concatenates their gradients. Here one kernel reads the heads of a
token once and writes queries, keys and values in the layout of attention: token by token of all sequences, or sequence
by sequence where documents are packed. In the backward pass one kernel rotates by the opposite angles and writes the
joined gradient. Both read and write each number once.

    (y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin)      x1, x2: first and second half of a head

The rotation is FP32, rounded once, with the fused multiply-adds of Transformer Engine's kernel, and equals it to the
bit. Where the joined gradient is cast by current scaling next, the backward kernel also computes its amax, and the
gradient is annotated with it (`annotations.py`).

A program has TOKENS tokens and GROUPS groups. Cosines and sines of its tokens are computed once, for all heads. GROUPS
divides the number of groups, so that only tokens are masked.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.annotations import annotate

# Of one program; tuned with benchmarks/gpu_rope.py. A thread has 8 adjacent numbers of a half head, its widest load.
TOKENS = 16
GROUPS = 4
NUM_WARPS = 4


@triton.jit
def angles_of(angles, token, mask, batch, HALF: tl.constexpr):
    """Cosines and sines [TOKENS, HALF] of tokens [TOKENS], which are indices over sequence and batch."""
    d = tl.arange(0, HALF)
    # Angles are [S, D], one row for all of a batch; the second half repeats the first.
    angle = tl.load(angles + (token // batch)[:, None] * (2 * HALF) + d[None, :], mask=mask, other=0.0)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def larger(largest, x1, x2):
    """Elementwise maximum of `largest` and the magnitudes of x1 and x2; NaN is ignored."""
    return tl.maximum(largest, tl.maximum(tl.abs(x1), tl.abs(x2)))


@triton.jit
def split_and_rotate_kernel(
    joined, angles, queries, keys, values, tokens, batch, next_token, next_sequence, groups, per_group,
    HALF: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """joined [S, B, G, R + 2, D] to queries [S, B, G, R, D], keys and values [S, B, G, D].

    In these three, token s of sequence b is number s * next_token + b * next_sequence.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = (token < tokens)[:, None]
    cos, sin = angles_of(angles, token, mask, batch, HALF)
    places = (token // batch) * next_token + (token % batch) * next_sequence
    d = tl.arange(0, HALF)[None, :]
    for index in range(GROUPS):
        # int64: offsets may exceed 2^31.
        group = token.to(tl.int64) * groups + (tl.program_id(1) * GROUPS + index)
        source = joined + (group * (per_group + 2) * (2 * HALF))[:, None] + d
        place = places.to(tl.int64) * groups + (tl.program_id(1) * GROUPS + index)
        query = queries + (place * per_group * (2 * HALF))[:, None] + d
        other = (place * (2 * HALF))[:, None] + d
        key = source + per_group * (2 * HALF)
        k1 = tl.load(key, mask=mask).to(tl.float32)
        k2 = tl.load(key + HALF, mask=mask).to(tl.float32)
        v1 = tl.load(key + 2 * HALF, mask=mask)
        v2 = tl.load(key + 3 * HALF, mask=mask)
        for _ in range(per_group):
            x1 = tl.load(source, mask=mask).to(tl.float32)
            x2 = tl.load(source + HALF, mask=mask).to(tl.float32)
            tl.store(query, tl.fma(x1, cos, (-x2) * sin), mask=mask)
            tl.store(query + HALF, tl.fma(x2, cos, x1 * sin), mask=mask)
            source += 2 * HALF
            query += 2 * HALF
        tl.store(keys + other, tl.fma(k1, cos, (-k2) * sin), mask=mask)
        tl.store(keys + other + HALF, tl.fma(k2, cos, k1 * sin), mask=mask)
        tl.store(values + other, v1, mask=mask)
        tl.store(values + other + HALF, v2, mask=mask)


@triton.jit
def rotate_back_and_join_kernel(
    joined, angles, queries, keys, values, amax, tokens, batch, next_token, next_sequence, groups, per_group,
    HALF: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, keys and values to the joined gradient, rotated by the opposite angles.

    `amax` is raised from 0 to the amax of the joined gradient, which ignores NaN; None does not compute it.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = (token < tokens)[:, None]
    cos, sin = angles_of(angles, token, mask, batch, HALF)
    places = (token // batch) * next_token + (token % batch) * next_sequence
    d = tl.arange(0, HALF)[None, :]
    largest = tl.zeros([TOKENS, HALF], tl.float32)
    for index in range(GROUPS):
        # int64: offsets may exceed 2^31.
        group = token.to(tl.int64) * groups + (tl.program_id(1) * GROUPS + index)
        target = joined + (group * (per_group + 2) * (2 * HALF))[:, None] + d
        place = places.to(tl.int64) * groups + (tl.program_id(1) * GROUPS + index)
        query = queries + (place * per_group * (2 * HALF))[:, None] + d
        other = (place * (2 * HALF))[:, None] + d
        k1 = tl.load(keys + other, mask=mask).to(tl.float32)
        k2 = tl.load(keys + other + HALF, mask=mask).to(tl.float32)
        v1 = tl.load(values + other, mask=mask)
        v2 = tl.load(values + other + HALF, mask=mask)
        for _ in range(per_group):
            y1 = tl.load(query, mask=mask).to(tl.float32)
            y2 = tl.load(query + HALF, mask=mask).to(tl.float32)
            x1, x2 = tl.fma(y1, cos, y2 * sin), tl.fma(y2, cos, y1 * (-sin))
            tl.store(target, x1, mask=mask)
            tl.store(target + HALF, x2, mask=mask)
            largest = larger(largest, x1, x2)
            target += 2 * HALF
            query += 2 * HALF
        x1, x2 = tl.fma(k1, cos, k2 * sin), tl.fma(k2, cos, k1 * (-sin))
        tl.store(target, x1, mask=mask)
        tl.store(target + HALF, x2, mask=mask)
        tl.store(target + 2 * HALF, v1, mask=mask)
        tl.store(target + 3 * HALF, v2, mask=mask)
        largest = larger(larger(largest, x1, x2), v1.to(tl.float32), v2.to(tl.float32))
    if amax is not None:
        # Rounding is monotonic: the rounded amax is the amax of the rounded numbers. The atomic operation may be
        # relaxed, because only a later kernel reads the result.
        # Masked rows loaded undefined values: they must not reach the maximum.
        largest = tl.max(tl.where(mask, largest, 0.0)).to(joined.dtype.element_ty).to(tl.float32)
        tl.atomic_max(amax, largest, sem="relaxed")


class SplitAndRotate(torch.autograd.Function):
    """The two kernels as a differentiable function."""

    @staticmethod
    def forward(
        ctx: Any, joined: Tensor, angles: Tensor, heads: int, groups: int, is_packed: bool, records_amax: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        length, batch, width = joined.shape
        dim = width // (heads + 2 * groups)
        ctx.save_for_backward(angles)
        ctx.sizes, ctx.is_packed, ctx.records_amax = (heads, groups), is_packed, records_amax
        outer = (batch, length) if is_packed else (length, batch)
        parts = [joined.new_empty(*outer, count, dim) for count in (heads, groups, groups)]
        parts = [part.transpose(0, 1) for part in parts] if is_packed else parts
        launch(split_and_rotate_kernel, joined.contiguous(), angles, *parts, is_packed=is_packed)
        return parts[0], parts[1], parts[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Optional[Tensor], ...]:
        (angles,) = ctx.saved_tensors
        heads, groups = ctx.sizes
        queries, keys, values = (in_order(gradient, ctx.is_packed) for gradient in gradients)
        length, batch, _, dim = queries.shape
        joined = queries.new_empty(length, batch, (heads + 2 * groups) * dim)
        amax = joined.new_zeros(1, dtype=torch.float32) if ctx.records_amax else None
        launch(rotate_back_and_join_kernel, joined, angles, queries, keys, values, amax, is_packed=ctx.is_packed)
        if amax is not None:
            annotate(joined, "amax", amax)
        return joined, None, None, None, None, None


def in_order(tensor: Tensor, is_packed: bool) -> Tensor:
    """A tensor [S, B, heads, D] whose memory has one sequence after the other, or is contiguous."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1) if is_packed else tensor.contiguous()


def launch(
    kernel: Any, joined: Tensor, angles: Tensor, queries: Tensor, keys: Tensor, values: Tensor,
    *amax: Optional[Tensor], is_packed: bool = False,
) -> None:  # fmt: skip
    """Launch a kernel on all tokens; the backward kernel also takes `amax`, FP32 [1] or None."""
    length, batch, heads, dim = queries.shape
    groups = keys.shape[2]
    groups_of_program = math.gcd(groups, GROUPS)
    grid = (triton.cdiv(length * batch, TOKENS), groups // groups_of_program)
    next_token, next_sequence = (1, length) if is_packed else (batch, 1)
    kernel[grid](
        joined, angles, queries, keys, values, *amax, length * batch, batch, next_token, next_sequence, groups,
        heads // groups, HALF=dim // 2, TOKENS=TOKENS, GROUPS=groups_of_program, num_warps=NUM_WARPS,
    )  # fmt: skip


def split_and_rotate(
    joined: Tensor, angles: Tensor, heads: int, groups: int, is_packed: bool = False, records_amax: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split into queries, keys and values and rotate queries and keys.

    Args:
        joined: [S, B, (heads + 2 groups) D], BF16, FP16 or FP32: in each group its queries, then a key and a value.
        angles: FP32 [S, ..., D] of S D numbers, whose second half repeats the first.
        heads: queries of a token, a multiple of `groups`.
        is_packed: the memory of the results has one sequence after the other, as kernels for documents take them.
        records_amax: annotate the gradient of `joined` with its amax.

    Returns:
        [S, B, heads, D], [S, B, groups, D] and [S, B, groups, D] in the dtype of `joined`; contiguous if not packed.
    """
    return SplitAndRotate.apply(joined, angles, heads, groups, is_packed, records_amax)
