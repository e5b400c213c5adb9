"""Checks for non-finite losses and gradients, and locates the rank and tensor that caused them.

Detection: a norm is finite only if all elements are. Where the optimizer provides the norm of the reduced gradients,
only that is checked. Otherwise `NonFiniteGradientMonitor` computes the norm of each bucket before it is reduced over
the data-parallel ranks, because a NaN spreads to all ranks in the reduction. This reads the gradients once per step and
does not synchronize; the result is one flag on the device. After the backward pass `reduce_step_totals` reduces loss
and flags over all ranks, so that all ranks skip the update or stop together. megatron-core's own check does not name a
rank, and with BF16 weights it has none.

Location: the search for the tensor runs only after a detection. If the gradients are already reduced, the local
gradients of a rank can still be checked. A reduce-scatter overwrites only the shard that a rank owns and leaves its
local values of the other shards. Non-finite values in a rank's own shard are attributed to it if no other rank has any.
This holds only where every rank has the complete model: tensor-parallel ranks and pipeline stages sum gradients too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor

from megafp8.mcore.process_groups import bucket_groups, expert_bucket_groups
from megafp8.optimizer.gradient_communication import add_grad_sync_hook

WEIGHT, GRADIENT = "weight", "gradient"
ATTENTION, PROJECTION = ".self_attention.", ".linear_proj."
NORM_OVERFLOW = "none individually; the sum of squares of all gradients overflows"
LOSS_ONLY = "none; weights and gradients are finite"


def is_finite(tensor: Tensor) -> Tensor:
    """Whether a tensor's norm is finite: all elements are, and the sum of squares does not overflow FP32.

    Of a tensor that FSDP2 has sharded, it is the norm of this rank's rows.
    """
    tensor = to_local_if_dtensor(tensor)
    return torch.isfinite(torch.linalg.vector_norm(tensor, dtype=torch.float32))  # an FP16 norm overflows at 65504


class NonFiniteGradientMonitor:
    """Records on the device whether this rank's local gradients are finite when their reduction starts."""

    def __init__(self, chunks: list[Any], device: torch.device):
        self.bad = torch.zeros((), device=device)
        for chunk in chunks:
            for group in bucket_groups(chunk):
                add_grad_sync_hook(group, partial(self._check, group))

    def _check(self, group: Any) -> None:
        for bucket in group.buckets:
            self.bad += ~is_finite(bucket.grad_data)

    def reset(self) -> None:
        """Clear the flag before the next step."""
        self.bad.zero_()


class CodeCounts(NamedTuple):
    """FP8 codes of gradients in a step, over all ranks: of all values, or of a sample from large buckets.

    Attributes:
        num_values: quantized values that are not 0.
        num_underflows: those of them that became 0.
        num_saturated: values beyond the largest number that their scale expresses.
    """

    num_values: float
    num_underflows: float
    num_saturated: float

    @property
    def underflow_fraction(self) -> float:
        """Of the nonzero values, those that became zero."""
        return self.num_underflows / self.num_values if self.num_values else 0.0

    @property
    def saturated_fraction(self) -> float:
        """Of the nonzero values, those that saturated."""
        return self.num_saturated / self.num_values if self.num_values else 0.0


