"""The pieces of a bucket's shards cover each parameter once, and rows of codes belong to one parameter."""

from __future__ import annotations

import pytest
import torch

from megafp8.optimizer.gradient_pieces import ROW, gather_rows, scatter_rows, split_bucket, split_shards

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


@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_parts_have_the_rows_of_the_shards(num_parts: int) -> None:
    """In their order, shard by shard, and the exact pieces once."""
    gradients = torch.arange(1024, dtype=torch.float32) + 1
    shards = split_bucket(RANGES, [False, True, False, False], len(gradients), 3)
    parts = split_shards(shards, num_parts)
    for index, shard in enumerate(shards):
        of_parts = [part[index] for part in parts]
        rows = [gather_rows(gradients, [part], torch.zeros(ROW)) for part in of_parts]
        assert torch.equal(torch.cat(rows), gather_rows(gradients, [shard], torch.zeros(ROW)))
        assert [piece for part in of_parts for piece in part.exact] == list(shard.exact)
        assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_a_row_belongs_to_one_parameter() -> None:
    gradients = torch.zeros(1024)
    for index, (start, stop) in enumerate(RANGES):
        gradients[start:stop] = index + 1
    rows = gather_rows(gradients, split_bucket(RANGES, [False] * 4, 1024, 3), torch.zeros(ROW))
    assert all(len(set(row.tolist()) - {0.0}) == 1 for row in rows)
