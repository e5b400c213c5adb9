"""Replaces the collectives of megatron-core's gradient reduction, and nothing else of it.

megatron-core decides when a bucket is reduced, scales its gradients, and chooses between reduce-scatter and all-reduce.
Its BF16 reduce-scatter with FP32 accumulation is substituted at the same place, but for all bucket groups of a process,
without an all-reduce, and without the bucket. Here its two calls are recorded while `start_grad_sync` runs, and the
given function reduces the buckets right after it, outside of the context in which torch delays collectives.

`REDUCTION_EVIDENCE` quotes the calls. A test fails when a quoted text is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Protocol
from unittest.mock import patch

import torch
from torch import Tensor

from megafp8.mcore.patches import import_core

BUFFERS = "distributed.param_and_grad_buffer"
REDUCTION_EVIDENCE = (
    ("distributed/param_and_grad_buffer.py", "dist_reduce_scatter_func = reduce_scatter_with_fp32_accumulation"),
    ("distributed/param_and_grad_buffer.py", "grad_reduce_handle = dist_reduce_scatter_func("),
    (
        "distributed/param_and_grad_buffer.py",
        "torch.distributed.all_reduce(\n                        bucket.grad_data, op=reduce_op",
    ),
)


@dataclass(frozen=True)
class Reduction:
    """A reduction that megatron-core requests.

    Attributes:
        gradients: those of a bucket, flat.
        is_complete: all ranks need all sums (all-reduce), not only those of their shards (reduce-scatter).
        is_average: the sums are divided by the number of ranks.
    """

    gradients: Tensor
    is_complete: bool
    is_average: bool


class Work(Protocol):
    """A reduction under way."""

    def wait(self) -> None:
        """Finish it: the sums are then in the gradients of the bucket."""


def replace_reduction(group: Any, reduce: Callable[[Sequence[Reduction]], Work]) -> None:
    """Reduce the gradients of a bucket group with a function of ours.

    Call it before hooks are added to the group, which then run before the reduction.

    Args:
        reduce: starts the reductions of the buckets of the group, in their order.
    """
    start_grad_sync = group.start_grad_sync

    def start(*args: Any, **kwargs: Any) -> None:
        with recorded_reductions() as requested:
            start_grad_sync(*args, **kwargs)
        if not requested:  # megatron-core has nothing to reduce in a repeated call
            return
        work = reduce(requested)
        if group.grad_reduce_handle is None:
            work.wait()
        else:  # with overlap it waits for the handle after the backward pass
            group.grad_reduce_handle = work

    group.start_grad_sync = start


@contextlib.contextmanager
def recorded_reductions() -> Iterator[list[Reduction]]:
    """Context in which megatron-core's reductions of gradients are recorded and not carried out."""
    requested: list[Reduction] = []

    def reduce_scatter(shard: Tensor, gradients: Tensor, *, op: Any, **options: Any) -> None:
        requested.append(Reduction(gradients, False, op == torch.distributed.ReduceOp.AVG))

    def all_reduce(gradients: Tensor, *, op: Any, **options: Any) -> None:
        requested.append(Reduction(gradients, True, op == torch.distributed.ReduceOp.AVG))

    with (
        patch.object(import_core(BUFFERS), "dist_reduce_scatter_func", reduce_scatter),
        patch.object(torch.distributed, "all_reduce", all_reduce),
    ):
        yield requested


def reduction_group(group: Any) -> Optional[torch.distributed.ProcessGroup]:
    """The ranks over which a bucket group is reduced; None if that is one rank."""
    ranks = (
        group.intra_distributed_optimizer_instance_group
        if group.ddp_config.use_distributed_optimizer
        else group.data_parallel_group
    )
    return ranks if ranks.size() > 1 else None