@dataclass(frozen=True)
class StepTotals:
    """Loss, gradient norm, and numbers of ranks with non-finite values and stop signals, reduced over all ranks.

    Attributes:
        loss_sum: sum of the losses of the global batch in nats.
        num_tokens: tokens that count in it.
        num_bad_ranks: ranks with a non-finite loss or non-finite gradients.
        squared_grad_norm: of all gradients; 0 where the ranks passed no `squared_norm`.
        num_stopping_ranks: ranks that received a stop signal.
        grad_codes: of gradients that are reduced in FP8.
        num_non_finite, num_saturated: values of quantized operands, see `quantization/counters.py`.
        num_infinite_amaxes: linears with infinite amaxes in their histories.
        mtp_losses: mean loss of each depth of multi-token prediction.
    """

    loss_sum: float
    num_tokens: float
    num_bad_ranks: float
    squared_grad_norm: float = 0.0
    num_stopping_ranks: float = 0.0
    grad_codes: CodeCounts = CodeCounts(0.0, 0.0, 0.0)
    num_non_finite: float = 0.0
    num_saturated: float = 0.0
    num_infinite_amaxes: float = 0.0
    mtp_losses: tuple[float, ...] = ()

    @property
    def loss(self) -> float:
        """Mean loss per token; NaN without tokens."""
        return self.loss_sum / self.num_tokens if self.num_tokens else float("nan")

    @property
    def grad_norm(self) -> float:
        """L2 norm of all gradients."""
        return math.sqrt(self.squared_grad_norm)


def reduce_step_totals(
    local_loss: Optional[Tensor],
    bad_gradients: Tensor,
    device: torch.device,
    squared_norm: Optional[Tensor] = None,
    is_stopping: bool = False,
    grad_codes: Optional[Tensor] = None,
    nonfinite_operands: Optional[Tensor] = None,
    depth_sums: Optional[Tensor] = None,
) -> StepTotals:
    """Reduce losses, non-finite flags, squared norms, stop signals and counts over all ranks, in one all-reduce.

    Args:
        local_loss: (sum, tokens) of this rank; None on a rank whose loss is not counted.
        bad_gradients: 0 if the checked gradients of this rank are finite.
        squared_norm: of this rank's gradient shards; None where the optimizer takes the norm.
        is_stopping: whether this rank received a stop signal.
        grad_codes: [3], the numbers of `CodeCounts` of this rank; None where gradients are not reduced in FP8.
        nonfinite_operands: [3], `num_non_finite` to `num_infinite_amaxes` on this rank; None counts nothing.
        depth_sums: (sum, tokens) of each depth of multi-token prediction [depths, 2], 0 on a rank whose loss is not
            counted; None on all ranks without it.
    """
    depths = 0 if depth_sums is None else len(depth_sums)
    totals = torch.zeros(11 + 2 * depths, dtype=torch.float64, device=device)  # token counts exceed FP32's integers
    if local_loss is not None:
        totals[:2] = local_loss
    totals[2] = (bad_gradients > 0) | ~torch.isfinite(totals[:2]).all()
    if squared_norm is not None:
        totals[3] = squared_norm
    if is_stopping:
        totals[4] = 1
    if grad_codes is not None:
        totals[5:8] = grad_codes
    if nonfinite_operands is not None:
        totals[8:11] = nonfinite_operands
    if depth_sums is not None:
        totals[11:] = depth_sums.flatten()
    dist.all_reduce(totals)
    loss_sum, num_tokens, num_bad, squared, num_stopping, *counts = totals[:11].tolist()
    means = tuple(total / count if count else math.nan for total, count in totals[11:].view(-1, 2).tolist())
    codes = CodeCounts(*counts[:3])
    num_non_finite, num_saturated, num_infinite = counts[3:]
    return StepTotals(
        loss_sum, num_tokens, num_bad, squared, num_stopping, codes, num_non_finite, num_saturated, num_infinite, means
    )


class BadTensor(NamedTuple):
    """A non-finite tensor of this rank.

    Attributes:
        kind: WEIGHT or GRADIENT.
        name: of the parameter.
        chunk: index of the model chunk.
    """

    kind: str
    name: str
    chunk: int


def find_bad_tensor(chunks: list[Any], bad_gradients: Optional[Set[tuple[int, str]]] = None) -> Optional[BadTensor]:
    """The non-finite tensor of this rank that was computed first.

    Weights are searched in the order of the forward pass. If all are finite, gradients are searched in the order of the
    backward pass, where a non-finite gradient spreads to all later ones.

    Args:
        bad_gradients: (chunk, name) of the non-finite gradients; if None, the gradients are checked here.
    """
    parameters = list(parameters_in_forward_order(chunks))
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


