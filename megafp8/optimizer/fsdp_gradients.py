"""Gradients of `--use-torch-fsdp2` as FP8 codes (`--grad-reduce-in-fp8`).

A reduction is that of `optimizer.fp8_gradients`: codes and scales go to the rank that owns the rows, which adds them in
FP32. FSDP2 reduces the gradients of each microbatch, so that each is quantized, in contrast to megatron-core's DDP,
which adds the microbatches first.

Hybrid sharding has two levels, as `optimizer.node_reduction` has, with a replica in place of a node:

    1. within a replica, in every microbatch: codes, or a reduce-scatter of BF16 or FP32 gradients
       (`--grad-reduce-fp8-intra-node`); rank r then has the replica's sums of its rows, and adds the microbatches
    2. between the replicas, once in a step: rank r of every replica sends codes of these sums, as an all-reduce does

The second level is the slow link. Its codes are those of complete sums, so that it has the bytes and the errors of one
microbatch, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from megafp8.mcore.fsdp_groups import GradientSums, ReplicaSums
from megafp8.mcore.grad_reduction import Reduction
from megafp8.mcore.torch_fsdp import TorchFSDP
from megafp8.optimizer.fp8_gradients import Fp8Reduction, GradientCodes, PipelinedReduction
from megafp8.optimizer.gradient_slices import GradientSlice, Shard, split_bucket
from megafp8.optimizer.node_reduction import sum_within_node
from megafp8.optimizer.reduction_works import PartialWork


class Fp8ReduceScatter(DefaultReduceScatter):
    """A reduce-scatter of codes, for the parameters of one FSDP module.

    Args:
        gradients: a tensor of the dtype and the device of the gradients.
        sizes: elements of each parameter on one rank, in the order in which FSDP2 packs them.
        is_unquantized: by parameter: not quantized.
        is_level: the ranks are those of one of several replicas, so that their bytes are also counted apart.
    """

    def __init__(
        self,
        gradients: Tensor,
        sizes: Sequence[int],
        is_unquantized: Sequence[bool],
        group: dist.ProcessGroup,
        settings: GradientCodes,
        step: Fp8Reduction,
        is_level: bool,
    ):
        self.num_elements, self.group, self.step, self.is_level = sum(sizes) * group.size(), group, step, is_level
        shards = rank_shards(sizes, is_unquantized, group.size())
        self._reduction = PipelinedReduction(gradients, shards, len(sizes), group, settings, step)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Send the codes, and add them. Later work on the stream waits for the sums, so that no handle is needed."""
        # `TorchFSDP` asks for sums. FSDP2 calls this on its stream of reductions, and takes no handle.
        assert not async_op and op == dist.ReduceOp.SUM and group.size() == self.group.size()
        assert input_tensor.numel() == self.num_elements, "a gradient is missing, or padded"
        received_before = self.step.received_bytes
        # With NCCL the stream waits, not the host.
        self._reduction.start(Reduction(input_tensor, is_complete=False, is_average=False)).wait()
        # Only the bytes of this reduction: another module's may have been counted before.
        if self.is_level:
            self.step.within_node.received_bytes += self.step.received_bytes - received_before
        # The sums are in this rank's chunk of the input, where FSDP2 packed its rows.
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


class ReplicaReduceScatter(DefaultReduceScatter):
    """A reduce-scatter within a replica in another dtype than that of the gradients, whose bytes are counted."""

    def __init__(self, dtype: torch.dtype, step: Fp8Reduction):
        self.dtype, self.step = dtype, step

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Add the gradients, and wait."""
        assert not async_op and op == dist.ReduceOp.SUM
        # FSDP2's output has the dtype of its gradients, to which `copy_` converts the sums.
        output_tensor.copy_(sum_within_node(input_tensor.to(self.dtype), group, self.step))


class QuantizedReplicaSums(ReplicaSums):
    """Adds the sums of replicas as codes.

    Args:
        all_sums: of a chunk.
        is_unquantized: whether a sharded parameter is not quantized.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        all_sums: Sequence[GradientSums],
        is_unquantized: Callable[[Any], bool],
        settings: GradientCodes,
        step: Fp8Reduction,
    ):
        super().__init__(group)
        self._last: Optional[PartialWork] = None
        self._reductions = {}
        for sums in all_sums:
            unquantized = [is_unquantized(parameter) for parameter in sums.parameters]
            # The sums of this rank's rows are divided among the replicas as a bucket is among ranks.
            shards = split_bucket(
                list(pairwise([0, *accumulate(sums.sizes)])), unquantized, len(sums.rows), group.size()
            )
            self._reductions[sums] = PipelinedReduction(sums.rows, shards, len(unquantized), group, settings, step)

    def _send(self, sums: GradientSums) -> PartialWork:
        # The codes of a module are added, and its sums sent, when those of the next module have been sent: both phases
        # of an all-reduce overlap with the backward pass, except for the last module.
        work = self._reductions[sums].start(Reduction(sums.rows, is_complete=True, is_average=False))
        self._add_last()
        self._last = work
        return work

    def _wait(self, works: Sequence[PartialWork]) -> None:
        # The last module has no successor that would add its codes.
        self._add_last()
        self._last = None
        # In the order in which they were sent, which is that of the backward pass on all ranks.
        for work in works:
            work.receive()

    def _add_last(self) -> None:
        if self._last is not None:
            self._last.add()


def rank_shards(sizes: Sequence[int], is_unquantized: Sequence[bool], num_ranks: int) -> list[Shard]:
    """The slices that FSDP2 packs for each rank: that rank's rows of every parameter, one after the other."""
    offsets = [0, *accumulate(sizes)]
    slices = [
        [
            # FSDP2 packs [rank, parameter]: rank r's rows of all parameters lie at r x (elements of a rank).
            GradientSlice(rank * offsets[-1] + offsets[i], rank * offsets[-1] + offsets[i + 1], i)
            for i in range(len(sizes))
        ]
        for rank in range(num_ranks)
    ]
    return [
        Shard(
            tuple(slice_ for slice_ in of_rank if not is_unquantized[slice_.parameter]),
            tuple(slice_ for slice_ in of_rank if is_unquantized[slice_.parameter]),
        )
        for of_rank in slices
    ]


def reduce_in_fp8(
    chunk: TorchFSDP,
    is_unquantized: Callable[[Any], bool],
    settings: GradientCodes,
    step: Fp8Reduction,
    replica_dtype: Optional[torch.dtype] = None,
) -> None:
    """Reduce the gradients of a chunk as codes.

    Args:
        is_unquantized: whether a sharded parameter is not quantized.
        replica_dtype: of the sums within a replica; None sends codes there too.
    """
    for sums in chunk.sums:
        unquantized = [is_unquantized(parameter) for parameter in sums.parameters]
        sums.module.set_custom_reduce_scatter(
            Fp8ReduceScatter(
                sums.rows, sums.sizes, unquantized, chunk.process_group, settings, step, chunk.replicas is not None
            )
            if replica_dtype is None
            else ReplicaReduceScatter(replica_dtype, step)
        )
    if chunk.replicas is not None:
        chunk.replicas = QuantizedReplicaSums(chunk.replicas.group, chunk.sums, is_unquantized, settings, step)
