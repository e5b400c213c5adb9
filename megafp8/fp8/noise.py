"""Random numbers for stochastic rounding that a run can repeat.

Each draw of a linear has a generator of its own, seeded with who draws (run, layer, linear, rank) and how often it has
drawn before. So the numbers depend neither on other layers, nor on dropout, nor on whether activations are recomputed,
which draws nothing: only gradients are rounded stochastically. The count is in the checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn


class RoundingNoise(nn.Module):
    """A stream of generators.

    Args:
        name: of the stream; equal names give equal numbers, device by device.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.register_buffer("num_draws", torch.zeros(1, dtype=torch.int64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RoundingNoise:
        """Stay on the CPU: reading a count must not stop a device."""
        return self

    def next_generator(self, device: torch.device) -> torch.Generator:
        """A generator for one tensor."""
        digest = hashlib.sha256(f"{self.name}|{self.num_draws.item()}".encode()).digest()
        self.num_draws += 1
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def random_bytes(count: int, generator: torch.Generator) -> Tensor:
    """uint8 [count], all values alike. Eight of them are one draw of 64 bits."""
    words = torch.empty(-(-count // 8), dtype=torch.int64, device=generator.device)
    return words.random_(-(1 << 63), None, generator=generator).view(torch.uint8)[:count]
