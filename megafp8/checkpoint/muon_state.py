"""State of --optimizer muon in a checkpoint: master weights, momentum and Adam's moments, by the names of the weights.

The names are those of megatron-core's optimizers without flat shards. A rank saves and loads complete tensors of its
model-parallel shard: of all its weights, or with --use-distributed-optimizer of those that it owns. Checkpoints of both
are the same, so either loads the other's, in any layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from torch import Tensor

from megafp8.optimizer.muon import Muon

MASTER = "fp32_param"


def is_of_muon(part: Any) -> bool:
    """Whether one of megatron-core's optimizers updates matrices with Muon."""
    return isinstance(part.optimizer, Muon)


def sharded_state(part: Any, model: dict[str, Any], is_only_owner: bool) -> dict[str, Any]:
    """Return the sharded state of one optimizer, to save or to load it.

    Args:
        model: sharded state of the weights, with the parameters themselves as data.
        is_only_owner: no other data-parallel rank has this rank's state.
    """
    part.optimizer.initialize()
    sharded = {
        leaf.data: leaf for leaf in nested_values(model) if isinstance(leaf, (ShardedTensor, ShardedTensorFactory))
    }
    tensors: dict[str, dict[str, Any]] = {}
    for weight, values in tensors_of(part):
        leaf = sharded[weight]
        if is_only_owner:
            leaf = replace(leaf, replica_id=(*leaf.replica_id[:2], 0))
        tensors[leaf_name(len(tensors))] = {
            name: make_sharded_optimizer_tensor(leaf, value, f"optimizer.state.{name}")
            for name, value in values.items()
        }
    groups = [{**group, "params": []} for group in part.optimizer.param_groups]
    scaler = getattr(part, "grad_scaler", None)
    return {
        "optimizer": {"param_groups": groups},
        "tensors": tensors,
        **({"grad_scaler": scaler.state_dict()} if scaler else {}),
    }


def leaf_name(index: int) -> str:
    """The key of a weight's tensors in the state of an optimizer."""
    return f"weight {index}"


def tensors_of(part: Any) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield the weights that an optimizer updates, with their state by name."""
    masters = [master for group in getattr(part, "fp32_from_float16_groups", ()) for master in group]
    weights = [weight for group in getattr(part, "float16_groups", ()) for weight in group]
    weight_of = dict(zip(masters, weights, strict=True))
    for group in part.optimizer.param_groups:
        for tensor in group["params"]:
            weight = weight_of.get(tensor, tensor)
            yield weight, ({} if weight is tensor else {MASTER: tensor}) | part.optimizer.state[tensor]


@torch.no_grad()
def load(part: Any, state: dict[str, Any]) -> None:
    """Load what was read into `sharded_state`, with the parameter groups of the saved state."""
    for index, (_, values) in enumerate(tensors_of(part)):
        for name, value in values.items():
            value.copy_(state["tensors"][leaf_name(index)][name])
    for group, saved in zip(part.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
    scaler = getattr(part, "grad_scaler", None)
    if scaler and "grad_scaler" in state:
        scaler.load_state_dict(state["grad_scaler"])
