"""Checks for non-finite losses and gradients, and locates the rank and tensor that caused them.

Detection: a norm is finite only if all elements are. Only the fused optimizer's norm of the reduced gradients is
checked where that is enough to find the rank afterwards (`build_gradient_check`). Otherwise `NonFiniteGradientMonitor`
computes the norm of each bucket before it is reduced over the data-parallel ranks, because a NaN spreads to all ranks
in the reduction. This reads the gradients once per step and does not synchronize; the result is one flag on the device.
Sharded weights have their own check. megatron-core's check does not name a rank, and with BF16 weights it has none.

Location: the search for the tensor runs only after a detection. If the gradients are already reduced, the local
gradients of a rank can still be checked. A reduce-scatter overwrites only the shard that a rank owns and leaves its
local values of the other shards. Non-finite values in a rank's own shard are attributed to it if no other rank has any.
This holds only where every rank has the complete model: tensor-parallel ranks and pipeline stages sum gradients too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor

from megafp8.checkpoint.progress import TrainingState
from megafp8.config.schema import ParallelConfig, TrainingConfig
from megafp8.mcore.process_groups import bucket_groups, expert_bucket_groups
from megafp8.metrics.step_totals import BAD_RANKS, LOSS, STOPPING_RANKS
from megafp8.nonfinite.detector import Detector
from megafp8.optimizer.fused_adam import FusedAdamOptimizer
from megafp8.optimizer.gradient_communication import add_grad_sync_hook

WEIGHT, GRADIENT = "weight", "gradient"
ATTENTION, PROJECTION = ".self_attention.", ".linear_proj."
NORM_OVERFLOW = "none individually; the sum of squares of all gradients overflows"
LOSS_ONLY = "none; weights and gradients are finite"
Gradient = tuple[int, str]
"""Model chunk and name of a parameter, for its gradient."""


def is_finite(tensor: Tensor) -> Tensor:
    """Whether a tensor's norm is finite: all elements are, and the sum of squares does not overflow FP32.

    Of a sharded tensor it is the norm of this rank's rows.
    """
    tensor = to_local_if_dtensor(tensor)
    return torch.isfinite(torch.linalg.vector_norm(tensor, dtype=torch.float32))  # an FP16 norm overflows at 65504


class GradientNormCheck(Detector[Optional[set[Gradient]]]):
    """The check where the norm of reduced gradients is enough, or where there is none (`--no-check-for-nan...`).

    Args:
        searches_buckets: whether the rank with non-finite values can be found in the gradient buffers afterwards.
    """

    origin_text = ""
    """What a report says where the rank of a non-finite value is not known."""

    def __init__(self, chunks: list[Any], device: torch.device, searches_buckets: bool = False):
        self.chunks, self.device, self.searches_buckets = chunks, device, searches_buckets

    def reset(self) -> None:
        """Before a step."""

    def counts(self, squared_norm: Optional[Tensor] = None) -> Tensor:
        """0 on the device if this rank's checked gradients are finite.

        Args:
            squared_norm: of the gradient shards that this rank updates with; None where the optimizer takes the norm.
        """
        if squared_norm is None:
            return torch.zeros((), device=self.device)
        return (~torch.isfinite(squared_norm)).float()  # of all gradients that this rank has

    def find(self) -> Optional[set[Gradient]]:
        """This rank's gradients that were not finite before their reduction; None if that is not known, or if they are
        checked before it. Collective."""
        return find_bad_gradients_in_buckets(self.chunks) if self.searches_buckets else None


class NonFiniteGradientMonitor(GradientNormCheck):
    """Records on the device whether this rank's local gradients are finite when their reduction starts."""

    def __init__(self, chunks: list[Any], device: torch.device):
        super().__init__(chunks, device)
        self.bad = torch.zeros((), device=device)
        for chunk in chunks:
            for group in bucket_groups(chunk):
                # Called when the reduction of a bucket starts, while all of its gradients are still this rank's own.
                add_grad_sync_hook(group, partial(self._check, group))

    def _check(self, group: Any) -> None:
        for bucket in group.buckets:
            # A sum on the device: the host does not wait, and a later finite bucket does not clear it.
            self.bad += ~is_finite(bucket.grad_data)

    def reset(self) -> None:
        """Clear the flag before the next step."""
        self.bad.zero_()

    def counts(self, squared_norm: Optional[Tensor] = None) -> Tensor:
        return self.bad


