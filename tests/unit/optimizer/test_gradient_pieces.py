"""The pieces of a bucket's shards cover each parameter once, and rows of codes belong to one parameter."""

from __future__ import annotations

import pytest
import torch

from megafp8.optimizer.gradient_pieces import ROW, gather_rows, scatter_rows, split_bucket

# Parameters with gaps between them, some shorter than a row, cut by the borders of shards.
RANGES = [(0, 70), (128, 428), (448, 449), (512, 1000)]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
@pytest.mark.parametrize("exact", [(), (1,), (0, 3), (0, 1, 2, 3)])
def test_rows_and_exact_elements_cover_the_bucket(num_shards: int, exact: tuple[int, ...]) -> None:
    gradients = torch.arange(1024, dtype=torch.float32) + 1
    shards = split_bucket(RANGES, [index in exact for index in range(4)], len(gradients), num_shards)
    rows = gather_rows(gradients, shards, torch.zeros(ROW))
    assert len(shards) == num_shards and rows.shape == (sum(shard.num_rows for shard in shards), ROW)
    restored, first = torch.zeros_like(gradients), 0
    for shard in shards:
        values = torch.cat([gradients[piece.start : piece.stop] for piece in shard.exact] or [torch.empty(0)])
        assert len(values) == shard.num_exact
        scatter_rows(restored, shard, rows[first : first + shard.num_rows], values)
        first += shard.num_rows
    is_parameter = torch.zeros(1024, dtype=torch.bool)
    for start, stop in RANGES:
        is_parameter[start:stop] = True
    assert torch.equal(restored, gradients * is_parameter)


def test_a_row_belongs_to_one_parameter() -> None:
    gradients = torch.zeros(1024)
    for index, (start, stop) in enumerate(RANGES):
        gradients[start:stop] = index + 1
    rows = gather_rows(gradients, split_bucket(RANGES, [False] * 4, 1024, 3), torch.zeros(ROW))
    assert all(len(set(row.tolist()) - {0.0}) == 1 for row in rows)