def parameters_in_forward_order(chunks: list[Any]) -> Iterator[tuple[int, str, Any]]:
    """Chunk, name and tensor of every parameter.

    megatron-core creates modules in the order of the forward pass, except for attention's output projection, which it
    creates before the modules that precede it.
    """
    for index, chunk in enumerate(chunks):
        named = [(name.removeprefix("module."), parameter) for name, parameter in chunk.module.named_parameters()]
        order: dict[str, int] = {}  # of attention modules and of all other parameters
        for position, (name, _) in enumerate(named):
            order.setdefault(forward_order_unit(name), position)
        named.sort(key=lambda item: (order[forward_order_unit(item[0])], PROJECTION in item[0]))
        yield from ((index, name, parameter) for name, parameter in named)


def forward_order_unit(name: str) -> str:
    """`decoder.layers.0.self_attention.` for a parameter in attention, else the name itself."""
    before, attention, _ = name.partition(ATTENTION)
    return before + attention if attention else name


class NonFiniteReport(NamedTuple):
    """Report of a rank that has non-finite values.

    Attributes:
        replica: data-parallel rank. Non-finite values spread between the ranks of one replica.
        position: (chunk, pipeline stage) of the tensor, ascending in the order of the forward pass.
        tensor: None if all tensors are finite.
        fallback_text: described in place of a tensor.
        samples: description of the samples of this rank.
    """

    replica: int
    position: tuple[int, int]
    is_loss_bad: bool
    tensor: Optional[BadTensor]
    fallback_text: str
    samples: str


def describe_bad_ranks(
    local_loss: Optional[Tensor],
    is_norm_bad: bool,
    chunks: list[Any],
    samples: str,
    bad_gradients: Optional[Set[tuple[int, str]]] = None,
) -> list[str]:
    """One line for each rank with non-finite values. Collective; all ranks return the same.

    Args:
        is_norm_bad: whether a gradient norm of this rank is not finite.
        samples: description of the samples of this rank.
        bad_gradients: (chunk, name) of this rank's non-finite local gradients; None if the norm is of local gradients.
    """
    is_loss_bad = local_loss is not None and not bool(torch.isfinite(local_loss).all())
    report = None
    if is_loss_bad or is_norm_bad or bad_gradients:
        tensor = find_bad_tensor(chunks, bad_gradients)
        report = NonFiniteReport(
            replica=parallel_state.get_data_parallel_rank(),
            position=(0 if tensor is None else tensor.chunk, parallel_state.get_pipeline_model_parallel_rank()),
            is_loss_bad=is_loss_bad,
            tensor=tensor,
            fallback_text=NORM_OVERFLOW if is_norm_bad else LOSS_ONLY,
            samples=samples,
        )
    gathered: list[Optional[NonFiniteReport]] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, report)
    reports = {rank: each for rank, each in enumerate(gathered) if each is not None}
    if bad_gradients is not None:  # if only the norm of a rank is bad, the cause may be another rank's gradients
        reports = {rank: each for rank, each in reports.items() if each.tensor or each.is_loss_bad} or reports
    return [f"rank {rank}: {describe_report(each, reports, len(chunks))}" for rank, each in reports.items()]


