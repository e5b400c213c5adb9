"""Exponential moving average of the weights (`--ema-decay`), of the FP32 weights that the optimizer updates.

Every --ema-interval steps, in the k-th update:

    mean = mean + max(1 - decay, 1 / k) (weight - mean)

The first update copies the weights, the next ones are their plain mean until 1 / k falls to 1 - decay, and from then on
the mean is exponential. Without this start, the mean of a short run would be mostly its initial weights. A step without
an update of the weights makes none of the mean.

Each rank has the means of those elements that it updates, in FP32 or BF16: the distributed optimizer's flat ranges,
rows of weights, own weights, or complete weights. `checkpoint/weight_ema.py` saves and loads them in any layout.

BF16 reads and writes half the bytes. A remainder of 16 bits more would make it exact, but as large as FP32. So it is
rounded at random: no update is lost, and the expectation of the mean is that of FP32. The noise of the mean has a
standard deviation of up to sqrt(distance x spacing / 2), with the distance from the weight to its mean and the spacing
of BF16, whatever the decay: half a spacing where they are close, 8% of a distance of 80 spacings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor

from megafp8.kernels.random_rounding import round_at_random
from megafp8.optimizer.tensor_table import flat
from megafp8.optimizer.weight_shards import WeightShard, build_shards, share_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class MeanShard(WeightShard):
    """The mean of those elements of a weight that this rank updates.

    Attributes:
        mean: FP32 or BF16, flat.
    """

    mean: Tensor


class WeightEma:
    """The means of this rank's elements.

    Args:
        optimizer: the run's.
        dtype: fp32 or bf16.

    Attributes:
        num_updates: of the means; with 0 there are none yet.
    """

    def __init__(self, optimizer: Any, chunks: Sequence[Any], decay: float, interval: int, dtype: str):
        self.optimizer, self.chunks, self.decay, self.interval = optimizer, chunks, decay, interval
        self.num_updates = 0
        self.shards = [
            MeanShard(**vars(shard), mean=torch.zeros_like(flat(shard.key), dtype=DTYPES[dtype]))
            for shard in build_shards(optimizer)
        ]
        self._tables: list[Any] = []
        for part in optimizer.chained_optimizers:
            if not part.is_stub_optimizer:
                # Loading replaces tensors of the state, whose addresses the tables have.
                part.optimizer.register_load_state_dict_post_hook(lambda _: self._tables.clear())

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Update the means, if it is their turn after the update of a step; steps count from 1."""
        if step % self.interval:
            return
        self.num_updates += 1
        share = max(1 - self.decay, 1 / self.num_updates)
        if self.shards and self.shards[0].mean.is_cuda:
            self._launch(share)
            return
        for shard in self.shards:
            weight, _ = shard.master()  # on a CPU, masters are FP32
            if shard.mean.dtype == torch.float32:
                shard.mean.lerp_(weight, share)
            else:
                mean = torch.lerp(shard.mean.float(), weight, share)
                shard.mean.copy_(round_at_random(mean, weight, shard.first, self.num_updates))

    def _launch(self, share: float) -> None:
        """Update the means on a GPU: one launch for all shards of the same dtypes."""
        from megafp8.kernels.adam import BLOCK, TensorTable  # needs Triton
        from megafp8.kernels.ema import update_means

        if not self._tables:
            rows: dict[Any, list[tuple[int, tuple[Optional[Tensor], ...]]]] = {}
            for shard in self.shards:
                tensors = (*shard.master(), shard.mean)
                rows.setdefault(tensors[0].dtype, []).append((shard.first, tensors))
            for group in rows.values():
                positions = torch.tensor([first for first, _ in group]).to(self.shards[0].mean.device)
                self._tables.append((TensorTable([tensors for _, tensors in group], BLOCK), positions))
        for table, positions in self._tables:
            update_means(table, positions, share, self.num_updates)

    def reset(self) -> None:
        """Forget the means: the next update copies the weights."""
        self.num_updates = 0
        for shard in self.shards:
            shard.mean.zero_()

    @torch.no_grad()
    def write_to_model(self) -> list[Optional[Tensor]]:
        """Give the model the means as weights; all ranks call it, without pending gathers.

        Returns:
            What `restore_model` needs: this rank's shards of the weights that are not FP8.
        """
        assert self.num_updates
        stored = [shard.stored() for shard in self.shards]
        saved = [None if weights is None else weights.clone() for weights in stored]
        for shard, weights in zip(self.shards, stored, strict=True):
            if weights is not None:
                weights.copy_(shard.mean)
        replaced = {shard.key: shard.mean.float() for shard in self.shards if is_float8tensor(shard.weight)}
        share_weights(self.optimizer, self.chunks, replaced)
        return saved

    @torch.no_grad()
    def restore_model(self, saved: Sequence[Optional[Tensor]]) -> None:
        """Give the model its own weights back, to the bit; all ranks call it.

        FP8 weights are cast from the master weights again, with the scales of now.
        """
        for shard, values in zip(self.shards, saved, strict=True):
            if (weights := shard.stored()) is not None and values is not None:
                weights.copy_(values)
        share_weights(self.optimizer, self.chunks, {})
