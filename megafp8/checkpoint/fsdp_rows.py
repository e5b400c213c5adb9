"""Checkpoints of `--use-torch-fsdp2`: the rows of a parameter that a rank keeps, as parts of the complete tensor.

megatron-core's sharded state dict gives the rows of most parameters their places, so that any layout can load them.
Three things are missing. It loads plain tensors, which a DTensor cannot take. And 0.16 splits the rows of a gated MLP's
`linear_fc1` on each rank into a gate and an up half, although the first half of the ranks has gate rows only, and the
second half up rows only. 0.19 does not split them. With replicas, all of them claim to have the copy that is saved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.tensor import DTensor

from megafp8.mcore.torch_fsdp import TorchFSDP


def place_gated_rows(chunk: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return a chunk's sharded state with the rows of gated MLPs in their places; unchanged without FSDP2."""
    if not isinstance(chunk, TorchFSDP):
        return state
    group = chunk.process_group
    state = {
        name: gated_rows(leaf, group) if isinstance(leaf, ShardedTensorFactory) else leaf
        for name, leaf in state.items()
    }
    if chunk.replicas is not None:
        # Only one replica is saved. The copies of other replicas are numbered after those of its ranks.
        first = group.size() * chunk.replicas.group.rank()
        for leaf in nested_values(state):
            leaf.replica_id = (*leaf.replica_id[:-1], leaf.replica_id[-1] + first)
    return state


def gated_rows(factory: ShardedTensorFactory, group: dist.ProcessGroup) -> ShardedTensor | ShardedTensorFactory:
    """Place this rank's rows of a gated MLP's `linear_fc1`.

    The complete tensor has the gate rows of all tensor-parallel ranks, then their up rows. A tensor-parallel rank has
    gate and up rows, which R data-parallel ranks divide: rank r < R / 2 has part r of the gate rows.
    """
    # megatron-core 0.16 cuts this rank's rows in half. The numbers of the first half tell where the rows belong.
    gate, *up = factory.build()
    # One leaf: nothing was cut.
    if not up:
        return gate
    axis = gate.prepend_axis_num
    rank, half = group.rank(), group.size() // 2
    assert group.size() == 2 * half or group.size() == 1
    if group.size() == 1:
        return factory
    # Its number among the gate halves is: tensor-parallel rank x ranks of the group + rank.
    tensor_rank = gate.global_offset[axis] // gate.local_shape[0] // group.size()
    num_parts = gate.axis_fragmentations[axis] // 2
    # First all gate rows, by tensor-parallel rank, then all up rows.
    part = (0 if rank < half else num_parts // 2) + tensor_rank * half + rank % half
    layers = [(dim, gate.global_offset[dim], gate.axis_fragmentations[dim]) for dim in range(axis)]
    return ShardedTensor.from_rank_offsets(
        factory.key,
        factory.data,
        *layers,
        (axis, part, num_parts),
        replica_id=factory.replica_id,
        prepend_axis_num=axis,
    )


def as_dtensor(rows: Any, like: Any) -> Any:
    """This rank's rows as a DTensor with the placement of `like`; `rows` itself if they need none."""
    if not (isinstance(like, DTensor) and isinstance(rows, torch.Tensor)) or isinstance(rows, DTensor):
        return rows
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def model_dtensors(module: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return a loaded model state with DTensors where the parameters of the module are DTensors."""
    parameters = dict(module.named_parameters())
    return {name: as_dtensor(value, parameters.get(name)) for name, value in state.items()}


def optimizer_dtensors(part: Any, state: dict[str, Any]) -> None:
    """Replace rows in a loaded state of one of megatron-core's optimizers by DTensors like its parameters."""
    parameters = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
    inner = state.get("optimizer", state)["state"]
    for index, values in inner.items():
        if isinstance(values, dict):
            inner[index] = {name: as_dtensor(value, parameters[index]) for name, value in values.items()}
    for masters, loaded in zip(
        getattr(part, "fp32_from_float16_groups", ()), state.get("fp32_from_fp16_params", ()), strict=True
    ):
        loaded[:] = [as_dtensor(rows, master) for rows, master in zip(loaded, masters, strict=True)]
