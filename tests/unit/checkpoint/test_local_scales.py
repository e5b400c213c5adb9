"""Which tensors and objects of a sharded state belong to one data-parallel rank, and which runs load them."""

from __future__ import annotations

from typing import Optional

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megafp8.checkpoint.local_scales import FLAG, request

STATE = "decoder.linear_fc1.quantizer_state.0.amax_history"
OF_TE = "decoder.layers.linear_fc1._extra_state"
WEIGHT = "decoder.layers.linear_fc1.weight"


def model_of(rank: int) -> dict[str, dict[str, ShardedTensor | ShardedObject]]:
    """What the second of two tensor-parallel ranks has."""
    replica_id, tensor = (0, 1, rank), torch.zeros(2)
    return {
        "model": {
            **{key: ShardedTensor.from_rank_offsets(key, tensor, replica_id=replica_id) for key in (STATE, WEIGHT)},
            OF_TE: ShardedObject(OF_TE, tensor.byte(), (4,), (2,), replica_id),
            "norm": ShardedObject("norm._extra_state", None, (4,), (2,), replica_id),
        }
    }


@pytest.mark.parametrize(("rank", "suffix"), [(0, ""), (3, ".3")])
def test_each_rank_has_its_own_keys(rank: int, suffix: str) -> None:
    model = model_of(rank)
    assert request(model, [4, 4], [4, 4]) == ""
    leaves = model["model"]
    assert leaves[STATE].key == STATE + suffix and leaves[OF_TE].unique_key == f"{OF_TE}{suffix}/shard_2_4"
    assert leaves[STATE].replica_id == leaves[OF_TE].replica_id == (0, 1, 0), "replicas are the tensor-parallel ranks"
    assert leaves[WEIGHT].key == WEIGHT and leaves[WEIGHT].replica_id == (0, 1, rank)
    assert leaves["norm"].key == "norm._extra_state"


@pytest.mark.parametrize(
    ("saved", "own", "reason"),
    [
        (None, None, ""),
        (None, [2, 2], "the checkpoint has no others"),
        ([2, 2], None, "not a run in which all ranks have the same"),
        (
            [4, 4],
            [4, 2],
            "fit 4 data x context parallel ranks (4 with the same experts), not 4 data x context parallel",
        ),
    ],
)
def test_ranks_start_alike_or_from_their_own(saved: Optional[list[int]], own: Optional[list[int]], reason: str) -> None:
    model = model_of(3)
    note = request(model, saved, own)
    assert reason in note and bool(note) == bool(reason) == (FLAG in note)
    assert model["model"][STATE].key == STATE
