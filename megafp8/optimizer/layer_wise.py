"""Muon with --use-distributed-optimizer: each data-parallel rank updates complete weights of its own.

The state of megatron-core's distributed optimizer is cut into flat ranges, but Newton-Schulz needs complete matrices.
So every weight has one owner among the ranks that hold copies of it. Only the owner has its FP32 master weight and its
moments, and updates it. Afterwards each owner broadcasts its updated weights. Gradients are reduced by all-reduce, as
without --use-distributed-optimizer, so the trained weights are the same to the bit.

This is the distribution of Megatron-LM's layer-wise optimizer with --no-use-layer-wise-param-layout, up to the choice
of the owners. Its default layout gives the same weights, with a reduce-scatter in place of the all-reduce and flat
ranges for the weights that are not Muon's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megafp8.optimizer.received_bytes import ReceivedBytes
from megafp8.optimizer.skip_update import SkipUpdateOptimizer


@dataclass(frozen=True)
class Ownership:
    """The owners of weights that the ranks of a group hold.

    Attributes:
        owned: the weights of each rank of the group.
    """

    group: dist.ProcessGroup
    owned: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def divide(cls, weights: Sequence[Tensor], group: dist.ProcessGroup) -> Ownership:
        """Give each weight to the rank that has the fewest elements so far, large weights first.

        Args:
            weights: the same on all ranks of the group, in the same order.
        """
        owned: list[list[Tensor]] = [[] for _ in range(group.size())]
        sizes = [0] * group.size()
        for weight in sorted(weights, key=lambda weight: -weight.numel()):  # stable, so the same on all ranks
            rank = sizes.index(min(sizes))
            owned[rank].append(weight)
            sizes[rank] += weight.numel()
        return cls(group, tuple(map(tuple, owned)))

    @property
    def of_this_rank(self) -> tuple[Tensor, ...]:
        """The weights that this rank updates."""
        return self.owned[self.group.rank()]

    @torch.no_grad()
    def share(self) -> int:
        """Broadcast each owner's weights to the other ranks; returns the bytes that this rank received."""
        received = 0
        for index, weights in enumerate(self.owned):
            for dtype in {weight.dtype: None for weight in weights}:
                each = [weight for weight in weights if weight.dtype == dtype]
                flat = torch.cat([weight.detach().flatten() for weight in each])
                dist.broadcast(flat, dist.get_global_rank(self.group, index), group=self.group)
                if index == self.group.rank():
                    continue
                received += flat.nbytes
                for weight, values in zip(each, flat.split([weight.numel() for weight in each]), strict=True):
                    weight.copy_(values.view_as(weight))
        return received


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
            self.received_bytes += sum(each.share() for each in self.ownerships if each.group.size() > 1)
        return is_updated
