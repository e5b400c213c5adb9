"""Self-attention that splits its input and rotates queries and keys in one kernel, each way.

The linear before attention gives, for every token, G groups of R queries, a key and a value, each a head of D numbers.
Upstream they are sliced apart, copied, rotated tensor by tensor, and their gradients joined again. Here one kernel
reads a token's heads once and writes queries, keys and values where attention wants them; backward one kernel rotates
the other way and writes the joined gradient.

    (y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin)      x1, x2: first and second half of a head

In FP32, rounded once, with the fused multiply-adds of Transformer Engine's kernel, whose bits it gives. Where the
joined gradient is cast by its own amax, the kernel that writes it notes that."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.annotations import annotate

# Of one program; measured with benchmarks/gpu_rope.py. A thread has 8 neighbours of a half head, its widest load.
TOKENS = 16
GROUPS = 4
NUM_WARPS = 4


@triton.jit
def angles_of(angles, token, is_there, batch, HALF: tl.constexpr):
    """Cosines and sines [TOKENS, HALF] of tokens [TOKENS], which are counted over sequence and batch."""
    d = tl.arange(0, HALF)
    angle = tl.load(angles + (token // batch)[:, None] * (2 * HALF) + d[None, :], mask=is_there, other=0.0)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def larger(largest, x1, x2):
    """Magnitudes so far or these, NaN being none."""
    return tl.maximum(largest, tl.maximum(tl.abs(x1), tl.abs(x2)))


@triton.jit
def split_and_rotate_kernel(
    joined, angles, queries, keys, values, tokens, batch, groups, per_group, HALF: tl.constexpr, TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Some groups of some tokens: joined [S, B, G, R + 2, D] to queries [S, B, G, R, D], keys, values [S, B, G, D]."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_there = (token < tokens)[:, None]
    cos, sin = angles_of(angles, token, is_there, batch, HALF)
    d = tl.arange(0, HALF)[None, :]
    for index in range(GROUPS):
        group = token.to(tl.int64) * groups + (tl.program_id(1) * GROUPS + index)
        source = joined + (group * (per_group + 2) * (2 * HALF))[:, None] + d
        query = queries + (group * per_group * (2 * HALF))[:, None] + d
        other = (group * (2 * HALF))[:, None] + d
        key = source + per_group * (2 * HALF)
        k1 = tl.load(key, mask=is_there).to(tl.float32)
        k2 = tl.load(key + HALF, mask=is_there).to(tl.float32)
        v1 = tl.load(key + 2 * HALF, mask=is_there)
        v2 = tl.load(key + 3 * HALF, mask=is_there)
        for _ in range(per_group):
            x1 = tl.load(source, mask=is_there).to(tl.float32)
            x2 = tl.load(source + HALF, mask=is_there).to(tl.float32)
            tl.store(query, tl.fma(x1, cos, (-x2) * sin), mask=is_there)
            tl.store(query + HALF, tl.fma(x2, cos, x1 * sin), mask=is_there)
            source += 2 * HALF
            query += 2 * HALF
        tl.store(keys + other, tl.fma(k1, cos, (-k2) * sin), mask=is_there)
        tl.store(keys + other + HALF, tl.fma(k2, cos, k1 * sin), mask=is_there)
        tl.store(values + other, v1, mask=is_there)
        tl.store(values + other + HALF, v2, mask=is_there)


@triton.jit
def rotate_back_and_join_kernel(
    joined, angles, queries, keys, values, amax, tokens, batch, groups, per_group, HALF: tl.constexpr,
    TOKENS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The gradient's way: queries, keys and values to joined, rotated by the opposite angles.

    `amax`, 0 before, becomes the largest magnitude in joined, where NaN counts as nothing; None leaves it out.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_there = (token < tokens)[:, None]
    cos, sin = angles_of(angles, token, is_there, batch, HALF)
    d = tl.arange(0, HALF)[None, :]
    largest = tl.zeros([TOKENS, HALF], tl.float32)
    for index in range(GROUPS):
        group = token.to(tl.int64) * groups + (tl.program_id(1) * GROUPS + index)
        target = joined + (group * (per_group + 2) * (2 * HALF))[:, None] + d
        query = queries + (group * per_group * (2 * HALF))[:, None] + d
        other = (group * (2 * HALF))[:, None] + d
        k1 = tl.load(keys + other, mask=is_there).to(tl.float32)
        k2 = tl.load(keys + other + HALF, mask=is_there).to(tl.float32)
        v1 = tl.load(values + other, mask=is_there)
        v2 = tl.load(values + other + HALF, mask=is_there)
        for _ in range(per_group):
            y1 = tl.load(query, mask=is_there).to(tl.float32)
            y2 = tl.load(query + HALF, mask=is_there).to(tl.float32)
            x1, x2 = tl.fma(y1, cos, y2 * sin), tl.fma(y2, cos, y1 * (-sin))
            tl.store(target, x1, mask=is_there)
            tl.store(target + HALF, x2, mask=is_there)
            largest = larger(largest, x1, x2)
            target += 2 * HALF
            query += 2 * HALF
        x1, x2 = tl.fma(k1, cos, k2 * sin), tl.fma(k2, cos, k1 * (-sin))
        tl.store(target, x1, mask=is_there)
        tl.store(target + HALF, x2, mask=is_there)
        tl.store(target + 2 * HALF, v1, mask=is_there)
        tl.store(target + 3 * HALF, v2, mask=is_there)
        largest = larger(larger(largest, x1, x2), v1.to(tl.float32), v2.to(tl.float32))
    if amax is not None:
        # Rounding keeps the order: the largest, rounded, is the largest of the rounded. Its reader is a later kernel.
        largest = tl.max(tl.where(is_there, largest, 0.0)).to(joined.dtype.element_ty).to(tl.float32)
        tl.atomic_max(amax, largest, sem="relaxed")


class SplitAndRotate(torch.autograd.Function):
    """The two kernels as one differentiable function."""

    @staticmethod
    def forward(
        ctx: Any, joined: Tensor, angles: Tensor, heads: int, groups: int, notes_amax: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        length, batch, width = joined.shape
        dim = width // (heads + 2 * groups)
        ctx.save_for_backward(angles)
        ctx.sizes, ctx.notes_amax = (heads, groups), notes_amax
        queries, keys, values = (joined.new_empty(length, batch, count, dim) for count in (heads, groups, groups))
        launch(split_and_rotate_kernel, joined.contiguous(), angles, queries, keys, values)
        return queries, keys, values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (angles,) = ctx.saved_tensors
        heads, groups = ctx.sizes
        queries, keys, values = (gradient.contiguous() for gradient in gradients)
        length, batch, _, dim = queries.shape
        joined = queries.new_empty(length, batch, (heads + 2 * groups) * dim)
        amax = joined.new_zeros(1, dtype=torch.float32) if ctx.notes_amax else None
        launch(rotate_back_and_join_kernel, joined, angles, queries, keys, values, amax)
        if amax is not None:
            annotate(joined, "amax", amax)
        return joined, None, None, None, None


def launch(
    kernel: Any, joined: Tensor, angles: Tensor, queries: Tensor, keys: Tensor, values: Tensor,
    *amax: Optional[Tensor],
) -> None:  # fmt: skip
    """Start one of the kernels on all tokens; the one backward takes an amax, too, FP32 [1], or None."""
    length, batch, heads, dim = queries.shape
    groups = keys.shape[2]
    groups_of_program = math.gcd(groups, GROUPS)
    grid = (triton.cdiv(length * batch, TOKENS), groups // groups_of_program)
    kernel[grid](
        joined, angles, queries, keys, values, *amax, length * batch, batch, groups, heads // groups,
        HALF=dim // 2, TOKENS=TOKENS, GROUPS=groups_of_program, num_warps=NUM_WARPS,
    )  # fmt: skip


def split_and_rotate(
    joined: Tensor, angles: Tensor, heads: int, groups: int, notes_amax: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all tokens, contiguous, queries and keys rotated.

    Args:
        joined: [S, B, (heads + 2 groups) D], BF16, FP16 or FP32: in each group its queries, then a key and a value.
        angles: FP32 [S, ..., D] of S D numbers, whose second half repeats the first.
        heads: queries of a token; a multiple of `groups`.
        notes_amax: of the gradient of `joined` (`notes.py`).

    Returns:
        [S, B, heads, D], [S, B, groups, D] and [S, B, groups, D] in the dtype of `joined`.
    """
    return SplitAndRotate.apply(joined, angles, heads, groups, notes_amax)
