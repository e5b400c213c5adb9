"""The distributed optimizer's state, by the part of it that a rank has.

Each data-parallel rank updates a run of the elements of a parameter. megatron-core 0.16 gathers the runs of all ranks
in the memory of each (several FP32 copies of the whole state), lets one rank write them, and loading, every rank reads
everything; with more than one gradient bucket it then looks for a parameter in the wrong place. Here every rank saves
and loads its own runs and nothing is gathered. A run of elements of a tensor is a few boxes, and a checkpoint may be
cut into any boxes: names and shapes are those of megatron-core's `fully_reshardable` state, which can read it, too.

FP32 master weights of which only the low half is kept beside the model's BF16 weights.

The high half is the model's own weight: the master rounded to nearest, ties away from zero. The low half counts from
-2^15, so that its sign says whether the high half was rounded up. (Transformer Engine: `store_param_remainders`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
NAMES = ("param", *MOMENTS)
# What megatron-core calls the form in which it takes the state back: flat, this rank's part only.
FLAT = "fully_sharded_model_space"


@dataclass(frozen=True)
class Box:
    """A box in a tensor: where it begins and how large it is along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """The boxes that make up elements `first` to `last` (exclusive) of a contiguous tensor, in their order."""
    if first == last:
        return
    if len(shape) <= 1:
        yield Box((first,) * len(shape), (last - first,) * len(shape))
        return
    row = prod(shape[1:])
    begin, end = -(-first // row), last // row  # rows that are whole
    if first < begin * row:
        yield from in_row(shape, begin - 1, first, min(last, begin * row))
    if begin < end:
        yield Box((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))
    if end >= begin and end * row < last:
        yield from in_row(shape, end, end * row, last)


def in_row(shape: tuple[int, ...], index: int, first: int, last: int) -> Iterator[Box]:
    """The boxes of elements that lie in one entry of the first dimension."""
    start = index * prod(shape[1:])
    for box in boxes(shape[1:], first - start, last - start):
        yield Box((index, *box.offsets), (1, *box.sizes))


def sharded_state(part: DistributedOptimizer, model: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    """The sharded state dictionary of one optimizer, in which `param_state` holds this rank's part.

    Args:
        model: the sharded state of the weights, with the parameters themselves as data.
        is_loading: only say what is wanted; the state itself is left out.
    """
    if is_loading:
        part.load_state_dict(part.state_dict())  # gives the optimizer its state, as megatron-core does
    whole = {
        leaf.data: leaf for leaf in nested_values(model) if isinstance(leaf, (ShardedTensor, ShardedTensorFactory))
    }
    state: dict[int, dict[str, Any]] = {}
    for parameter, run in local_ranges(part):
        values = {} if is_loading else local_values(part, parameter)
        state[len(state)] = {name: pieces(whole[parameter], name, run, values.get(name)) for name in NAMES}
    return part.state_dict() | {"param_state": state, "param_state_sharding_type": "fully_reshardable"}


def local_values(part: DistributedOptimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Master weight and moments of a parameter's elements on this rank; FP32, flat.

    They are the optimizer's own tensors, or on the host where it keeps them in another type: a second copy of all of
    them would fill a GPU.
    """
    found = part._get_main_param_and_optimizer_states(parameter)
    if has_remainder(part, parameter):
        found["param"] = joined(local_shard(part, parameter).detach(), found["param"])
    if gives_stored_numbers(part):
        shard = local_shard(part, parameter)
        found |= {name: part.optimizer.get_unscaled_state(shard, name) for name in MOMENTS}
    values = {name: found[name].detach().float() for name in NAMES}
    is_converted = part.config.use_precision_aware_optimizer
    return {name: value.cpu() for name, value in values.items()} if is_converted else values


def local_shard(part: DistributedOptimizer, parameter: Tensor) -> Tensor:
    """What the optimizer inside has of a parameter: its key there."""
    group, index = part.model_param_group_index_map[parameter]
    return part.optimizer.param_groups[group]["params"][index]


def has_remainder(part: DistributedOptimizer, parameter: Tensor) -> bool:
    """Whether the high half of a master weight is the model's own weight."""
    master = part.optimizer.state[local_shard(part, parameter)].get("master_param")
    return master is not None and master.dtype == torch.int16


def gives_stored_numbers(part: DistributedOptimizer) -> bool:
    """Whether megatron-core takes what a low-precision moment is stored as for the moment, without its scale: where it
    keeps the FP32 master weights of FP8 weights itself."""
    config = part.config
    return config.use_precision_aware_optimizer and not config.use_precision_aware_optimizer_no_fp8_or_ds_fp8


def local_ranges(part: DistributedOptimizer) -> Iterator[tuple[Tensor, range]]:
    """The parameters of which this rank updates elements, and which those are, in the order of megatron-core's load."""
    for buffer in part.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, places in bucket["param_map"].items():
                    yield parameter, range(places["param"].start, places["param"].end)


def pieces(
    whole: ShardedTensor | ShardedTensorFactory, name: str, run: range, values: Tensor | None
) -> dict[int, ShardedTensor]:
    """One kind of state of a parameter, as boxes of the tensor that it is in a checkpoint.

    Args:
        whole: how the parameter is cut over the model-parallel ranks.
        name: of the kind of state.
        run: elements of the parameter, flat, that this rank has.
        values: of those elements; FP32, shape (len(run),); None when they are to be loaded.
    """
    changes: dict[str, Any] = {
        "key": f"optimizer.state.{name}.{whole.key}",
        "data": torch.empty(tuple(whole.data.shape), dtype=torch.float32, device="meta"),
        "replica_id": (*whole.replica_id[:2], 0),  # data-parallel ranks have no copies of each other's runs
    }
    if isinstance(whole, ShardedTensorFactory):  # a gated MLP's weight: two boxes of the tensor in a checkpoint
        leaves = list(nested_values(replace(whole, **changes).build()))
    else:
        leaves = [replace(whole, dtype=torch.float32, **changes)]
    found: dict[int, ShardedTensor] = {}
    for leaf in leaves:
        assert leaf.data.is_contiguous(), f"{leaf.key} is cut so that a part of it is no run of elements"
        start = leaf.data.storage_offset()
        first, last = max(run.start, start), min(run.stop, start + leaf.data.numel())
        taken = first
        for box in boxes(leaf.local_shape, first - start, max(first, last) - start):
            size = prod(box.sizes)
            data = None if values is None else values[taken - run.start : taken - run.start + size]
            found[len(found)] = piece(leaf, box, data)
            taken += size
    return found


def piece(leaf: ShardedTensor, box: Box, data: Tensor | None) -> ShardedTensor:
    """A box of a sharded tensor as a sharded tensor; of no regular grid, since runs end anywhere."""
    num_stacked = leaf.prepend_axis_num
    sizes = (1,) * num_stacked + box.sizes
    inner = leaf.global_offset[num_stacked:]
    return ShardedTensor(
        key=leaf.key,
        data=None if data is None else data.view(sizes),
        dtype=torch.float32,
        local_shape=sizes,
        global_shape=leaf.global_shape,
        global_offset=leaf.global_offset[:num_stacked]
        + tuple(start + offset for start, offset in zip(inner, box.offsets, strict=True)),
        axis_fragmentations=None,
        replica_id=leaf.replica_id,
        allow_shape_mismatch=leaf.allow_shape_mismatch,
    )


def join_pieces(part: DistributedOptimizer, state: dict[str, Any], known_rows: dict[Tensor, int]) -> dict[str, Any]:
    """What was loaded for `sharded_state`, as this rank's `DistributedOptimizer.load_state_dict` takes it.

    Args:
        known_rows: from `rows_known`: the master weights of further rows are copies of the weights.
    """
    flat = {
        number: {name: torch.cat([each.flatten() for _, each in sorted(kind.items())]) for name, kind in kinds.items()}
        for number, kinds in state["param_state"].items()
    }
    for (parameter, run), values in zip(local_ranges(part), flat.values(), strict=True):
        if parameter in known_rows:
            first = max(run.start, parameter[: known_rows[parameter]].numel())
            values["param"][first - run.start :] = parameter.flatten()[first : run.stop]
        if has_remainder(part, parameter):
            rounded, values["param"] = split(values["param"])
            local_shard(part, parameter).data.copy_(rounded)
    return state | {"param_state": flat, "param_state_sharding_type": FLAT}


def store_moments(part: DistributedOptimizer, state: dict[str, Any]) -> None:
    """Store the moments that were loaded, of `join_pieces`, by their scales where megatron-core's load has no regard to
    them."""
    if gives_stored_numbers(part):
        for (parameter, _), values in zip(local_ranges(part), state["param_state"].values(), strict=True):
            shard = local_shard(part, parameter)
            for name in MOMENTS:
                part.optimizer.set_scaled_state(shard, name, values[name].to(shard.device))


def joined(rounded: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 master weights of BF16 weights and their int16 remainders, of any one shape; exact."""
    high = rounded.contiguous().view(torch.int16).to(torch.int32)
    return ((high << 16) + remainder.to(torch.int32)).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 master weights as BF16 weights and int16 remainders, from which `joined` makes them again, bit by bit."""
    bits = master.contiguous().view(torch.int32)
    low = bits << 16 >> 16  # with its sign
    return ((bits - low) >> 16).to(torch.int16).view(torch.bfloat16), low.to(torch.int16)
