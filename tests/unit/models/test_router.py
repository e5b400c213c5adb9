"""Gradients of the router's logits as parts in BF16."""

from __future__ import annotations

import torch

from megafp8.models.router import NUM_PARTS, bf16_parts


def test_three_parts_have_all_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 8, generator=generator) * 10.0 ** torch.randint(-20, 20, (64, 8), generator=generator)
    values[0, 0] = 0.0
    parts = bf16_parts(values)
    assert parts.dtype == torch.bfloat16 and parts.shape == (64, NUM_PARTS * 8)
    assert torch.equal(parts.double().view(64, NUM_PARTS, 8).sum(1), values.double())
