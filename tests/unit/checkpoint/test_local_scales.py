"""Which tensors and objects of a sharded state belong to one data-parallel rank, and which runs load them."""

from __future__ import annotations

from typing import Optional

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megafp8.checkpoint.local_scales import FLAG, parallel_state, request

STATE = "decoder.linear_fc1.quantizer_state.0.amax_history"
OF_TE = "decoder.layers.linear_fc1._extra_state"
OF_EXPERT = "decoder.layers.mlp.experts.linear_fc1.quantizer_state.0.amax_history"
WEIGHT = "decoder.layers.linear_fc1.weight"
KEYS = (STATE, OF_EXPERT, WEIGHT)


@pytest.fixture(autouse=True)
def third_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data-parallel rank of the process, and its number among two with the same experts."""
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda with_context_parallel: 3)
    monkeypatch.setattr(parallel_state, "get_expert_data_parallel_rank", lambda: 1)


def model_of(replica: int) -> dict[str, dict[str, ShardedTensor | ShardedObject]]:
    """What the second of two tensor-parallel ranks has."""
    replica_id, tensor = (0, 1, replica), torch.zeros(2)
    return {
        "model": {
            **{key: ShardedTensor.from_rank_offsets(key, tensor, replica_id=replica_id) for key in KEYS},
            OF_TE: ShardedObject(OF_TE, tensor.byte(), (4,), (2,), replica_id),
            "norm": ShardedObject("norm._extra_state", None, (4,), (2,), replica_id),
        }
    }


@pytest.mark.parametrize("replica", [3, 5])
def test_each_rank_has_its_own_keys(replica: int) -> None:
    """Whatever the numbers of its replicas."""
    model = model_of(replica)
    assert request(model, [4, 2], [4, 2]) == ""
    leaves = model["model"]
    assert leaves[STATE].key == f"{STATE}.3" and leaves[OF_TE].unique_key == f"{OF_TE}.3/shard_2_4"
    assert leaves[OF_EXPERT].key == f"{OF_EXPERT}.1"
    for key in (STATE, OF_EXPERT, OF_TE):
        assert leaves[key].replica_id == (0, 1, 0), "replicas are the tensor-parallel ranks"
    assert leaves[WEIGHT].key == WEIGHT and leaves[WEIGHT].replica_id == (0, 1, replica)
    assert leaves["norm"].key == "norm._extra_state"


def test_the_first_rank_has_the_keys_of_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda with_context_parallel: 0)
    model = model_of(0)
    assert request(model, [4, 2], [4, 2]) == "" and model["model"][STATE].key == STATE


@pytest.mark.parametrize(
    ("saved", "own", "has_own", "which", "reason"),
    [
        (None, None, (False, False), "", ""),
        (None, [2, 2], (False, False), " of the first rank", "the checkpoint has no others"),
        ([2, 2], None, (False, False), " of the first rank", "not a run in which all ranks have the same"),
        ([2, 2], [4, 4], (False, False), " of the first rank", "fit 2 data x context parallel ranks (2 with"),
        ([4, 4], [4, 2], (True, False), " of experts", "fit 4 data x context parallel ranks (4 with the same experts)"),
        ([8, 2], [4, 2], (False, True), " outside of experts", "not 4 data x context parallel ranks (2 with the same"),
    ],
)
def test_ranks_start_alike_or_from_their_own(
    saved: Optional[list[int]], own: Optional[list[int]], has_own: tuple[bool, bool], which: str, reason: str
) -> None:
    model = model_of(3)
    note = request(model, saved, own)
    assert reason in note and bool(note) == bool(reason) == (FLAG in note)
    assert f"scales and amax histories{which}" in note or not note
    leaves = model["model"]
    assert (leaves[STATE].key != STATE, leaves[OF_EXPERT].key != OF_EXPERT) == has_own
