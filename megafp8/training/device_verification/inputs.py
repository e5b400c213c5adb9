"""Tensors whose casts and products are compared."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Complete blocks of every recipe in both dimensions; some incomplete ones of 128.
CAST_SHAPES = ((128, 128), (256, 384), (64, 1024), (160, 544))
MANY_SIZES = "rows of many sizes"
LINEAR_SIZES = ((256, 512, 384), (1024, 4096, 512))  # tokens, inputs, outputs


def cast_inputs(shape: tuple[int, int]) -> Iterator[tuple[str, Tensor]]:
    """Distributions that break quantizers, with their names; BF16 on the CPU."""
    generator = torch.Generator().manual_seed(shape[0] * 10_000 + shape[1])
    normal = torch.randn(shape, generator=generator)
    exponents = torch.randint(-12, 12, (shape[0], 1), generator=generator).float()

    def with_value(row: int, column: int, value: float) -> Tensor:
        return normal.clone().index_put_((torch.tensor(row), torch.tensor(column)), torch.tensor(value))

    found = {
        "normal": normal,
        "tiny": normal * 1e-30,
        "huge": normal * 1e30,
        MANY_SIZES: normal * 10**exponents,
        "columns of many sizes": normal * torch.logspace(-6, 6, shape[1]),
        "one outlier": with_value(3, 5, 1e30),
        "blocks of zeros": normal * (torch.arange(shape[0]) // 32 % 2)[:, None],
        "all zero": torch.zeros(shape),
        "equal": torch.full(shape, 0.3),
        "subnormal": normal * 1e-40,
        "an infinity": with_value(0, 1, float("inf")),
        "a NaN": with_value(7, 2, float("nan")),
    }
    for name, tensor in found.items():
        yield name, tensor.bfloat16()


def linear_inputs(tokens: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input [T, K], weight [N, K] and output gradient [T, N] in BF16. Columns of the input differ in size, as those of
    activations do."""
    generator = torch.Generator().manual_seed(tokens + inputs + outputs)
    x = torch.randn(tokens, inputs, generator=generator) * torch.exp2(4 * torch.rand(inputs, generator=generator))
    w = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    dy = torch.randn(tokens, outputs, generator=generator)
    return x.bfloat16(), w.bfloat16(), dy.bfloat16()
