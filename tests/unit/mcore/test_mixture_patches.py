"""Patches of mixture-of-experts layers: the faults are still there, and the collectives equal torch's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megafp8.mcore import mixture_patches, modules, patches, router

OF_0_16 = (
    *mixture_patches.ROUTER_GEMM_EVIDENCE,
    *mixture_patches.GATHER_EVIDENCE,
    *modules.EXPERT_RANKS_EVIDENCE,
)
OF_0_19 = (*mixture_patches.GATHER_EVIDENCE_OF_0_19, *modules.QUERY_KEY_NORMS_EVIDENCE)


def is_there(file: str, text: str) -> bool:
    return text in (patches.core_folder() / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(("file", "text"), router.ROUTER_EVIDENCE)
def test_losses_are_multiplied_by_the_tokens_that_the_patch_expects(file: str, text: str) -> None:
    assert is_there(file, text)


@pytest.mark.parametrize(("file", "text"), OF_0_16)
def test_the_faults_are_those_of_0_16(file: str, text: str) -> None:
    assert is_there(file, text) == patches.is_installed("<0.19")


@pytest.mark.parametrize(("file", "text"), OF_0_19)
def test_the_faults_of_0_19_are_still_there(file: str, text: str) -> None:
    assert is_there(file, text) == patches.is_installed(">=0.19")


def exchange(rank_sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    rank, group = dist.get_rank(), dist.group.WORLD
    shard = torch.full((rank_sizes[rank], 2), float(rank + 1))
    gathered = mixture_patches.gather_uneven(shard, rank_sizes, group)
    return gathered, mixture_patches.reduce_scatter_uneven(gathered * (rank + 1), rank_sizes, group)


@pytest.mark.parametrize("sizes", [[3, 1], [0, 2], [0, 0]])
def test_shards_of_different_sizes_are_gathered_and_reduced(sizes: list[int]) -> None:
    expected = torch.cat([torch.full((size, 2), float(rank + 1)) for rank, size in enumerate(sizes)])
    for rank, (gathered, reduced) in enumerate(run_ranks(2, exchange, sizes)):
        assert torch.equal(gathered, expected)
        assert torch.equal(reduced, expected.split(sizes)[rank] * 3)  # the ranks' factors are 1 and 2