class ReducedGradientMonitor(GradientNormCheck):
    """Finds non-finite values in this rank's rows of the reduced gradients.

    A NaN of one rank is then in the rows of others. With codes, whose casts read all gradients, one more read before
    them tells which rank it comes from. Without, the report names the tensor, and the ranks that have its rows.

    Args:
        is_local: whether the gradients of each module are also checked before they are reduced.
    """

    origin_text = "--use-torch-fsdp2: a rank has rows of sums over ranks, each of which may have brought the value up"

    def __init__(self, chunks: list[Any], device: torch.device, is_local: bool):
        super().__init__(chunks, device)
        self.gradients = [parameter.main_grad for chunk in chunks for parameter in chunk.parameters()]
        self._sums = [sums for chunk in chunks for sums in chunk.sums] if is_local else []
        self._bad_modules = torch.zeros(len(self._sums), device=device)
        if is_local:
            from megafp8.fsdp.gradients import add_reduction_hook  # of runs with sharded weights
        for sums, bad in zip(self._sums, self._bad_modules, strict=True):
            add_reduction_hook(sums.module, partial(self._check, bad))

    def _check(self, bad: Tensor, gradients: Tensor) -> None:
        bad += ~is_finite(gradients)

    def counts(self, squared_norm: Optional[Tensor] = None) -> Tensor:
        """The number of gradients that are not finite, if there is no norm that tells."""
        if squared_norm is not None:
            return super().counts(squared_norm)
        bad = torch.zeros((), device=self.device)
        for gradient in self.gradients:
            bad += ~is_finite(gradient)
        return bad

    def find(self) -> Optional[set[Gradient]]:
        """This rank's non-finite gradients before they were reduced; None if no rank knows of any.

        They are those parameters of its bad modules whose sums are not finite. Collective.
        """
        names = {parameter: (index, name) for index, name, parameter in parameters_in_forward_order(self.chunks)}
        reduced = {name for parameter, name in names.items() if not bool(is_finite(parameter.main_grad))}
        local = {
            names[parameter]
            for sums, is_bad in zip(self._sums, self._bad_modules.tolist(), strict=True)
            for parameter in sums.parameters
            if is_bad
        }
        gathered: list[tuple[set[Gradient], bool]] = [(set(), False)] * dist.get_world_size()
        dist.all_gather_object(gathered, (reduced, bool(local)))
        all_reduced = set().union(*(names for names, _ in gathered))
        return local & all_reduced if any(is_known for _, is_known in gathered) else None

    def reset(self) -> None:
        """Clear the flags of modules before the next step."""
        self._bad_modules.zero_()


def build_gradient_check(
    state: TrainingState, training: TrainingConfig, parallel: ParallelConfig, in_fp8: bool, device: torch.device
) -> GradientNormCheck:
    """The check of each rank's local gradients before they are reduced, or of the gradient norm where that is enough.

    The fused optimizer's norm is enough where every rank holds the complete model, or where there is no data
    parallelism: `find` can then tell afterwards which rank the non-finite values came from.

    Args:
        in_fp8: gradients are reduced in FP8.
    """
    data_size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    is_complete = data_size in (1, dist.get_world_size()) and not parallel.shards_weights
    norm_tells = is_complete and isinstance(state.optimizer, FusedAdamOptimizer)
    if norm_tells or not training.check_for_nan_in_loss_and_grad:
        return GradientNormCheck(state.chunks, device, searches_buckets=data_size > 1)
    if parallel.shards_weights:
        return ReducedGradientMonitor(state.chunks, device, is_local=in_fp8)
    return NonFiniteGradientMonitor(state.chunks, device)


