"""Distributed-optimizer state as sharded tensors, saved and loaded without gathering.

Each data-parallel rank updates a flat range of each parameter's elements. megatron-core 0.16 gathers all ranges in the
memory of every rank (several FP32 copies of the complete state), one rank writes them, and on load every rank reads
everything. With more than one gradient bucket its load looks up parameters in the wrong bucket. Here every rank saves
and loads its own ranges. A flat range of a tensor is a few boxes, and a checkpoint may be cut into arbitrary boxes.
They are read into the optimizer's tensors. What it stores in another form than FP32 is read later, one tensor at a
time, so that the host never has a second copy of the state. Names and shapes are those of megatron-core's
`fully_reshardable` layout, so megatron-core can load the state.

`store_param_remainders` of Transformer Engine's FusedAdam: the optimizer stores only the low 16 bits of an FP32 master
weight. The high 16 bits are the BF16 model weight: the master rounded to nearest, ties away from zero. The low half is
signed, and its sign tells whether the high half was rounded up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------------------
# State of an optimizer of matrices in a checkpoint: master weights and moments, by the names of the weights
# The names are those of megatron-core's optimizers without flat shards. A rank saves and loads complete tensors of its
# model-parallel shard: of all its weights, or with --use-distributed-optimizer of those that it owns. Checkpoints of
# both are the same, so either loads the other's, in any layout.

MASTER = "fp32_param"


def sharded_state_by_weight(part: Any, model: dict[str, Any], is_only_owner: bool) -> dict[str, Any]:
    """Return the sharded state of one optimizer, to save or to load it.

    Args:
        model: sharded state of the weights, with the parameters themselves as data.
        is_only_owner: no other data-parallel rank has this rank's state.
    """
    part.optimizer.initialize()
    sharded = leaf_by_weight(model)
    tensors: dict[str, dict[str, Any]] = {}
    for weight, values in state_by_weight(part):
        leaf = sharded[weight]
        # The last entry numbers copies, of which 0 is saved.
        if is_only_owner:
            leaf = replace(leaf, replica_id=(*leaf.replica_id[:2], 0))
        tensors[leaf_name(len(tensors))] = {
            name: make_sharded_optimizer_tensor(leaf, value, f"optimizer.state.{name}")
            for name, value in values.items()
        }
    # Parameters are numbers in torch's groups. Here tensors are found by the names of the weights.
    groups = [{**group, "params": []} for group in part.optimizer.param_groups]
    scaler = getattr(part, "grad_scaler", None)
    return {
        "optimizer": {"param_groups": groups},
        "tensors": tensors,
        **({"grad_scaler": scaler.state_dict()} if scaler else {}),
    }


def leaf_by_weight(model: dict[str, Any]) -> dict[Tensor, ShardedTensor | ShardedTensorFactory]:
    """How each weight of a sharded state is sharded."""
    return {leaf.data: leaf for leaf in nested_values(model) if isinstance(leaf, (ShardedTensor, ShardedTensorFactory))}


def leaf_name(index: int) -> str:
    """The key of a weight's tensors in the state of an optimizer."""
    return f"weight {index}"


