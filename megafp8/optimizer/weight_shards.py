"""The elements of each weight that this rank updates: the FP32 masters, and what the model has of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from megatron.core.fp8_utils import is_float8tensor, quantize_param_shard
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megafp8.mcore.process_groups import gather_weights
from megafp8.optimizer.data_parallel import runtime_of
from megafp8.optimizer.layer_wise import LayerWiseOptimizer
from megafp8.optimizer.tensor_table import flat, get_model_weight, weights_of_group


@dataclass(frozen=True)
class WeightShard:
    """Those elements of a weight that this rank updates.

    Attributes:
        part: megatron-core's optimizer that updates them.
        weight: the model's.
        key: the optimizer's own tensor for it, which is the key of its state.
        elements: their range in the rank's weight, flat, with the distributed optimizer; None for all of them.
    """

    part: Any
    weight: Tensor
    key: Tensor
    elements: Optional[range]

    @property
    def first(self) -> int:
        """Position of the first element in the rank's weight."""
        return 0 if self.elements is None else self.elements.start

    def master(self) -> tuple[Tensor, Optional[Tensor]]:
        """The FP32 weights; or their low 16 bits, and the BF16 weights that have the high ones. Flat."""
        # Transformer Engine's Adam has them in its state where it stores moments in low precision.
        master = self.part.optimizer.state.get(self.key, {}).get("master_param", self.key)
        return flat(master), flat(self.key) if master.dtype == torch.int16 else None

    def stored(self) -> Optional[Tensor]:
        """The elements in the model, as this rank writes them after an update; None where they are FP8 codes."""
        if is_float8tensor(self.weight):
            return None
        if isinstance(self.part, DistributedOptimizer):
            model_weight = get_model_weight(self.part, self.weight, self.key)
            return flat(self.key if model_weight is None else model_weight)
        return flat(self.weight)


def build_shards(optimizer: Any) -> Iterator[WeightShard]:
    """The shards of this rank."""
    for part in optimizer.chained_optimizers:
        for group_index in range(0 if part.is_stub_optimizer else len(part.optimizer.param_groups)):
            for weight, key in weights_of_group(part, group_index):
                elements = None
                if isinstance(part, DistributedOptimizer):
                    found = part._get_model_param_range_map(weight)["param"]
                    elements = range(found.start, found.end)
                yield WeightShard(part, weight, key, elements)


def share_weights(
    optimizer: Any, chunks: Sequence[Any], replaced: Mapping[Tensor, Tensor], is_overlapped: bool = False
) -> None:
    """Cast FP8 weights, and let every rank get the weights that the others have written; all ranks call it.

    Args:
        optimizer: the run's.
        replaced: values that FP8 weights are cast from in place of master weights, by the master weight.
        is_overlapped: the next forward pass gathers the shards of the distributed optimizer.
    """
    flat_parts = [part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)]
    for part in flat_parts:
        if not part.is_stub_optimizer:
            weights, masters, *others = part._get_fp8_params_and_shard_fp32_from_fp8()
            # None: this rank has no element of the weight.
            values = [master if master is None else replaced.get(master, master) for master in masters]
            quantize_param_shard(weights, values, *others, part.data_parallel_group)
    if isinstance(optimizer, LayerWiseOptimizer):
        optimizer.share(replaced)
    for chunk in chunks:
        runtime_of(chunk).drop_gathered(chunk)
    # Sharded weights are gathered before each use, and other optimizers update complete weights.
    if flat_parts and not is_overlapped:
        gather_weights(chunks)