def loss_and_flags(
    local_loss: Optional[Tensor], bad_gradients: Tensor, device: torch.device, is_stopping: bool = False
) -> dict[str, Tensor]:
    """LOSS, BAD_RANKS and STOPPING_RANKS of this rank.

    Args:
        local_loss: (sum, tokens); None on a rank whose loss is not counted.
        bad_gradients: 0 if the checked gradients of this rank are finite.
    """
    loss = torch.zeros(2, dtype=torch.float64, device=device) if local_loss is None else local_loss.double()
    return {
        LOSS: loss,
        BAD_RANKS: (bad_gradients > 0) | ~torch.isfinite(loss).all(),
        STOPPING_RANKS: torch.full((), float(is_stopping), device=device),
    }


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


def find_bad_tensor(chunks: list[Any], bad_gradients: Optional[Set[Gradient]] = None) -> Optional[BadTensor]:
    """The non-finite tensor of this rank that was computed first.

    Weights are searched in the order of the forward pass. If all are finite, gradients are searched in the order of the
    backward pass, where a non-finite gradient spreads to all later ones.

    Args:
        bad_gradients: the non-finite ones; if None, the gradients are checked here.
    """
    parameters = list(parameters_in_forward_order(chunks))
    # One wait for the device for each tensor. That is slow, but runs only after a detection.
    for index, name, parameter in parameters:
        if not bool(is_finite(parameter.detach())):
            return BadTensor(WEIGHT, name, index)
    for index, name, parameter in reversed(parameters):
        if not bool(is_finite(parameter.main_grad)) if bad_gradients is None else (index, name) in bad_gradients:
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
        # An attention module counts from its first parameter. Within it the output projection goes last; the sort is
        # stable.
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
    check: GradientNormCheck, bad_gradients: Tensor, local_loss: Optional[Tensor], samples: str, is_loss_finite: bool
) -> list[str]:
    """One line for each rank with non-finite values. Collective; all ranks return the same.

    Args:
        bad_gradients: the check's count of this rank.
        local_loss: (sum, tokens); None on a rank whose loss is not counted.
        samples: description of the samples of this rank.
        is_loss_finite: whether the loss of all ranks is.
    """
    bad = check.find()
    chunks, is_norm_bad = check.chunks, bool(bad_gradients > 0)
    is_loss_bad = local_loss is not None and not bool(torch.isfinite(local_loss).all())
    report = None
    if is_loss_bad or is_norm_bad or bad:
        tensor = find_bad_tensor(chunks, bad)
        report = NonFiniteReport(
            replica=parallel_state.get_data_parallel_rank(),
            position=(0 if tensor is None else tensor.chunk, parallel_state.get_pipeline_model_parallel_rank()),
            is_loss_bad=is_loss_bad,
            tensor=tensor,
            fallback_text=NORM_OVERFLOW if is_norm_bad else LOSS_ONLY,
            samples=samples,
        )
    gathered: list[Optional[NonFiniteReport]] = [None] * dist.get_world_size()
    # All ranks call it, also those that have nothing to report: the detection was agreed on before.
    dist.all_gather_object(gathered, report)
    reports = {rank: each for rank, each in enumerate(gathered) if each is not None}
    if bad is not None:  # if only the norm of a rank is bad, the cause may be another rank's gradients
        reports = {rank: each for rank, each in reports.items() if each.tensor or each.is_loss_bad} or reports
    lines = [f"rank {rank}: {describe_report(each, reports, len(chunks))}" for rank, each in reports.items()]
    return [*lines, check.origin_text] if bad is None and is_loss_finite and check.origin_text else lines


