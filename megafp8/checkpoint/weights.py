"""The weights in a checkpoint of a run that keeps FP8 codes: those that it would have without.

Master weights are the truth, and a checkpoint has to serve runs with and without FP8 weights, also without its
optimizer state. So it holds what the master weights are rounded to before they are quantized, in the weights' own type.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megafp8.checkpoint.state import parts_of
from megafp8.fp8.parameter import QuantizedParameter


def put_rounded_masters(model: dict[str, Any], optimizer: MegatronOptimizer) -> None:
    """Replace quantized weights in a sharded model state by their rounded master weights; all ranks call it.

    Only the rank that writes a weight holds it whole, in CPU memory, and for the time of one bucket on the device.
    """
    mine = {
        id(leaf.data.codes): leaf
        for leaf in nested_values(model)
        if isinstance(leaf, (ShardedTensor, ShardedTensorFactory))
        and isinstance(leaf.data, QuantizedParameter) and is_main_replica(leaf.replica_id)
    }
    for part in parts_of(optimizer):
        for index, buffer in enumerate(getattr(part, "buffers", ())):
            if not isinstance(buffer.params[0], QuantizedParameter):
                continue
            for number, bucket in enumerate(buffer.buckets):
                rounded = gather_rounded(part, index, number)
                for weight in bucket.params_list:
                    if id(weight.codes) in mine:
                        first, last, _ = buffer.param_index_map[weight]
                        whole = rounded[first - bucket.offset : last - bucket.offset].view(weight.shape)
                        mine[id(weight.codes)].data = whole.cpu()


@torch.no_grad()
def gather_rounded(optimizer: Any, buffer_index: int, bucket_index: int) -> Tensor:
    """A bucket of master weights, rounded to the weights' type, on every data-parallel rank. Shape: (elements,)."""
    buffer, group = optimizer.buffers[buffer_index], optimizer.data_parallel_group
    weight, bucket = buffer.params[0], buffer.buckets[bucket_index]
    whole = torch.zeros(bucket.grad_data.numel(), dtype=weight.dtype, device=weight.device)
    shard = shard_buffer(whole, group.size())[group.rank()]
    (ranges,) = optimizer.gbuf_ranges[buffer_index].values()
    for parameter, places in ranges[bucket_index]["param_map"].items():
        place = places["gbuf_local"]
        shard[place.start : place.end].copy_(parameter.main_param)
    dist.all_gather_into_tensor(whole, shard, group=group)
    return whole
