"""Infinite values behind scales of one: found where they are, and nowhere else."""

from __future__ import annotations

from typing import Any

import interpreter
import pytest
import torch
from interpreter import DEVICE

interpreter.skip_without_kernels()

from megafp8.kernels.infinities import flag_where_scale_is_one

pytestmark = pytest.mark.usefixtures("exact")

ROWS, WIDTH = 200, 144  # no complete tiles


def is_flagged(values: torch.Tensor, scale_inv: torch.Tensor, **options: Any) -> bool:
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    flag_where_scale_is_one(values, scale_inv, flag, **options)
    return bool(flag.item())


def drawn(value: float, row: int, column: int) -> torch.Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    x[row, column] = value
    return x


@pytest.mark.parametrize(("value", "is_found"), [(torch.inf, True), (-torch.inf, True), (448.0, False)])
def test_a_tensor_with_one_scale(value: float, is_found: bool) -> None:
    """The scale of an amax of 448 is 1 too."""
    x = drawn(value, 199, 143)
    x[3, 3] = torch.nan
    assert is_flagged(x, torch.ones(1, device=DEVICE)) is is_found
    assert not is_flagged(x, torch.full((1,), 0.5, device=DEVICE)), "not read"


@pytest.mark.parametrize(("row", "column"), [(0, 0), (130, 5), (199, 143)])
def test_blocks_of_a_row(row: int, column: int) -> None:
    x, scale_inv = drawn(torch.inf, row, column), torch.full((2, 200), 0.5, device=DEVICE)
    scale_inv[1 - column // 128] = 1.0
    assert not is_flagged(x, scale_inv), "other blocks"
    scale_inv[column // 128, row] = 1.0
    assert is_flagged(x, scale_inv)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (130, 5), (199, 143)])
def test_square_blocks(row: int, column: int) -> None:
    x, scale_inv = drawn(torch.inf, row, column), torch.ones(2, 4, device=DEVICE)
    scale_inv[row // 128, column // 128] = 0.5
    assert not is_flagged(x, scale_inv, rows_per_scale=128), "other blocks"
    assert is_flagged(x, torch.ones(2, 4, device=DEVICE), rows_per_scale=128)
