"""Updates of matrices with --use-distributed-optimizer: each data-parallel rank updates complete weights of its own.

The state of megatron-core's distributed optimizer is cut into flat ranges, but Newton-Schulz needs complete matrices.
So every weight has one owner among the ranks that hold copies of it. Only the owner has its FP32 master weight and its
moments, and updates it. Afterwards each owner broadcasts its updated weights. Gradients are reduced by all-reduce, as
without --use-distributed-optimizer, so the trained weights are the same to the bit.

FP8 weights (--fp8-param-gather) are cast by megatron-core's function for the flat shards of Adam: of each weight the
owner has one shard, all of it, and the other ranks have none. An all-reduce gives every rank the amaxes, of which all
make the same scales. Codes are broadcast.

This is the distribution of Megatron-LM's layer-wise optimizer with --no-use-layer-wise-param-layout, up to the choice
of the owners. Its default layout gives the same weights, with a reduce-scatter in place of the all-reduce and flat
ranges for the weights that are no matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import (
    is_float8tensor,
    modify_underlying_storage,
    post_all_gather_processing,
    quantize_param_shard,
)
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megafp8.optimizer.received_bytes import ReceivedBytes
from megafp8.optimizer.skip_update import SkipUpdateOptimizer
from megafp8.quantization.fp8_parameter import QuantizedParameter

ALIGNMENT = 128
"""Weights begin at a multiple of so many elements in a buffer: GEMMs want aligned addresses."""


@dataclass(frozen=True)
class Ownership:
    """The owners of weights that the ranks of a group hold.

    Attributes:
        owned: the weights of each rank of the group.
        buffers: the flat tensors that hold the weights of each rank, one for each dtype; of FP8 weights the codes.
    """

    group: dist.ProcessGroup
    owned: tuple[tuple[Tensor, ...], ...]
    buffers: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def divide(cls, weights: Sequence[Tensor], group: dist.ProcessGroup) -> Ownership:
        """Give each weight to the rank that has the fewest elements so far, large weights first.

        Args:
            weights: the same on all ranks of the group, in the same order. They are moved to the buffers.
        """
        owned: list[list[Tensor]] = [[] for _ in range(group.size())]
        sizes = [0] * group.size()
        for weight in sorted(weights, key=lambda weight: -weight.numel()):  # stable, so the same on all ranks
            rank = sizes.index(min(sizes))
            owned[rank].append(weight)
            sizes[rank] += weight.numel()
        return cls(group, tuple(map(tuple, owned)), tuple(map(move_to_buffers, owned)))

    @property
    def of_this_rank(self) -> tuple[Tensor, ...]:
        """The weights that this rank updates."""
        return self.owned[self.group.rank()]

    def share(self, replaced: Mapping[Tensor, Tensor]) -> int:
        """Cast FP8 weights and give each owner's weights to the other ranks; all ranks of the group call it.

        Args:
            replaced: FP32 values that FP8 weights are cast from in place of master weights, by the master weight.

        Returns:
            The bytes that this rank received.
        """
        quantized: list[Any] = [weight for owned in self.owned for weight in owned if is_float8tensor(weight)]
        if quantized:
            masters = [replaced.get(weight.main_param, weight.main_param) for weight in quantized]
            shards = [None if master is None else master.view(-1) for master in masters]  # None: another rank's
            starts = [None if shard is None else 0 for shard in shards]
            quantize_param_shard(quantized, shards, starts, self.group)
        received = 0
        if self.group.size() > 1:
            # Transformer Engine's weights do not tell how many amaxes they have.
            received += sum(weight.codes.amax.nbytes for weight in quantized if isinstance(weight, QuantizedParameter))
            for rank, buffers in enumerate(self.buffers):
                for buffer in buffers:
                    dist.broadcast(buffer, dist.get_global_rank(self.group, rank), group=self.group)
                    received += buffer.nbytes if rank != self.group.rank() else 0
        if quantized:
            post_all_gather_processing(quantized)  # the transposed codes of Transformer Engine
        return received


@torch.no_grad()
def move_to_buffers(weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Let weights have flat tensors as memory, one for each dtype in which they are stored.

    What is written to these does not move the version counters of the weights.

    Returns:
        The flat tensors; of FP8 weights, the codes as uint8.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for weight in weights:
        by_dtype.setdefault(torch.uint8 if is_float8tensor(weight) else weight.dtype, []).append(weight)
    buffers = []
    for dtype, each in by_dtype.items():
        lengths = [-(-weight.numel() // ALIGNMENT) * ALIGNMENT for weight in each]
        buffer = torch.zeros(sum(lengths), dtype=dtype, device=each[0].device)
        for weight, piece in zip(each, buffer.split(lengths), strict=True):
            memory = piece[: weight.numel()].view(weight.shape)
            if is_float8tensor(weight):
                modify_underlying_storage(weight, memory)
            else:
                memory.copy_(weight)
                weight.data = memory
        buffers.append(buffer)
    return tuple(buffers)


# ---- FP8 weights in megatron-core's optimizer of complete weights, which expects BF16 --------------------------------


@torch.no_grad()
def adopt_fp8_weights(part: Any) -> None:
    """Make master weights of the initial values of FP8 weights, and leave the casts of these to `Ownership.share`."""
    pairs = [(weight, weight.main_param) for group in getattr(part, "float16_groups", ()) for weight in group]
    for weight, master in pairs:
        # Of Transformer Engine's weights. Emulated ones are not cast yet.
        if (initial := getattr(weight, "_high_precision_init_val", None)) is not None:
            master.copy_(initial)
    part._copy_main_params_to_model_params = partial(copy_to_model, pairs)


def copy_to_model(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Round master weights to those weights that are not FP8."""
    for weight, master in pairs:
        if not is_float8tensor(weight):
            weight.data.copy_(master)


# ----------------------------------------------------------------------------------------------------------------------


class LayerWiseOptimizer(ReceivedBytes, SkipUpdateOptimizer):
    """megatron-core's chained optimizer on the weights that this rank owns, which then shares the updated weights.

    Args:
        optimizer: of this rank's weights.
        ownerships: of all weights.
    """

    def __init__(self, optimizer: MegatronOptimizer, ownerships: Sequence[Ownership]):
        super().__init__(optimizer)
        self.ownerships = tuple(ownerships)

    def step_with_ready_grads(self) -> bool:
        """Update the weights of this rank and get those of the other ranks, unless the update is skipped."""
        is_updated = super().step_with_ready_grads()
        if is_updated:
            self.received_bytes += self.share()
        return is_updated

    @torch.no_grad()
    def share(self, replaced: Optional[Mapping[Tensor, Tensor]] = None) -> int:
        """`Ownership.share` of all weights."""
        return sum(each.share(replaced or {}) for each in self.ownerships)
