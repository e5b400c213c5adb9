"""Gradients of `--use-torch-fsdp2` as FP8 codes (`--grad-reduce-in-fp8`).

A reduction is that of `optimizer.fp8_gradients`: codes and scales go to the rank that owns the rows, which adds them in
FP32. FSDP2 reduces the gradients of each microbatch, so that each is quantized, in contrast to megatron-core's DDP,
which adds the microbatches first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from megafp8.mcore.fsdp_groups import fsdp_modules, fsdp_parameters
from megafp8.mcore.grad_reduction import Reduction
from megafp8.mcore.torch_fsdp import TorchFSDP
from megafp8.optimizer.fp8_gradients import Fp8Reduction, GradientCodes, PipelinedReduction
from megafp8.optimizer.gradient_pieces import Piece, Shard


class Fp8ReduceScatter(DefaultReduceScatter):
    """A reduce-scatter of codes, for the parameters of one FSDP module.

    Args:
        gradients: a tensor of the dtype and the device of the gradients.
        sizes: elements of each parameter on one rank, in the order in which FSDP2 packs them.
        is_exact: by parameter: not quantized.
    """

    def __init__(
        self,
        gradients: Tensor,
        sizes: Sequence[int],
        is_exact: Sequence[bool],
        group: dist.ProcessGroup,
        settings: GradientCodes,
        step: Fp8Reduction,
    ):
        self.num_elements, self.group = sum(sizes) * group.size(), group
        shards = rank_shards(sizes, is_exact, group.size())
        self._reduction = PipelinedReduction(gradients, shards, len(sizes), group, settings, step)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Send the codes, and add them. Later work on the stream waits for the sums, so that no handle is needed."""
        assert not async_op and op == dist.ReduceOp.SUM and group.size() == self.group.size()
        assert input_tensor.numel() == self.num_elements, "a gradient is missing, or padded"
        self._reduction.start(Reduction(input_tensor, is_complete=False, is_average=False)).wait()
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def rank_shards(sizes: Sequence[int], is_exact: Sequence[bool], num_ranks: int) -> list[Shard]:
    """The pieces that FSDP2 packs for each rank: that rank's rows of every parameter, one after the other."""
    offsets = [0, *accumulate(sizes)]
    pieces = [
        [Piece(rank * offsets[-1] + offsets[i], rank * offsets[-1] + offsets[i + 1], i) for i in range(len(sizes))]
        for rank in range(num_ranks)
    ]
    return [
        Shard(
            tuple(piece for piece in of_rank if not is_exact[piece.parameter]),
            tuple(piece for piece in of_rank if is_exact[piece.parameter]),
        )
        for of_rank in pieces
    ]


def reduce_in_fp8(
    chunk: TorchFSDP, is_exact: Callable[[Any], bool], settings: GradientCodes, step: Fp8Reduction
) -> None:
    """Reduce the gradients of a chunk as codes.

    Args:
        is_exact: whether a sharded parameter is not quantized.
    """
    for module in fsdp_modules(chunk):
        parameters = [each.sharded_param for each in fsdp_parameters(module)]
        if parameters:
            sizes = [parameter.to_local().numel() for parameter in parameters]
            exact = [is_exact(parameter) for parameter in parameters]
            gradients = parameters[0].main_grad.to_local()
            module.set_custom_reduce_scatter(
                Fp8ReduceScatter(gradients, sizes, exact, chunk.process_group, settings, step)
            )
