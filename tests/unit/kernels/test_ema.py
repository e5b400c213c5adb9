"""The kernel of the moving average against torch operations.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

import interpreter
import pytest
import torch
from interpreter import DEVICE, IS_INTERPRETED
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.kernels.adam import BLOCK, TensorTable
from megafp8.kernels.ema import update_means
from megafp8.kernels.random_rounding import round_at_random

SIZES, POSITIONS, UPDATE = (1, 5, 2 * BLOCK, 40_000), (0, 7, 2**33 + 5, 3), 3


def drawn(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def averaged(weights: list[Tensor], means: list[Tensor], models: list[Tensor | None], share: float) -> None:
    table = TensorTable(list(zip(weights, models, means, strict=True)), BLOCK)
    update_means(table, torch.tensor(POSITIONS, device=DEVICE), share, UPDATE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])
def test_the_mean_is_that_of_torch_operations(dtype: torch.dtype, offset: int) -> None:
    """Also where tensors start at odd addresses, and end within a block. Memory beside them is unchanged."""
    weights = [drawn(size + offset, size)[offset:] for size in SIZES]
    whole = [drawn(size + 2 * offset, size + 1).to(dtype) for size in SIZES]
    means = [each[offset : len(each) - offset] for each in whole]
    before = [each.clone() for each in whole]
    exact = [torch.lerp(mean.float(), weight, 0.25) for mean, weight in zip(means, weights, strict=True)]
    averaged(weights, means, [None] * len(weights), 0.25)
    for weight, mean, expected, position in zip(weights, means, exact, POSITIONS, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(mean, expected, rtol=2**-23, atol=1e-7)  # one rounding less than torch's
            continue
        rounded = round_at_random(expected, weight, position, UPDATE)
        # On a GPU the product is not rounded before the sum, which may be on the other side of a random number.
        assert (mean != rounded).float().mean() <= (0 if IS_INTERPRETED else 1e-3)
        torch.testing.assert_close(mean, rounded, rtol=2**-7, atol=1e-7)
    if offset:
        for each, old in zip(whole, before, strict=True):
            assert torch.equal(each[:offset], old[:offset]) and torch.equal(each[-offset:], old[-offset:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_with_remainders_are_fp32_weights(dtype: torch.dtype) -> None:
    weights = [drawn(size, size) for size in SIZES]
    models = [((weight.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16) for weight in weights]
    plain, other = ([drawn(size, size + 1).to(dtype) for size in SIZES] for _ in range(2))
    averaged(weights, plain, [None] * len(weights), 0.25)
    averaged([weight.view(torch.int32).to(torch.int16) for weight in weights], other, models, 0.25)
    for mean, same in zip(plain, other, strict=True):
        assert torch.equal(mean, same)


def test_the_first_update_copies_the_weights() -> None:
    weights = [drawn(size, size) for size in SIZES]
    means = [torch.zeros_like(weight) for weight in weights]
    averaged(weights, means, [None] * len(weights), 1.0)
    for weight, mean in zip(weights, means, strict=True):
        assert torch.equal(weight, mean)
