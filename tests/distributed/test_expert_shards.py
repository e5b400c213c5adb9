"""Stacked experts are in a checkpoint as the experts that are linears of their own, on any expert-parallel ranks."""

from __future__ import annotations

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from ranks import run_ranks
from small_run import build_run, small_config
from torch import Tensor, nn

from megafp8.models.experts import PaddedExperts
from megafp8.models.grouped_moe import ExchangedExperts
from megafp8.models.initialization import initialize_block

EXPERTS = (
    "--num-layers 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
    "--bf16"
)
DELAYED = "--transformer-impl emulated --fp8-format e4m3 --fp8-recipe delayed --fp8-amax-history-len 4"
Parts = dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], Tensor]]


@torch.no_grad()
def parts_of(experts: nn.Module, metadata: object) -> Parts:
    """By key and offset, the global shape and the values of a new run."""
    found: Parts = {}
    for leaf in nested_values(experts.sharded_state_dict(prefix="mlp.experts.", metadata=metadata)):
        parts = nested_values(leaf.build()) if isinstance(leaf, ShardedTensorFactory) else (leaf,)
        for part in parts:
            if isinstance(part, ShardedTensor):
                initialize_block(part, experts.config, 0)
                found[part.key, tuple(part.global_offset)] = tuple(part.global_shape), part.data.clone()
    return found


def both(world_size: int, flags: str) -> tuple[Parts, Parts, bool]:
    """The parts of linears and of stacked weights, and whether stacked weights are reduced over all data ranks."""
    config = small_config("llama", f"{EXPERTS} --expert-model-parallel-size {world_size} {flags}", world_size)
    linears = next(m for m in build_run(config).training_state.chunks[0].modules() if isinstance(m, PaddedExperts))
    groups = get_default_pg_collection()
    recipe = getattr(linears.local_experts[0].linear_fc1, "recipe", None)
    stacked = ExchangedExperts(linears.num_local_experts, linears.config, groups, recipe)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return parts_of(linears, metadata), parts_of(stacked, metadata), stacked.linear_fc1.allreduce


@pytest.mark.parametrize(
    ("world_size", "flags", "num_tensors"),
    [
        pytest.param(1, "--transformer-impl local", 3, id="one"),
        pytest.param(2, "--transformer-impl local", 3, id="ep2"),
        pytest.param(2, DELAYED, 3 + 2 * 2, id="ep2-delayed"),
    ],
)
def test_stacked_experts_have_the_parts_of_linears(world_size: int, flags: str, num_tensors: int) -> None:
    """Gate, up and down of four experts; with delayed scaling history and scale of both linears."""
    keys = set()
    for linears, stacked, is_shared in run_ranks(world_size, both, world_size, flags):
        assert linears.keys() == stacked.keys() and is_shared == (world_size == 1)
        keys |= stacked.keys()
        for name, (shape, values) in linears.items():
            assert stacked[name][0] == shape and torch.equal(stacked[name][1], values)
    assert len(keys) == 4 * num_tensors