def describe_report(report: NonFiniteReport, reports: Mapping[int, NonFiniteReport], num_chunks: int) -> str:
    """Text of a rank's report. A gradient is called the first one only if no other report explains it.

    Args:
        reports: of all ranks.
        num_chunks: model chunks per rank.
    """
    tensor = report.tensor
    chunk = f"chunk {tensor.chunk} " if tensor is not None and num_chunks > 1 else ""
    peers = {rank: each for rank, each in reports.items() if each.replica == report.replica}
    earlier = [rank for rank, each in peers.items() if has_bad_gradient(each) and each.position > report.position]
    if tensor is None:
        found = f"first bad tensor: {report.fallback_text}"
    elif tensor.kind == WEIGHT:
        found = f"first bad tensor: weight of {chunk}{tensor.name}"
    elif any(each.is_loss_bad for each in peers.values()):
        found = "its weights are finite, and bad gradients follow from the loss"
    elif earlier:
        found = f"its bad gradients may follow from those of rank {', '.join(map(str, earlier))}"
    else:
        found = f"first bad tensor: gradient of {chunk}{tensor.name}, in the order of the backward pass"
    return f"{'loss is not finite; ' if report.is_loss_bad else ''}{found}; {report.samples}"


def has_bad_gradient(report: NonFiniteReport) -> bool:
    """Whether a rank has a non-finite gradient but no non-finite weight."""
    return report.tensor is not None and report.tensor.kind == GRADIENT


class GradientShard(NamedTuple):
    """The part of a parameter's gradient that one data-parallel rank reduces.

    Attributes:
        chunk: index of the model chunk.
        name: of the parameter in its chunk.
        owner: data-parallel rank that reduces it.
    """

    chunk: int
    name: str
    owner: int


def find_bad_gradients_in_buckets(chunks: Sequence[Any]) -> set[tuple[int, str]]:
    """(chunk, name) of the parameters for which this rank's local gradients are not finite.

    Collective over the data-parallel groups, after a reduce-scatter. If another rank has non-finite local values in
    this rank's own shard, those of this rank are unknown. They then count only if this rank has other non-finite
    values.
    """
    dense = [(index, chunk, chunk.bucket_groups) for index, chunk in enumerate(chunks)]
    found = find_bad_shards(dense, parallel_state.get_data_parallel_group(with_context_parallel=True))
    experts = [(index, chunk, expert_bucket_groups(chunk)) for index, chunk in enumerate(chunks)]
    if any(groups for _, _, groups in experts):
        found |= find_bad_shards(experts, parallel_state.get_expert_data_parallel_group())
    return found


ChunkGroups = tuple[int, Any, Sequence[Any]]
"""Index of a chunk, the chunk, and some of its groups of gradient buckets."""


def find_bad_shards(chunk_groups: Sequence[ChunkGroups], group: dist.ProcessGroup) -> set[tuple[int, str]]:
    """`find_bad_gradients_in_buckets` of buckets that one process group reduces. Collective over it."""
    shards = gradient_shards(chunk_groups, group.size())
    local = {shard for shard, gradient in shards if not bool(is_finite(gradient))}
    gathered: list[set[GradientShard]] = [set()] * group.size()
    dist.all_gather_object(gathered, local, group=group)
    others = set().union(*(shards for rank, shards in enumerate(gathered) if rank != group.rank()))
    is_bad = any(shard.owner != group.rank() or shard not in others for shard in local)
    return {(shard.chunk, shard.name) for shard in local} if is_bad else set()


def gradient_shards(chunk_groups: Sequence[ChunkGroups], num_ranks: int) -> Iterator[tuple[GradientShard, Tensor]]:
    """The gradients of this rank, split at the shard boundaries of their buckets."""
    for index, chunk, groups in chunk_groups:
        names = {parameter: name.removeprefix("module.") for name, parameter in chunk.module.named_parameters()}
        for bucket in (bucket for group in groups for bucket in group.buckets):
            shard_size = bucket.grad_data.numel() // num_ranks
            for parameter in bucket.params_list:
                gradient = parameter.main_grad.view(-1)
                start = gradient.storage_offset() - bucket.grad_data.storage_offset()
                for owner in range(start // shard_size, (start + len(gradient) - 1) // shard_size + 1):
                    low, high = (max(0, edge * shard_size - start) for edge in (owner, owner + 1))
                    yield GradientShard(index, names[parameter], owner), gradient[low:high]
