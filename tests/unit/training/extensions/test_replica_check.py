"""Which ranks disagree, from the gathered rows."""

from __future__ import annotations

from megafp8.training.extensions.replica_check import (
    DATA,
    TENSOR,
    RankHashes,
    ReplicaMismatch,
    describe_mismatch,
    find_mismatches,
)

BOTH = (DATA, TENSOR)


def rows(data: int, tensor: int = 1, pipeline: int = 1, **changed: int) -> list[RankHashes]:
    """Ranks in megatron-core's order; `whole3=9` sets the hash of rank 3."""
    made = []
    for rank in range(data * tensor * pipeline):
        position = (rank // (data * tensor), rank % tensor, rank // tensor % data)
        whole, shared = 100 * position[0] + position[1], 1000 + position[0]
        hashes = (changed.get(f"whole{rank}", whole), changed.get(f"shared{rank}", shared), 0)
        made.append(RankHashes(rank, *position, 0, *hashes))
    return made


def test_equal_copies() -> None:
    for layout in ((1,), (4,), (2, 2), (2, 2, 2), (1, 4), (1, 1, 4)):
        assert find_mismatches(rows(*layout)) == []


def test_one_differing_rank_of_four_is_named() -> None:
    assert find_mismatches(rows(4, whole2=9)) == [ReplicaMismatch(DATA, (0, 1, 2, 3), (2,))]


def test_two_differing_ranks_are_both_named() -> None:
    assert find_mismatches(rows(2, whole1=9)) == [ReplicaMismatch(DATA, (0, 1), (0, 1))]
    assert find_mismatches(rows(4, whole1=9, whole3=9)) == [ReplicaMismatch(DATA, (0, 1, 2, 3), (0, 1, 2, 3))]


def test_only_ranks_with_the_same_part_are_compared() -> None:
    """Rank 5 is the first stage's, or the second's, copy. With two tensor ranks it holds the second part."""
    assert find_mismatches(rows(3, 2, 1, whole5=9)) == [ReplicaMismatch(DATA, (1, 3, 5), (5,))]
    assert find_mismatches(rows(2, 2, 2, whole5=9)) == [ReplicaMismatch(DATA, (5, 7), (5, 7))]


def test_tensors_replicated_over_tensor_ranks_are_compared() -> None:
    assert find_mismatches(rows(1, 4, shared1=9)) == [ReplicaMismatch(TENSOR, (0, 1, 2, 3), (1,))]


def test_the_first_tensor_that_differs() -> None:
    by_rank = [[("a", (DATA,), rank), ("b", BOTH, 7), ("c", BOTH, 5 if rank == 1 else 4)] for rank in range(3)]
    found = ReplicaMismatch(TENSOR, (0, 1, 2), (1,))
    assert describe_mismatch(found, by_rank) == "tensor-parallel: rank 1 differs from 0, 2; first tensor: c", (
        "a is split over them"
    )
    found = ReplicaMismatch(DATA, (0, 1, 2), (0, 1, 2))
    assert describe_mismatch(found, by_rank) == "data-parallel: ranks 0, 1, 2, without a majority; first tensor: a"
