"""Values of the rows of a mixture's tokens, and their gradients."""

from __future__ import annotations

from typing import Optional

import pytest
import torch
from torch import Tensor

from megafp8.kernels.routed_rows import ALIGNMENT, RoutedRows, route, values_of_rows

TOKENS, EXPERTS, TOP_K = 100, 16, 4


class FixedRoom:
    """Rows for a given load."""

    def __init__(self, rows: int):
        self.rows = rows

    def size(self, needed: Tensor, worst: int) -> int:
        return self.rows


def by_index(values: Tensor, rows: RoutedRows) -> Tensor:
    """What autograd differentiates itself."""
    index = rows.token_of_row.clamp(min=0) * EXPERTS + rows.expert_of_block.repeat_interleave(ALIGNMENT)
    return torch.where(rows.token_of_row < 0, 0.0, values.reshape(-1)[index.long()])


@pytest.mark.parametrize("room", [None, 128, 1024], ids=["worst case", "too few rows", "more than needed"])
def test_values_and_gradients_of_rows(room: Optional[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(TOKENS, EXPERTS, generator=generator) < 0.15
    rows = route(chosen, TOP_K, None if room is None else FixedRoom(room))
    values = torch.rand(TOKENS, EXPERTS, generator=generator).requires_grad_()
    found, wanted = values_of_rows(values, rows), by_index(values, rows)
    assert torch.equal(found, wanted)
    grad = torch.rand(found.shape, generator=generator)
    (of_found,), (of_wanted,) = (torch.autograd.grad(result, values, grad) for result in (found, wanted))
    assert torch.equal(of_found, of_wanted) and (of_found != 0).any()
