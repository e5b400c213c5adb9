"""Gradients to codes in messages, and received codes to sums, in one launch each, against torch operations: every bit.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import interpreter
import pytest
import torch
from interpreter import DEVICE
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.kernels.gradient_rows import ROWS
from megafp8.mcore.grad_reduction import Reduction
from megafp8.optimizer import fp8_gradients
from megafp8.optimizer.fp8_gradients import MESSAGE_ALIGNMENT, BucketReduction, Fp8Reduction, GradientCodes
from megafp8.optimizer.fused_gradient_rows import FusedRows
from megafp8.optimizer.gradient_slices import BLOCK, split_bucket
from megafp8.recipes.formats import E4M3, E5M2, Format

pytestmark = pytest.mark.usefixtures("exact")

# Ends of parameters within rows, a parameter of more than one program, and one that is not quantized.
RANGES = [(0, 200), (256, 700), (704, 705), (768, 900), (900, 900 + 2 * ROWS * BLOCK + 77)]
# The same with all places multiples of 16 bytes, as in megatron-core's buffers.
ALIGNED_RANGES = [(0, 200), (256, 704), (704, 720), (768, 912), (912, 912 + 2 * ROWS * BLOCK + 112)]
NUM_ELEMENTS = ALIGNED_RANGES[-1][1]  # of both, with shards of a multiple of 16 bytes
IS_UNQUANTIZED = [False, False, True, True, False]
RANKS = 3


def gradients_of(rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(NUM_ELEMENTS, generator=generator) * torch.logspace(-8, 2, NUM_ELEMENTS)
    values[::7] *= 1e-9
    values[300:460] = 0
    values[1000 + rank], values[2000], values[3000 + rank] = torch.nan, torch.inf, -torch.inf
    return values.to(dtype).to(DEVICE)


def reductions_of(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    fmt: Format,
    is_blockwise: bool = True,
    ranges: list[tuple[int, int]] = RANGES,
) -> tuple[list[Any], list[Any]]:
    """By rank, with kernels and in torch operations. Amaxes are not reduced over the ranks."""
    monkeypatch.setattr(fp8_gradients, "reduce_amax", lambda amax, group: None)
    shards = split_bucket(ranges, IS_UNQUANTIZED, NUM_ELEMENTS, RANKS)
    settings = GradientCodes(format=fmt, is_blockwise=is_blockwise, has_feedback=False)
    both = []
    for has_kernels in (True, False):
        monkeypatch.setattr(fp8_gradients, "has_kernels", lambda tensor, has=has_kernels: has)
        of_ranks = []
        for rank in range(RANKS):
            group: Any = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: RANKS)
            step = Fp8Reduction(torch.device(DEVICE))
            of_ranks.append(BucketReduction(gradients_of(rank, dtype), shards, len(RANGES), group, settings, step))
            of_ranks[-1].sample = 3
        both.append(of_ranks)
    return both[0], both[1]


def messages_of(reduction: Any, gradients: Tensor) -> tuple[list[Tensor], Any]:
    """By receiving rank; and the dequant scales."""
    if reduction.fused is not None:
        message, scales = reduction._encode_fused(reduction.fused, gradients)
        return list(message.split(reduction.fused.sizes)), scales
    codes, scales, sent_scales = reduction._encode(gradients)
    message, sizes = reduction._pack(gradients, codes, sent_scales)
    return list(message.split(sizes)), scales


@pytest.mark.parametrize("is_blockwise", [True, False], ids=["block", "tensor"])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranges", [RANGES, ALIGNED_RANGES], ids=["odd", "aligned"])
def test_messages_counts_and_sums(
    monkeypatch: pytest.MonkeyPatch,
    ranges: list[tuple[int, int]],
    dtype: torch.dtype,
    fmt: Format,
    is_blockwise: bool,
) -> None:
    fused, plain = reductions_of(monkeypatch, dtype, fmt, is_blockwise, ranges)
    assert isinstance(fused[0].fused, FusedRows) and plain[0].fused is None
    assert fused[0].fused._alignment == (1 if ranges is RANGES else 16 // dtype.itemsize)
    for step in [each.step for each in (*fused, *plain)]:
        step.begin_step(64.0)  # so that some values saturate
    sent: dict[bool, list[list[Tensor]]] = {}
    scales: dict[bool, list[Any]] = {}
    for is_fused, of_ranks in ((True, fused), (False, plain)):
        both = [messages_of(each, gradients_of(rank, dtype)) for rank, each in enumerate(of_ranks)]
        sent[is_fused], scales[is_fused] = [each for each, _ in both], [each for _, each in both]
    row_bytes = BLOCK + is_blockwise
    used = [shard.num_unquantized * dtype.itemsize + shard.num_rows * row_bytes for shard in fused[0].shards]
    for ours, expected in zip(sent[True], sent[False], strict=True):
        assert [len(each) for each in ours] == [len(each) for each in expected]
        assert all(len(each) % MESSAGE_ALIGNMENT == 0 for each in ours)
        for one, other, size in zip(ours, expected, used, strict=True):
            assert torch.equal(one[:size], other[:size])
    for one, other in zip(fused, plain, strict=True):
        assert one.step.counts[0] > 100 and torch.equal(one.step.counts, other.step.counts)
        assert is_blockwise or one.step.counts[2] > 0
    for is_average in (False, True):
        for rank in range(RANKS):
            received = torch.cat([messages[rank] for messages in sent[True]])
            results = []
            for is_fused, of_ranks in ((True, fused), (False, plain)):
                gradients = gradients_of(rank, dtype)
                of_ranks[rank]._finish(Reduction(gradients, False, is_average), received, scales[is_fused][rank])
                results.append(gradients)
            torch.testing.assert_close(results[0], results[1], rtol=0, atol=0, equal_nan=True)
            assert not torch.equal(results[0], gradients_of(rank, dtype))


def test_rows_of_an_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, plain = reductions_of(monkeypatch, torch.float32, E4M3)
    received = [messages_of(each, gradients_of(rank, torch.float32))[0][1] for rank, each in enumerate(fused)]
    received = torch.cat(received)
    rows = fused[1].fused.add_to_rows(received, None, RANKS, 1)
    torch.testing.assert_close(rows, plain[1]._add(received, None), rtol=0, atol=0, equal_nan=True)
