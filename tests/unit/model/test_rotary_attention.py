"""Splitting and rotating in one kernel against the same by slices.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/model`.
"""

from __future__ import annotations

import interpreter
import pytest
import torch
from interpreter import DEVICE
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.device import mcore_cpu  # noqa: E402

mcore_cpu.install()

from megafp8.model.rotary_attention import split_and_rotate  # noqa: E402

LENGTH, BATCH = 5, 2


def angles_of(length: int, dim: int) -> Tensor:
    """As megatron-core makes them: [S, 1, 1, D]."""
    frequencies = 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    half = torch.outer(torch.arange(length).float(), frequencies)
    return torch.cat((half, half), dim=-1)[:, None, None, :].to(DEVICE)


def by_slices(joined: Tensor, angles: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same, slowly, in FP64."""
    length, batch, width = joined.shape
    dim = width // (heads + 2 * groups)
    parts = joined.double().view(length, batch, groups, heads // groups + 2, dim)
    queries = parts[..., :-2, :].reshape(length, batch, heads, dim)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * angles.double().cos() + torch.cat((-second, first), dim=-1) * angles.double().sin()

    return rotated(queries), rotated(parts[..., -2, :]), parts[..., -1, :]


@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 4, 64), (8, 2, 32), (20, 20, 16), (6, 1, 128)])
def test_both_ways_against_slices(heads: int, groups: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(LENGTH, BATCH, (heads + 2 * groups) * dim, generator=generator).to(DEVICE)
    slow, fast = joined.clone().requires_grad_(), joined.clone().requires_grad_()
    angles = angles_of(LENGTH, dim)
    expected, found = by_slices(slow, angles, heads, groups), split_and_rotate(fast, angles, heads, groups)
    for one, other in zip(found, expected, strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)
    weights = [torch.randn(part.shape, generator=generator).to(DEVICE) for part in expected]
    sum((part * weight).sum() for part, weight in zip(expected, weights, strict=True)).backward()
    sum((part * weight).sum() for part, weight in zip(found, weights, strict=True)).backward()
    torch.testing.assert_close(fast.grad, slow.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter cuts bits off where a GPU rounds")
def test_bf16_is_rounded_once() -> None:
    joined = torch.randn(64, 2, 24 * 128, device=DEVICE).bfloat16()
    angles = angles_of(64, 128)
    expected = by_slices(joined.float(), angles, 8, 8)
    found = split_and_rotate(joined, angles, 8, 8)
    for one, other in zip(found, expected, strict=True):
        differs = one != other.bfloat16()
        assert differs.float().mean() < 1e-3  # ties, and cancellation in FP32
        torch.testing.assert_close(one.double(), other, rtol=2**-8, atol=1e-6)
