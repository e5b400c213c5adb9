"""A hash of a tensor's bits, taken on its device, that the order of a sum does not change.

A tensor's bytes are words of 32 bits w_0, w_1, ..., the last one filled with zeros. Modulo 2^64,

    hash = sum over blocks b of  n_b * sum over i of  m_i * w_(b * BLOCK + i)

with odd, random multipliers m and n of 64 bits that every rank has alike. Integers wrap and never round, so the value
is exact whatever the order of the sums. A change of any one word changes it for certain, since an odd multiplier takes
no number but 0 to 0; several changes cancel by chance only, once in 2^32 or less. (Words as wide as the sum would not
do: multiplied by any odd number, the highest bit is the highest bit, and the signs of two numbers would cancel.)

It costs one read of the tensor. Products are made block by block in one buffer that stays in a GPU's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

BLOCK = 1 << 20
MOST_BLOCKS = MOST_TENSORS = 1 << 16
SEED = 20_261_120
WORD_BYTES = 4


class BitHash:
    """Hashes tensors of one device."""

    def __init__(self, device: torch.device):
        self.device = device

    @cached_property
    def multipliers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the words of a block, of the blocks of a tensor, and of tensors: int64, odd.

        They are drawn on the CPU, where a seed gives the same numbers everywhere.
        """
        sizes = [BLOCK, MOST_BLOCKS, MOST_TENSORS]
        drawn = torch.empty(sum(sizes), dtype=torch.int64)
        drawn.random_(-(1 << 63), None, generator=torch.Generator().manual_seed(SEED))
        return (drawn | 1).to(self.device).split(sizes)

    @torch.no_grad()
    def of(self, tensor: Tensor) -> Tensor:
        """The hash of one tensor, int64 scalar on the device; its type and shape do not enter."""
        of_words, of_blocks, _ = self.multipliers
        return weighed(torch.stack([weighed(block, of_words) for block in words(tensor).split(BLOCK)]), of_blocks)

    @torch.no_grad()
    def of_all(self, tensors: Sequence[Tensor]) -> Tensor:
        """The hashes of several, int64 [tensors]."""
        if not tensors:
            return torch.zeros(0, dtype=torch.int64, device=self.device)
        return torch.stack([self.of(tensor) for tensor in tensors])

    @torch.no_grad()
    def combined(self, hashes: Tensor) -> Tensor:
        """One hash of the hashes of several tensors, int64 scalar."""
        return weighed(hashes, self.multipliers[2])


def weighed(numbers: Tensor, multipliers: Tensor) -> Tensor:
    """The sum of numbers times their multipliers, int64 scalar."""
    assert len(numbers) <= len(multipliers), (len(numbers), len(multipliers))
    return (numbers * multipliers[: len(numbers)]).sum()


def words(tensor: Tensor) -> Tensor:
    """A tensor's bits, int32 [ceil(bytes / 4)]: a view of it, or a copy where its memory does not divide."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.data_ptr() % WORD_BYTES or len(flat) % WORD_BYTES:
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % WORD_BYTES))
    return flat.view(torch.int32)
