"""Detection of slow ranks."""

from __future__ import annotations

import pytest
import torch

from megafp8.training.extensions.stragglers import slow_ranks


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        ([100], []),
        ([100, 140], []),
        ([100, 160], [1]),
        ([160, 100], [0]),
        ([100, 100, 151, 100], [2]),
        ([100, 100, 900, 100, 200, 100], [2, 4]),
        ([0, 0], []),  # nothing is reduced, so nothing is known
        ([0, 50], []),
    ],
)
def test_slow_ranks_of_a_stage_are_found(times: list[float], slow: list[int]) -> None:
    found = slow_ranks(torch.tensor([[ms, 0.0] for ms in times], dtype=torch.float64))
    assert [int(text.split()[1]) for text in found] == slow


def test_stages_are_not_compared() -> None:
    """The first stage has its gradients last."""
    times = torch.tensor([[300.0, 0.0], [310.0, 0.0], [100.0, 1.0], [250.0, 1.0]], dtype=torch.float64)
    assert slow_ranks(times) == [
        "rank 3 needs 250 ms per step until its gradients are ready, 2.5 times the median of 100 ms"
    ]