def state_by_weight(part: Any) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield the weights that an optimizer updates, with their state by name."""
    masters = [master for group in getattr(part, "fp32_from_float16_groups", ()) for master in group]
    weights = [weight for group in getattr(part, "float16_groups", ()) for weight in group]
    weight_of = dict(zip(masters, weights, strict=True))
    for group in part.optimizer.param_groups:
        for tensor in group["params"]:
            weight = weight_of.get(tensor, tensor)
            # An FP32 weight has no master of its own.
            yield weight, ({} if weight is tensor else {MASTER: tensor}) | part.optimizer.state[tensor]


@torch.no_grad()
def load_state_by_weight(part: Any, state: dict[str, Any]) -> None:
    """Load what was read into `sharded_state_by_weight`, with the parameter groups of the saved state."""
    for index, (_, values) in enumerate(state_by_weight(part)):
        for name, value in values.items():
            value.copy_(state["tensors"][leaf_name(index)][name])
    for group, saved in zip(part.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
    scaler = getattr(part, "grad_scaler", None)
    if scaler and "grad_scaler" in state:
        scaler.load_state_dict(state["grad_scaler"])


# ----------------------------------------------------------------------------------------------------------------------

MOMENTS = ("exp_avg", "exp_avg_sq")
NAMES = ("param", *MOMENTS)


@dataclass(frozen=True)
class Box:
    """A box in a tensor: offset and size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def flat_range_boxes(shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """Yield the boxes that cover elements `first` to `last` (exclusive) of a contiguous tensor, in order."""
    if first == last:
        return
    if len(shape) <= 1:
        yield Box((first,) * len(shape), (last - first,) * len(shape))
        return
    row = prod(shape[1:])
    begin, end = -(-first // row), last // row  # complete rows
    if first < begin * row:
        # The end of the row in which the range begins, or all of a range within one row.
        yield from boxes_in_row(shape, begin - 1, first, min(last, begin * row))
    if begin < end:
        yield Box((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))
    # Not for a range within one row, which is complete already.
    if end >= begin and end * row < last:
        yield from boxes_in_row(shape, end, end * row, last)


def boxes_in_row(shape: tuple[int, ...], index: int, first: int, last: int) -> Iterator[Box]:
    """Yield the boxes of a range of elements that lies in one index of dim 0."""
    start = index * prod(shape[1:])
    for box in flat_range_boxes(shape[1:], first - start, last - start):
        yield Box((index, *box.offsets), (1, *box.sizes))


def sharded_state(part: DistributedOptimizer, model: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    """Return the sharded state dictionary of one optimizer; `param_state` holds this rank's part.

    Args:
        model: sharded state of the weights, with the parameters themselves as data.
        is_loading: the data are `tensors_to_load` instead of what is saved.
    """
    if is_loading:
        part.load_state_dict(part.state_dict())  # allocates the optimizer state, as megatron-core does
    sharded = leaf_by_weight(model)
    state: dict[int, dict[str, Any]] = {}
    for parameter, local_range in local_ranges(part):
        values = tensors_to_load(part, parameter) if is_loading else local_state(part, parameter)
        state[len(state)] = {name: sharded_boxes(sharded[parameter], name, local_range, values[name]) for name in NAMES}
    return part.state_dict() | {"param_state": state, "param_state_sharding_type": "fully_reshardable"}


def local_state(part: DistributedOptimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return master weight and moments of a parameter's local range; FP32, flat.

    They alias the optimizer's tensors. If the optimizer stores another dtype, they are converted and moved to the CPU,
    because a second copy of the complete state may not fit on the GPU.
    """
    state = part._get_main_param_and_optimizer_states(parameter)
    if has_param_remainder(part, parameter):
        # The state has the low half. The high half is the model weight.
        state["param"] = join_master_weight(local_shard(part, parameter).detach(), state["param"])
    if returns_raw_moments(part):
        shard = local_shard(part, parameter)
        state |= {name: part.optimizer.get_unscaled_state(shard, name) for name in MOMENTS}
    values = {name: state[name].detach().float() for name in NAMES}
    is_converted = part.config.use_precision_aware_optimizer
    return {name: value.cpu() for name, value in values.items()} if is_converted else values


def tensors_to_load(part: DistributedOptimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the tensors that master weight and moments of a parameter's local range are read into; FP32, flat.

    They are the optimizer's, or on the meta device if `load_converted` shall read them later.
    """
    shard = local_shard(part, parameter)
    later = torch.empty(shard.numel(), dtype=torch.float32, device="meta")
    if part.config.use_precision_aware_optimizer:
        return dict.fromkeys(NAMES, later)
    own = part._get_main_param_and_optimizer_states(parameter)
    if parameter.dtype == torch.float32:
        own["param"] = later  # it is the weight itself, into which the saved weight is read
    return {name: own[name].detach() for name in NAMES}


def local_shard(part: DistributedOptimizer, parameter: Tensor) -> Tensor:
    """Return the optimizer's own tensor for a parameter: its key in the optimizer state."""
    group, index = part.model_param_group_index_map[parameter]
    return part.optimizer.param_groups[group]["params"][index]


def has_param_remainder(part: DistributedOptimizer, parameter: Tensor) -> bool:
    """Return whether the optimizer stores only the low half of a master weight."""
    master = part.optimizer.state[local_shard(part, parameter)].get("master_param")
    return master is not None and master.dtype == torch.int16


def returns_raw_moments(part: DistributedOptimizer) -> bool:
    """Return whether megatron-core returns the stored codes of low-precision moments without their scales.

    It does where it keeps the FP32 master weights of FP8 weights itself.
    """
    config = part.config
    return config.use_precision_aware_optimizer and not config.use_precision_aware_optimizer_no_fp8_or_ds_fp8


def local_ranges(part: DistributedOptimizer) -> Iterator[tuple[Tensor, range]]:
    """Yield the parameters that this rank updates and the ranges of elements, in the order of megatron-core's load."""
    for buffer in part.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, range(ranges["param"].start, ranges["param"].end)


def sharded_boxes(
    parameter: ShardedTensor | ShardedTensorFactory, name: str, local_range: range, values: Tensor
) -> dict[int, ShardedTensor]:
    """Return one kind of optimizer state of a parameter as boxes of the saved tensor.

    Args:
        parameter: how the parameter is sharded over model-parallel ranks.
        name: of the kind of state.
        local_range: flat range of elements that this rank updates.
        values: of that range, shape (len(local_range),); the saved tensor has their dtype.
    """
    changes: dict[str, Any] = {
        "key": f"optimizer.state.{name}.{parameter.key}",
        "data": torch.empty(tuple(parameter.data.shape), dtype=values.dtype, device="meta"),
        "replica_id": (*parameter.replica_id[:2], 0),  # data-parallel ranks hold disjoint ranges, not replicas
    }
    if isinstance(parameter, ShardedTensorFactory):  # linear_fc1 of a gated MLP: two boxes of the saved tensor
        leaves = list(nested_values(replace(parameter, **changes).build()))
    else:
        leaves = [replace(parameter, dtype=values.dtype, **changes)]
    sharded: dict[int, ShardedTensor] = {}
    for leaf in leaves:
        assert leaf.data.is_contiguous(), f"{leaf.key}: a shard is not a contiguous range of the parameter's elements"
        # The leaf is a view of the parameter's elements: its offset in them.
        start = leaf.data.storage_offset()
        # The part of this rank's range that lies in the leaf. It may be empty, with `last` before `first`.
        first, last = max(local_range.start, start), min(local_range.stop, start + leaf.data.numel())
        position = first
        for box in flat_range_boxes(leaf.local_shape, first - start, max(first, last) - start):
            size = prod(box.sizes)
            # `values` starts at the rank's first element, `position` counts in the parameter.
            offset = position - local_range.start
            sharded[len(sharded)] = sharded_box(leaf, box, values[offset : offset + size])
            position += size
    return sharded


def sharded_box(leaf: ShardedTensor, box: Box, data: Tensor) -> ShardedTensor:
    """Return a box of a sharded tensor as a sharded tensor, without a regular grid: ranges end anywhere."""
    num_stacked = leaf.prepend_axis_num
    sizes = (1,) * num_stacked + box.sizes
    inner = leaf.global_offset[num_stacked:]
    return ShardedTensor(
        key=leaf.key,
        data=data.view(sizes),
        dtype=data.dtype,
        local_shape=sizes,
        global_shape=leaf.global_shape,
        global_offset=leaf.global_offset[:num_stacked]
        + tuple(start + offset for start, offset in zip(inner, box.offsets, strict=True)),
        axis_fragmentations=None,
        replica_id=leaf.replica_id,
        allow_shape_mismatch=leaf.allow_shape_mismatch,
    )


@torch.no_grad()
def load_converted(
    part: DistributedOptimizer,
    requested: dict[str, Any],
    known_rows: dict[Tensor, int],
    read: Callable[[Sequence[ShardedTensor]], None],
) -> None:
    """Load what could not be read into the optimizer's tensors, one tensor at a time on their device.

    Args:
        requested: `sharded_state` to load, otherwise already read. Master weights that it lacks are copied from the
            weights.
        known_rows: from `known_vocab_rows`. Master weights of further rows are copied from the weights.
        read: fills the data of sharded tensors from the checkpoint.
    """
    # The order of `sharded_state`: numbers of parameters stand for the parameters.
    for (parameter, local_range), kinds in zip(local_ranges(part), requested["param_state"].values(), strict=True):
        for name in NAMES:
            boxes = list(kinds[name].values()) if name in kinds else []
            if not boxes:
                store(part, parameter, name, flat_weight(parameter)[local_range.start : local_range.stop].float())
            elif boxes[0].data.is_meta:
                values = torch.empty(len(local_range), dtype=torch.float32, device=local_shard(part, parameter).device)
                pieces = values.split([box.data.numel() for box in boxes])
                read([replace(box, data=piece.view(box.local_shape)) for box, piece in zip(boxes, pieces, strict=True)])
                if name == "param" and parameter in known_rows:
                    # Where the new rows begin. Past the end of the range both slices are empty.
                    first = max(local_range.start, parameter[: known_rows[parameter]].numel())
                    values[first - local_range.start :] = flat_weight(parameter)[first : local_range.stop]
                store(part, parameter, name, values)
                del values, pieces  # before the next read
            elif name == "param" and parameter in known_rows:
                first = max(local_range.start, parameter[: known_rows[parameter]].numel())
                local_shard(part, parameter)[first - local_range.start :] = flat_weight(parameter)[
                    first : local_range.stop
                ]


def flat_weight(parameter: Tensor) -> Tensor:
    """Return the values of a weight as a plain tensor of one dimension."""
    # Transformer Engine's weights with scales of blocks cannot be viewed in another shape.
    return (parameter.dequantize() if is_float8tensor(parameter) else parameter.detach()).flatten()


def store(part: DistributedOptimizer, parameter: Tensor, name: str, values: Tensor) -> None:
    """Store master weight or a moment of a parameter's local range in the form of the optimizer.

    Args:
        values: FP32, flat, on the device of the optimizer's tensors.
    """
    shard = local_shard(part, parameter)
    if name == "param" and not part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        shard.copy_(values)
        return
    if name == "param" and has_param_remainder(part, parameter):
        rounded, values = split_master_weight(values)
        # The model weight is the high half of the same master.
        shard.copy_(rounded)
    part.optimizer.set_scaled_state(shard, "master_param" if name == "param" else name, values)


def join_master_weight(rounded: Tensor, remainder: Tensor) -> Tensor:
    """Return FP32 master weights from BF16 weights and int16 remainders of the same shape; exact."""
    high = rounded.contiguous().view(torch.int16).to(torch.int32)
    return ((high << 16) + remainder.to(torch.int32)).view(torch.float32)


def split_master_weight(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split FP32 master weights into BF16 weights and int16 remainders; the inverse of `join_master_weight`."""
    bits = master.contiguous().view(torch.int32)
    low = bits << 16 >> 16  # sign-extended
    return ((bits - low) >> 16).to(torch.int16).view(torch.bfloat16), low.to(torch.int16)