def describe_report(report: NonFiniteReport, reports: Mapping[int, NonFiniteReport], num_chunks: int) -> str:
    """Text of a rank's report. A gradient is called the first one only if no other report explains it.

    Args:
        reports: of all ranks.
        num_chunks: model chunks per rank.
    """
    tensor = report.tensor
    chunk = f"chunk {tensor.chunk} " if tensor is not None and num_chunks > 1 else ""
    # Ranks of one replica compute one loss: they pass activations and gradients to each other.
    peers = {rank: each for rank, each in reports.items() if each.replica == report.replica}
    # In the backward pass later stages come first, so that their gradients may be the cause.
    in_backward = ((rank, each) for rank, each in peers.items() if each.tensor and each.tensor.kind == GRADIENT)
    earlier = [rank for rank, each in in_backward if each.position > report.position]
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


def find_bad_gradients_in_buckets(chunks: Sequence[Any]) -> set[Gradient]:
    """This rank's local gradients that are not finite.

    Collective over the data-parallel groups, after a reduce-scatter.
    """
    dense = [(index, chunk, chunk.bucket_groups) for index, chunk in enumerate(chunks)]
    # Experts are reduced over other ranks than the other weights, and so have other shards.
    found = find_bad_shards(dense, parallel_state.get_data_parallel_group(with_context_parallel=True))
    experts = [(index, chunk, expert_bucket_groups(chunk)) for index, chunk in enumerate(chunks)]
    if any(groups for _, _, groups in experts):
        found |= find_bad_shards(experts, parallel_state.get_expert_data_parallel_group())
    return found


ChunkGroups = tuple[int, Any, Sequence[Any]]
"""Index of a chunk, the chunk, and some of its groups of gradient buckets."""
Shard = tuple[Gradient, int]
"""The part of a gradient that one data-parallel rank reduces, with that rank."""


def find_bad_shards(chunk_groups: Sequence[ChunkGroups], group: dist.ProcessGroup) -> set[Gradient]:
    """`find_bad_gradients_in_buckets` of buckets that one process group reduces. Collective over it."""
    shards = gradient_shards(chunk_groups, group.size())
    # After the reduce-scatter, the own shard has the sum over all ranks, the other shards still the local values.
    local = {shard for shard, gradient in shards if not bool(is_finite(gradient))}
    gathered: list[set[Shard]] = [set()] * group.size()
    dist.all_gather_object(gathered, local, group=group)
    others = set().union(*(shards for rank, shards in enumerate(gathered) if rank != group.rank()))
    # If another rank had non-finite values in this rank's shard, the sum here is not finite whatever this rank's own
    # values were. They then count only if this rank has other non-finite values.
    is_bad = any(owner != group.rank() or (gradient, owner) not in others for gradient, owner in local)
    return {gradient for gradient, _ in local} if is_bad else set()


def gradient_shards(chunk_groups: Sequence[ChunkGroups], num_ranks: int) -> Iterator[tuple[Shard, Tensor]]:
    """The gradients of this rank, split at the shard boundaries of their buckets."""
    for index, chunk, groups in chunk_groups:
        names = {parameter: name.removeprefix("module.") for name, parameter in chunk.module.named_parameters()}
        for bucket in (bucket for group in groups for bucket in group.buckets):
            # Buckets are padded to a multiple of the ranks.
            shard_size = bucket.grad_data.numel() // num_ranks
            for parameter in bucket.params_list:
                gradient = parameter.main_grad.view(-1)
                start = gradient.storage_offset() - bucket.grad_data.storage_offset()
                # A parameter may lie in several shards; each has its own owner.
                for owner in range(start // shard_size, (start + len(gradient) - 1) // shard_size + 1):
                    # A slice past the end of the gradient is cut off by torch.
                    low, high = (max(0, edge * shard_size - start) for edge in (owner, owner + 1))
                    yield ((index, names[parameter]), owner), gradient[low:high]
