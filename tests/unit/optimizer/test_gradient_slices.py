"""The slices of a bucket's shards cover each parameter once, and rows of codes belong to one parameter."""

from __future__ import annotations

import pytest
import torch

from megafp8.optimizer.gradient_slices import BLOCK, gather_rows, scatter_rows, split_bucket, split_shards

# Parameters with gaps between them, some shorter than a row, cut by the borders of shards.
RANGES = [(0, 70), (128, 428), (448, 449), (512, 1000)]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
@pytest.mark.parametrize("unquantized", [(), (1,), (0, 3), (0, 1, 2, 3)])
def test_rows_and_unquantized_elements_cover_the_bucket(num_shards: int, unquantized: tuple[int, ...]) -> None:
    gradients = torch.arange(1024, dtype=torch.float32) + 1
    shards = split_bucket(RANGES, [index in unquantized for index in range(4)], len(gradients), num_shards)
    rows = gather_rows(gradients, shards, torch.zeros(BLOCK))
    assert len(shards) == num_shards and rows.shape == (sum(shard.num_rows for shard in shards), BLOCK)
    restored, first = torch.zeros_like(gradients), 0
    for shard in shards:
        values = torch.cat([gradients[slice_.start : slice_.stop] for slice_ in shard.unquantized] or [torch.empty(0)])
        assert len(values) == shard.num_unquantized
        scatter_rows(restored, shard, rows[first : first + shard.num_rows], values)
        first += shard.num_rows
    is_parameter = torch.zeros(1024, dtype=torch.bool)
    for start, stop in RANGES:
        is_parameter[start:stop] = True
    assert torch.equal(restored, gradients * is_parameter)


@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_parts_have_the_rows_of_the_shards(num_parts: int) -> None:
    """In their order, shard by shard, and the unquantized slices once."""
    gradients = torch.arange(1024, dtype=torch.float32) + 1
    shards = split_bucket(RANGES, [False, True, False, False], len(gradients), 3)
    parts = split_shards(shards, num_parts)
    for index, shard in enumerate(shards):
        of_parts = [part[index] for part in parts]
        rows = [gather_rows(gradients, [part], torch.zeros(BLOCK)) for part in of_parts]
        assert torch.equal(torch.cat(rows), gather_rows(gradients, [shard], torch.zeros(BLOCK)))
        assert [slice_ for part in of_parts for slice_ in part.unquantized] == list(shard.unquantized)
        assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_a_row_belongs_to_one_parameter() -> None:
    gradients = torch.zeros(1024)
    for index, (start, stop) in enumerate(RANGES):
        gradients[start:stop] = index + 1
    rows = gather_rows(gradients, split_bucket(RANGES, [False] * 4, 1024, 3), torch.zeros(BLOCK))
    assert all(len(set(row.tolist()) - {0.0}) == 1 for row in rows)
