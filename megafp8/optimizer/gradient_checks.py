"""Nothing that is not finite reaches the weights, and the message names where it came from.

A norm is finite only if every element is, and small enough to be clipped. Where the optimizer gives that of the reduced
gradients, nothing else is read, and whose numbers were bad is told from what the reduction left (`own_gradients`). Else
the norm of each bucket is taken before it is reduced over the data-parallel ranks: one read of the gradients per step
and no wait; the results gather in one flag on the device. At the end of the backward pass one small all-reduce tells
every rank the global loss and whether any rank saw a bad value, so all of them leave out the update together, or stop
together before it. Only then is time spent on finding the tensor.

(After the reduction a NaN of one rank is everybody's: the gradient norm, which trainers look at, names no rank. With
BF16 weights megatron-core does not look at all.)

Whose gradients were not finite, told after they were reduced over the data-parallel ranks.

A reduce-scatter sums each shard of a bucket on the rank that owns it, and leaves what a rank had of other shards where
it was. So a rank's own numbers can still be read but in its own shard, and what is bad there is its own where no other
rank has bad numbers. Nothing need be looked at before the reduction for that. It holds where every rank has the whole
model: gradients that tensor-parallel ranks or stages add up are everybody's afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megafp8.optimizer.gradient_communication import on_reduction

WEIGHT, GRADIENT = "weight", "gradient"
ATTENTION, PROJECTION = ".self_attention.", ".linear_proj."
NO_TENSOR = "none by itself; the squares of all gradients together overflow"
ONLY_LOSS = "none; weights and gradients are finite"


def is_finite(tensor: Tensor) -> Tensor:
    """Whether a tensor's norm is finite: no element is NaN or infinite, and their squares add up within FP32."""
    return torch.isfinite(torch.linalg.vector_norm(tensor, dtype=torch.float32))  # FP16's own ends at 65504


class NonFiniteGradientMonitor:
    """Notes on the device whether this rank's own gradients were finite when their reduction began."""

    def __init__(self, chunks: list[Any], device: torch.device):
        self.bad = torch.zeros((), device=device)
        for chunk in chunks:
            for group in chunk.bucket_groups:
                self.watch(group)

    def watch(self, group: Any) -> None:
        """Look at a bucket group whenever its reduction starts."""

        def look() -> None:
            for bucket in group.buckets:
                self.bad += ~is_finite(bucket.grad_data)

        on_reduction(group, look)

    def reset(self) -> None:
        """Forget, before the next step."""
        self.bad.zero_()


@dataclass(frozen=True)
class StepTotals:
    """What all ranks agree on after the backward pass of a step.

    Attributes:
        loss_sum: sum of the losses of the global batch in nats.
        num_tokens: tokens that count in it.
        num_bad_ranks: ranks whose own loss was not finite, or whose gradients, before or after they were reduced.
        squared_grad_norm: of all gradients, where the ranks gave their parts of it, else 0.
        num_asked_ranks: ranks that a signal asked to stop.
    """

    loss_sum: float
    num_tokens: float
    num_bad_ranks: float
    squared_grad_norm: float = 0.0
    num_asked_ranks: float = 0.0

    @property
    def loss(self) -> float:
        """Mean loss per token; NaN when no token counts."""
        return self.loss_sum / self.num_tokens if self.num_tokens else float("nan")

    @property
    def grad_norm(self) -> float:
        """L2 norm of all gradients."""
        return math.sqrt(self.squared_grad_norm)


def agree(
    local_loss: Optional[Tensor],
    bad_gradients: Tensor,
    device: torch.device,
    squared_norm: Optional[Tensor] = None,
    is_asked: bool = False,
) -> StepTotals:
    """Add up losses, bad ranks, squares of gradients and signals over all ranks; one all-reduce and one wait.

    Args:
        local_loss: (sum, tokens) of this rank, None on a rank that does not count the loss.
        bad_gradients: 0 where the gradients that this rank looked at are finite.
        squared_norm: of the gradients that this rank alone has; None where they are not looked at here.
        is_asked: a signal asked this rank to stop.
    """
    totals = torch.zeros(5, dtype=torch.float64, device=device)  # counts tokens beyond FP32's whole numbers
    if local_loss is not None:
        totals[:2] = local_loss
    totals[2] = (bad_gradients > 0) | ~torch.isfinite(totals[:2]).all()
    if squared_norm is not None:
        totals[3] = squared_norm
    if is_asked:
        totals[4] = 1
    dist.all_reduce(totals)
    return StepTotals(*totals.tolist())


class BadTensor(NamedTuple):
    """A tensor of this rank that is not finite.

    Attributes:
        kind: WEIGHT or GRADIENT.
        name: of the parameter.
        chunk: of the model that it is in, counted from 0.
    """

    kind: str
    name: str
    chunk: int


def first_bad_tensor(chunks: list[Any], bad_gradients: Optional[Set[tuple[int, str]]] = None) -> Optional[BadTensor]:
    """The first tensor of this rank that is not finite: of weights in the order of the forward pass, else of gradients
    in that of the backward pass, where one spoils all that come after it.

    Args:
        bad_gradients: (chunk, name) of those that are not; looked for if None.
    """
    parameters = list(in_forward_order(chunks))
    for index, name, parameter in parameters:
        if not bool(is_finite(parameter.detach())):
            return BadTensor(WEIGHT, name, index)
    for index, name, parameter in reversed(parameters):
        if bad_gradients is None:
            is_bad = not bool(is_finite(parameter.main_grad))
        else:
            is_bad = (index, name) in bad_gradients
        if is_bad:
            return BadTensor(GRADIENT, name, index)
    return None


