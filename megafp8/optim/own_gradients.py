"""Whose gradients were not finite, told after they were reduced over the data-parallel ranks.

A reduce-scatter sums each shard of a bucket on the rank that owns it, and leaves what a rank had of other shards where
it was. So a rank's own numbers can still be read but in its own shard, and what is bad there is its own where no other
rank has bad numbers. Nothing need be looked at before the reduction for that. It holds where every rank has the whole
model: gradients that tensor-parallel ranks or stages add up are everybody's afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megafp8.optim.finite import is_finite


class Piece(NamedTuple):
    """A part of a parameter's gradient that one rank sums.

    Attributes:
        chunk: of the model, counted from 0.
        name: of the parameter, in its chunk.
        owner: the rank that sums it, counted in the data-parallel group.
    """

    chunk: int
    name: str
    owner: int


def own_bad_gradients(chunks: Sequence[Any]) -> set[tuple[int, str]]:
    """(chunk, name) of the parameters to whose gradients this rank brought numbers that are not finite.

    Called by all data-parallel ranks together, after a reduce-scatter. Where another rank's are bad in this rank's
    shard, too, nobody can say whether this rank's were: they count if others of this rank's are bad, else they do not.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    mine = {piece for piece, gradient in pieces(chunks, group.size()) if not bool(is_finite(gradient))}
    found: list[set[Piece]] = [set()] * group.size()
    dist.all_gather_object(found, mine, group=group)
    others = set().union(*(seen for rank, seen in enumerate(found) if rank != group.rank()))
    is_bad = any(piece.owner != group.rank() or piece not in others for piece in mine)
    return {(piece.chunk, piece.name) for piece in mine} if is_bad else set()


def pieces(chunks: Sequence[Any], num_ranks: int) -> Iterator[tuple[Piece, Tensor]]:
    """Every gradient of this rank, cut where the shards of its bucket end."""
    for index, chunk in enumerate(chunks):
        names = {parameter: name.removeprefix("module.") for name, parameter in chunk.module.named_parameters()}
        for bucket in (bucket for group in chunk.bucket_groups for bucket in group.buckets):
            shard_size = bucket.grad_data.numel() // num_ranks
            for parameter in bucket.params_list:
                gradient = parameter.main_grad.view(-1)
                start = gradient.storage_offset() - bucket.grad_data.storage_offset()
                for owner in range(start // shard_size, (start + len(gradient) - 1) // shard_size + 1):
                    low, high = (max(0, edge * shard_size - start) for edge in (owner, owner + 1))
                    yield Piece(index, names[parameter], owner), gradient[low:high]
