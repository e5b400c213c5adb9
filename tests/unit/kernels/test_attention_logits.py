"""The kernel for the largest logits against the same in torch.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

from typing import Optional

import interpreter
import pytest
import torch
from interpreter import DEVICE

interpreter.skip_without_kernels()

from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.kernels import attention_logits as kernel
from megafp8.mcore.zigzag import zigzag_positions
from megafp8.models import attention_logits

LENGTH, BATCH, HEADS, GROUPS = 300, 2, 4, 2
ENDS = (0, 5, 140, 300, 301, 450, 600, 600, 600)  # padded, as in a CUDA graph


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("channels", "window", "has_documents", "rank"),
    [
        (32, None, False, None),
        (24, 100, False, None),
        (64, None, True, None),
        (128, 50, True, None),
        (192, None, False, None),
        (256, 90, True, 1),
    ],
)
def test_the_largest_logits_are_those_of_torch(
    dtype: torch.dtype, channels: int, window: Optional[int], has_documents: bool, rank: Optional[int]
) -> None:
    generator = torch.Generator().manual_seed(1)
    # (B, S, ...) in memory, as packed sequences have it.
    query, key = (
        torch.randn(BATCH, LENGTH, heads, channels, generator=generator).to(dtype).transpose(0, 1)
        for heads in (HEADS, GROUPS)
    )
    positions = torch.arange(LENGTH)
    if rank is not None:  # one of two context-parallel ranks
        positions = zigzag_positions(rank, 2, LENGTH // 2, positions.device)
        query = query[positions]
    ends = torch.tensor(ENDS, dtype=torch.int32) if has_documents else None
    first_key = attention_logits.first_keys(positions, BATCH, LENGTH, window, ends)
    expected = torch.full((HEADS,), -torch.inf)
    expected[0] = 1e3  # of another microbatch
    found = expected.to(DEVICE)
    attention_logits.update_max_logits(expected, query, key, positions, first_key, 0.3)
    arguments = (None if each is None else each.to(DEVICE) for each in (query, key, positions.int(), first_key))
    kernel.update_max_logits(found, *arguments, 0.3)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_negative_logits() -> None:
    query, key = torch.ones(20, 1, 2, 16, device=DEVICE), -torch.ones(20, 1, 1, 16, device=DEVICE)
    found = torch.full((2,), -torch.inf, device=DEVICE)
    kernel.update_max_logits(found, query, key, torch.arange(20, device=DEVICE).int(), None, 0.5)
    assert found.tolist() == [-8, -8]