def in_forward_order(chunks: list[Any]) -> Iterator[tuple[int, str, Any]]:
    """Chunk, name and tensor of every parameter. Modules are made in the order of the forward pass, but for attention's
    output projection, which megatron-core makes before what comes ahead of it."""
    for index, chunk in enumerate(chunks):
        named = [(name.removeprefix("module."), parameter) for name, parameter in chunk.module.named_parameters()]
        places: dict[str, int] = {}  # of whole attentions, and of every other parameter
        for place, (name, _) in enumerate(named):
            places.setdefault(unit_of(name), place)
        named.sort(key=lambda item: (places[unit_of(item[0])], PROJECTION in item[0]))
        yield from ((index, name, parameter) for name, parameter in named)


def unit_of(name: str) -> str:
    """`decoder.layers.0.self_attention` of a parameter in it; any other parameter is its own."""
    before, attention, _ = name.partition(ATTENTION)
    return before + attention if attention else name


class Sight(NamedTuple):
    """What a rank saw that met a number that is not finite.

    Attributes:
        replica: of the model, whose ranks bring up each other's numbers: the data-parallel rank.
        place: (chunk, pipeline stage) of the tensor, which rise in the order of the forward pass.
        tensor: None where each is finite.
        otherwise: what to say then.
        samples: that it read, in words.
    """

    replica: int
    place: tuple[int, int]
    is_loss_bad: bool
    tensor: Optional[BadTensor]
    otherwise: str
    samples: str


def bad_ranks(
    local_loss: Optional[Tensor],
    is_norm_bad: bool,
    chunks: list[Any],
    samples: str,
    bad_gradients: Optional[Set[tuple[int, str]]] = None,
) -> list[str]:
    """What each rank saw that met a number that is not finite, a line each; the same on all ranks, which call it.

    Args:
        is_norm_bad: a norm of gradients that this rank took is not finite.
        samples: what this rank read, in words.
        bad_gradients: (chunk, name) of this rank's own that are not finite, where the norm was that of reduced ones.
    """
    is_loss_bad = local_loss is not None and not bool(torch.isfinite(local_loss).all())
    sight = None
    if is_loss_bad or is_norm_bad or bad_gradients:
        tensor = first_bad_tensor(chunks, bad_gradients)
        sight = Sight(
            replica=parallel_state.get_data_parallel_rank(),
            place=(0 if tensor is None else tensor.chunk, parallel_state.get_pipeline_model_parallel_rank()),
            is_loss_bad=is_loss_bad,
            tensor=tensor,
            otherwise=NO_TENSOR if is_norm_bad else ONLY_LOSS,
            samples=samples,
        )
    gathered: list[Optional[Sight]] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, sight)
    sights = {rank: each for rank, each in enumerate(gathered) if each is not None}
    if bad_gradients is not None:  # then a rank whose only bad number is a norm may have it from another's gradients
        sights = {rank: each for rank, each in sights.items() if each.tensor or each.is_loss_bad} or sights
    return [f"rank {rank}: {describe(each, sights, len(chunks))}" for rank, each in sights.items()]


def describe(sight: Sight, sights: Mapping[int, Sight], num_chunks: int) -> str:
    """What a rank saw, in words. A gradient is called the first only where nothing before it explains it.

    Args:
        sights: those of all ranks.
        num_chunks: of the model on each rank.
    """
    tensor = sight.tensor
    place = f"chunk {tensor.chunk} " if tensor is not None and num_chunks > 1 else ""
    peers = {rank: each for rank, each in sights.items() if each.replica == sight.replica}
    earlier = [rank for rank, each in peers.items() if is_bad_gradient(each) and each.place > sight.place]
    if tensor is None:
        found = f"first bad tensor: {sight.otherwise}"
    elif tensor.kind == WEIGHT:
        found = f"first bad tensor: weight of {place}{tensor.name}"
    elif any(each.is_loss_bad for each in peers.values()):
        found = "its weights are finite, and bad gradients follow from the loss"
    elif earlier:
        found = f"its bad gradients may follow from those of rank {', '.join(map(str, earlier))}"
    else:
        found = f"first bad tensor: gradient of {place}{tensor.name}, in the order of the backward pass"
    return f"{'loss is not finite; ' if sight.is_loss_bad else ''}{found}; {sight.samples}"


def is_bad_gradient(sight: Sight) -> bool:
    """Did a rank see a gradient that is not finite, and no such weight?"""
    return sight.tensor is not None and sight.tensor.kind == GRADIENT


class GradientShard(NamedTuple):
    """A part of a parameter's gradient that one rank sums.

    Attributes:
        chunk: of the model, counted from 0.
        name: of the parameter, in its chunk.
        owner: the rank that sums it, counted in the data-parallel group.
    """

    chunk: int
    name: str
    owner: int


def local_bad_gradients(chunks: Sequence[Any]) -> set[tuple[int, str]]:
    """(chunk, name) of the parameters to whose gradients this rank brought numbers that are not finite.

    Called by all data-parallel ranks together, after a reduce-scatter. Where another rank's are bad in this rank's
    shard, too, nobody can say whether this rank's were: they count if others of this rank's are bad, else they do not.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    mine = {piece for piece, gradient in pieces(chunks, group.size()) if not bool(is_finite(gradient))}
    found: list[set[GradientShard]] = [set()] * group.size()
    dist.all_gather_object(found, mine, group=group)
    others = set().union(*(seen for rank, seen in enumerate(found) if rank != group.rank()))
    is_bad = any(piece.owner != group.rank() or piece not in others for piece in mine)
    return {(piece.chunk, piece.name) for piece in mine} if is_bad else set()


def pieces(chunks: Sequence[Any], num_ranks: int) -> Iterator[tuple[GradientShard, Tensor]]:
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
                    yield GradientShard(index, names[parameter], owner), gradient[low:high]
