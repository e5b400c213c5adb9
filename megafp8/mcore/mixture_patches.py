"""Patches of megatron-core's mixture-of-experts layers: some for CPUs, and some for every machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.mcore.patches import Patch, import_core

MOE_UTILS = "transformer.moe.moe_utils"
ROUTER_GEMM_EVIDENCE = (
    (
        "transformer/moe/moe_utils.py",
        "te_general_gemm,\n    )\n\n    HAVE_TE = True\nexcept ImportError:\n    HAVE_TE = False\n",
    ),
)
"""Without Transformer Engine 0.16 leaves te_general_gemm undefined, which a router in FP32 finds out when it runs."""


def define_router_gemm() -> None:
    """Let the router use torch's GEMM where Transformer Engine is not installed."""
    moe_utils = import_core(MOE_UTILS)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


GATHER_EVIDENCE = (
    (
        "optimizer/distrib_optimizer.py",
        "for model_chunk in self.model_chunks:\n                    model_chunk.start_param_sync()",
    ),
)
"""Each optimizer of a chunk gathers all of its weights. Experts with ranks of their own have a second optimizer."""
GATHER_EVIDENCE_OF_0_19 = (
    (
        "optimizer/distrib_optimizer.py",
        "for model_chunk in self.model_chunks:\n            for bucket_group in (\n",
    ),
)
"""The same in 0.19, which gathers once with MXFP8 weights only."""


def gather_weights_once(optimizers: Sequence[Any]) -> None:
    """Let only the last of the distributed optimizers that update a model chunk gather its weights after the update.

    Where gathers overlap with the forward pass, no optimizer gathers.
    """
    later: set[int] = set()
    for optimizer in reversed([each for each in optimizers if hasattr(each, "model_chunks")]):
        chunks = [chunk for chunk in optimizer.model_chunks if id(chunk) not in later]
        later.update(map(id, chunks))
        if len(chunks) < len(optimizer.model_chunks):
            optimizer.step_with_ready_grads = functools.partial(
                step_with_gathers_of, chunks, optimizer, optimizer.step_with_ready_grads
            )


def step_with_gathers_of(chunks: list[Any], optimizer: Any, step: Callable[[], bool]) -> bool:
    """Update, and gather the weights of some of the chunks of an optimizer."""
    every_chunk, optimizer.model_chunks = optimizer.model_chunks, chunks
    try:
        return step()
    finally:
        optimizer.model_chunks = every_chunk


def patch_token_counts() -> None:
    """Return counts that are on the CPU already as NumPy arrays where megatron-core asks for arrays."""
    dispatcher = import_core("transformer.moe.token_dispatcher")
    original = dispatcher.maybe_move_tensor_to_cpu

    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    dispatcher.maybe_move_tensor_to_cpu = move


def gather_uneven(shard: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """All-gather along dim 0 of shards with different numbers of rows.

    Args:
        shard: of this rank, [sizes[rank], ...].
        sizes: rows of each rank.
    """
    sizes = [int(size) for size in sizes]
    gathered = shard.new_empty(sum(sizes), *shard.shape[1:])
    copies = shard.contiguous().repeat(len(sizes), *(1 for _ in shard.shape[1:]))
    dist.all_to_all_single(gathered, copies, sizes, [len(shard)] * len(sizes), group=group)
    return gathered


def reduce_scatter_uneven(tensor: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, of which each keeps another number of rows of dim 0.

    Args:
        tensor: [sum(sizes), ...].
        sizes: rows that each rank keeps.

    Numerics: parts are added in the order of the ranks, in the dtype of `tensor`.
    """
    sizes = [int(size) for size in sizes]
    own = sizes[group.rank()]
    parts = tensor.new_empty(own * len(sizes), *tensor.shape[1:])
    dist.all_to_all_single(parts, tensor.contiguous(), [own] * len(sizes), sizes, group=group)
    return parts.view(len(sizes), own, *tensor.shape[1:]).sum(dim=0)


def patch_uneven_collectives() -> None:
    """Exchange shards of different sizes by all-to-all: gloo's all-gather and reduce-scatter need equal sizes."""
    mappings = import_core("tensor_parallel.mappings")
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_rows(
        input_: Tensor, group: Any, output_split_sizes: Optional[Sequence[int]] = None, use_global_buffer: bool = False
    ) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        return gather_uneven(input_, output_split_sizes, group)

    def reduce_scatter_rows(
        input_: Tensor, group: Any, input_split_sizes: Optional[Sequence[int]] = None, use_global_buffer: bool = False
    ) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        return reduce_scatter_uneven(input_, input_split_sizes, group)

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_rows, reduce_scatter_rows


CPU_PATCHES = (
    Patch(
        "token counts",
        "the alltoall dispatcher passes CPU tensors as sizes of messages, which torch.distributed does not accept",
        (("transformer/moe/moe_utils.py", "if torch.is_tensor(tensor) and tensor.is_cuda:"),),
        patch_token_counts,
    ),
    Patch(
        "uneven collectives",
        "tokens of experts that are split over tensor-parallel ranks are gathered in shards of different sizes",
        (
            ("tensor_parallel/mappings.py", "torch.distributed.all_gather(output_tensor_list, input_, group=group)"),
            ("tensor_parallel/mappings.py", "torch.distributed.reduce_scatter(output, input_tensor_list, group=group)"),
        ),
        patch_uneven_collectives,
    ),
)
