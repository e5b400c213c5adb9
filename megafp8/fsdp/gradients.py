"""Gradients of `--use-torch-fsdp2`: as FP8 codes (`--grad-reduce-in-fp8`), and their traffic.

A reduction in FP8 is that of `optimizer.fp8_gradients`: codes and scales go to the rank that owns the rows, which adds
them in FP32. FSDP2 reduces the gradients of each microbatch, so that each is quantized, in contrast to megatron-core's
DDP, which adds the microbatches first.

Hybrid sharding has two levels, as `optimizer.node_reduction` has, with a replica in place of a node:

    1. within a replica, in every microbatch: codes, or a reduce-scatter of BF16 or FP32 gradients
       (`--grad-reduce-fp8-intra-node`); rank r then has the replica's sums of its rows, and adds the microbatches
    2. between the replicas, once in a step: rank r of every replica sends codes of these sums, as an all-reduce does

The second level is the slow link. Its codes are those of complete sums, so that it has the bytes and the errors of one
microbatch, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from megafp8.errors import ConfigError
from megafp8.mcore.grad_reduction import Reduction
from megafp8.mcore.torch_fsdp import GradientSums, ReplicaSums, TorchFSDP, fsdp_modules, parameter_group
from megafp8.optimizer.data_parallel import Excludes
from megafp8.optimizer.fp8_gradients import Fp8Reduction, GradientCodes, PipelinedReduction
from megafp8.optimizer.gradient_slices import GradientSlice, Shard, split_bucket
from megafp8.optimizer.node_reduction import FLAG, sum_within_node
from megafp8.optimizer.received_bytes import ReceivedBytes
from megafp8.optimizer.reduction_works import PartialWork


class Fp8ReduceScatter(DefaultReduceScatter):
    """A reduce-scatter of codes, for the parameters of one FSDP module.

    Args:
        chunk: has several replicas or one. With several, the bytes within them are also counted apart.
        sums: of the parameters, in the order in which FSDP2 packs them.
        excluded: by parameter: not quantized.
    """

    def __init__(
        self, chunk: TorchFSDP, sums: GradientSums, excluded: Sequence[bool], codes: GradientCodes, step: Fp8Reduction
    ):
        self.group: dist.ProcessGroup = chunk.process_group
        self.num_elements, self.step = len(sums.rows) * self.group.size(), step
        self.is_level = chunk.replicas is not None
        shards = rank_shards(sums.sizes, excluded, self.group.size())
        self._reduction = PipelinedReduction(sums.rows, shards, len(sums.sizes), self.group, codes, step)

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
    """Adds the sums of a chunk's replicas as codes.

    Args:
        excludes: whether a sharded parameter is not quantized.
    """

    def __init__(self, chunk: TorchFSDP, excludes: Excludes, codes: GradientCodes, step: Fp8Reduction):
        assert chunk.replicas is not None
        group = chunk.replicas.group
        super().__init__(group)
        self._last: Optional[PartialWork] = None
        self._reductions = {}
        for sums in chunk.sums:
            unquantized = [excludes(parameter) for parameter in sums.parameters]
            # The sums of this rank's rows are divided among the replicas as a bucket is among ranks.
            shards = split_bucket(
                list(pairwise([0, *accumulate(sums.sizes)])), unquantized, len(sums.rows), group.size()
            )
            self._reductions[sums] = PipelinedReduction(sums.rows, shards, len(unquantized), group, codes, step)

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
    # FSDP2 packs [rank, parameter]: rank r's rows of all parameters lie at r x (elements of a rank).
    ends = list(pairwise([0, *accumulate(sizes)]))
    shards = []
    for first in range(0, num_ranks * sum(sizes), sum(sizes)):
        slices = [GradientSlice(first + start, first + end, index) for index, (start, end) in enumerate(ends)]
        kinds = [[each for each in slices if is_unquantized[each.parameter] == kind] for kind in (False, True)]
        shards.append(Shard(*map(tuple, kinds)))
    return shards


def check_replica_in_node(ranks: Sequence[int], ranks_per_node: int) -> None:
    """Check that the global ranks of a replica of hybrid sharding lie on one node.

    Raises:
        ConfigError: they do not.
    """
    num_nodes = len({rank // ranks_per_node for rank in ranks})
    if num_nodes > 1:
        raise ConfigError(
            f"{FLAG}: a replica of --use-torch-fsdp2 has {len(ranks)} ranks on {num_nodes} nodes (LOCAL_WORLD_SIZE "
            f"{ranks_per_node}), whose sums are not those of a node: make a replica of each node with "
            "--num-distributed-optimizer-instances, or remove the flag"
        )


class HookedReduceScatter(DefaultReduceScatter):
    """A reduce-scatter that gives this rank's gradients to a function before."""

    def __init__(self, reduce: Callable[..., Any], hook: Callable[[Tensor], None]):
        self._reduce, self._hook = reduce, hook

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        """Call the function, and reduce."""
        self._hook(input_tensor)
        return self._reduce(output_tensor, input_tensor, *args, **options)


def add_reduction_hook(module: Any, hook: Callable[[Tensor], None]) -> None:
    """Call a function with the gradients of a module, flat, before each reduction.

    Args:
        module: of FSDP2, with parameters. A collective that is set later replaces the hook.
    """
    module.set_custom_reduce_scatter(HookedReduceScatter(parameter_group(module)._reduce_scatter_comm, hook))


class CountedGather(ReceivedBytes, DefaultAllGather):
    """An all-gather that counts the bytes that this rank receives.

    Args:
        chunks: model chunks whose gathers it carries out.
    """

    def __init__(self, chunks: Sequence[Any]):
        for module in fsdp_modules(*chunks):
            module.set_custom_all_gather(self)
        for codes, _ in (each for chunk in chunks for each in chunk.quantized_weights):
            codes.exchange = self._counted(codes.exchange)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        """Gather, in the format of the input."""
        self.received_bytes += output_tensor.nbytes - input_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, *args, **options)

    def _counted(self, exchange: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap the reduction of amaxes, which is counted as one message of their size."""

        def counted(amax: Tensor, group: Optional[dist.ProcessGroup]) -> Tensor:
            self.received_bytes += amax.nbytes if group is not None else 0
            return exchange(amax, group)

        return counted


class CountedReduction(ReceivedBytes):
    """Counts the bytes of gradients that this rank receives, as a ring sends them.

    They are those of reduce-scatters, and of both phases of the all-reduces between replicas.

    Args:
        chunks: model chunks with the gradients.
    """

    def __init__(self, chunks: Sequence[Any]):
        for chunk in chunks:
            for sums in chunk.sums:
                add_reduction_hook(sums.module, partial(self._count, 1, chunk.process_group.size()))
            if chunk.replicas is not None:
                chunk.replicas.start = self._counted(chunk.replicas.start, chunk.replicas.group.size())

    def _count(self, num_phases: int, num_ranks: int, gradients: Tensor) -> None:
        self.received_bytes += num_phases * gradients.nbytes * (num_ranks - 1) // num_ranks

    def _counted(self, start: Callable[[GradientSums], None], num_replicas: int) -> Callable[[GradientSums], None]:
        """Wrap the start of an all-reduce between replicas."""

        def counted(sums: GradientSums) -> None:
            self._count(2, num_replicas, sums.rows)
            start(sums)

        return counted
