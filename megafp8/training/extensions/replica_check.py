"""Replica check: weights that several ranks hold are compared bit by bit.

Data- and context-parallel ranks hold the same weights, tensor-parallel ranks the same norms, biases and positions.
Nothing else in training compares them: after a hardware error a rank continues with other weights, and gradients are
averaged over different models. Here each rank hashes its weights on its device, one collective gathers the hashes, and
all ranks see which rank differs. Only then is the first tensor that differs searched for.

The hash does not depend on the order of summation. The bytes of a tensor, padded with zeros, are 32-bit words w. Modulo
2^64,

    hash = sum over blocks b of  n_b * sum over i of  m_i * w_(b * BLOCK + i)

with odd, random 64-bit multipliers m and n that are the same on all ranks. Integers wrap and do not round, so that the
sum is exact. A change of one word always changes the hash, since an odd multiplier is invertible; several changes
cancel with a probability of at most 2^-32. Words are narrower than the sum because the highest bit of a 64-bit word
times any odd number is unchanged, and flipped signs of two words would cancel.

The hash reads a tensor once. Products are computed block by block, in a buffer that fits a GPU's cache.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor

from megafp8.checkpoint.save import finish_param_gather
from megafp8.device.collective_errors import call_on_all_ranks
from megafp8.errors import NumericsError
from megafp8.mcore.process_groups import is_reduced_over_expert_ranks
from megafp8.metrics.records import EventRecord
from megafp8.metrics.timers import REPLICA_CHECK
from megafp8.quantization.delayed_scaling import DelayedState
from megafp8.quantization.fp8_parameter import QuantizedParameter
from megafp8.training.extension import Extension, LoopState, is_multiple
from megafp8.training.run import Run
from megafp8.training.step import StepResult

DATA, TENSOR, EXPERT = "data-parallel", "tensor-parallel", "expert data-parallel"
TensorHashes = list[tuple[str, tuple[str, ...], int]]  # name, kinds of the groups that hold it, hash


@dataclass(frozen=True)
class Replica:
    """A tensor that other ranks hold as well.

    Attributes:
        kinds: of the groups whose ranks hold it.
    """

    name: str
    tensor: Tensor
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class RankHashes:
    """The combined hashes of one rank's replicas.

    Attributes:
        pipeline, tensor, data: position of the rank; data includes context-parallel ranks.
        expert: position among the ranks that divide the experts.
        complete: hash of all replicas but those of experts with ranks of their own.
        shared: hash of those that tensor-parallel ranks hold as well.
        experts: hash of those of experts.
    """

    rank: int
    pipeline: int
    tensor: int
    data: int
    expert: int
    complete: int
    shared: int
    experts: int


@dataclass(frozen=True)
class ReplicaMismatch:
    """A group of ranks whose replicas differ.

    Attributes:
        kind: DATA or TENSOR.
        ranks: of the group.
        outliers: ranks that differ from the majority; all of them without a majority.
    """

    kind: str
    ranks: tuple[int, ...]
    outliers: tuple[int, ...]


class ReplicaCheck(Extension):
    """Stops a run, before anything is saved, if replicas differ."""

    def after_step(self, state: LoopState, result: StepResult) -> None:
        """Compare at `--check-weight-hash-across-dp-replicas-interval`.

        Raises:
            NumericsError: replicas differ.
        """
        interval = state.run.config.training.check_weight_hash_across_dp_replicas_interval
        if not is_multiple(state.step, interval):
            return
        try:
            with state.run.timer.span(REPLICA_CHECK):
                check_replicas(state.run, state.step)
        except NumericsError as error:
            state.sinks.write(EventRecord(step=state.step, name="replicas differ", detail=str(error)))
            raise


def check_replicas(run: Run, step: int) -> None:
    """Compare the replicas of all ranks; all ranks call it.

    Raises:
        NumericsError: on all ranks: replicas differ.
    """
    finish_param_gather(run.config.parallel, run.training_state)
    copies, hasher = replicas_of(run), BitHash(run.platform.device)
    hashes = hasher.of_all([copy.tensor for copy in copies])
    found = find_mismatches(gather_hashes(run, copies, hashes, hasher))
    if found:
        local = [(copy.name, copy.kinds, value) for copy, value in zip(copies, hashes.tolist(), strict=True)]
        by_rank = call_on_all_ranks(lambda: local)
        lines = "\n".join(f"  {describe_mismatch(each, by_rank)}" for each in found)
        raise NumericsError(
            f"step {step}: replicas of the weights differ between ranks "
            f"(--check-weight-hash-across-dp-replicas-interval):\n{lines}\nfix: resume from the last checkpoint. If "
            "the same rank is reported again, its device is probably faulty; --deterministic-mode rules out kernels "
            "that sum in a varying order"
        )


def replicas_of(run: Run) -> list[Replica]:
    """Everything on this rank that other ranks should hold bitwise the same.

    That is weights (of FP8 weights codes and scales), master weights that are not sharded, and the state of delayed
    scaling that is reduced over the data-parallel ranks.
    """
    copies = []
    has_full_masters = not run.config.parallel.use_distributed_optimizer
    for number, chunk in enumerate(run.training_state.chunks):
        prefix = f"chunk {number} " if len(run.training_state.chunks) > 1 else ""
        for name, parameter in chunk.module.named_parameters():
            name, kinds = prefix + name.removeprefix("module."), kinds_of(parameter)
            copies += [Replica(name + part, tensor, kinds) for part, tensor in stored_tensors(parameter)]
            master = getattr(parameter, "main_param", None)
            if has_full_masters and master is not None:
                copies.append(Replica(f"master weight of {name}", master, kinds))
        for name, module in chunk.module.named_modules():
            if isinstance(module, DelayedState) and module.options.is_reduced_over_data:
                name = prefix + name.removeprefix("module.")
                copies += [Replica(f"{name}.{part}", tensor, (DATA,)) for part, tensor in module.named_buffers()]
    return copies


def kinds_of(parameter: Any) -> tuple[str, ...]:
    """The kinds of groups whose ranks hold a weight."""
    if is_reduced_over_expert_ranks(parameter):
        return (EXPERT,)
    return (DATA,) if getattr(parameter, "tensor_model_parallel", False) else (DATA, TENSOR)


def stored_tensors(parameter: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a weight to compare, with suffixes for its name.

    Transformer Engine's FP8 weights are dequantized to FP32, since their scales have uninitialized padding.
    """
    if isinstance(parameter, QuantizedParameter):
        return [(" (codes)", parameter.codes.raw), (" (scales)", parameter.codes.dequant_scale)]
    if is_float8tensor(parameter):
        return [("", parameter.dequantize(dtype=torch.float32))]
    return [("", parameter)]


def gather_hashes(run: Run, copies: Sequence[Replica], hashes: Tensor, hasher: BitHash) -> list[RankHashes]:
    """The combined hashes of all ranks, by one all-gather of a few bytes."""
    masks = (
        torch.tensor([kind in copy.kinds for copy in copies], dtype=torch.bool, device=hashes.device)
        for kind in (DATA, TENSOR, EXPERT)
    )
    data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    num_splits = parallel_state.get_expert_tensor_parallel_world_size()
    expert = parallel_state.get_expert_model_parallel_rank() * num_splits
    expert += parallel_state.get_expert_tensor_parallel_rank()
    position = torch.tensor(
        [run.rank_position.pipeline_rank, run.rank_position.tensor_rank, data_rank, expert], device=hashes.device
    )
    local = torch.stack([*position, *(hasher.combined(hashes * mask) for mask in masks)])
    rows = local.new_empty(dist.get_world_size() * len(local))
    dist.all_gather_into_tensor(rows, local)
    return [RankHashes(rank, *values) for rank, values in enumerate(rows.view(-1, len(local)).tolist())]


def find_mismatches(rows: Sequence[RankHashes]) -> list[ReplicaMismatch]:
    """The groups of ranks that should have the same hash and do not."""
    found = []
    for kind, group_key, value in (
        (DATA, lambda row: (row.pipeline, row.tensor), lambda row: row.complete),
        (TENSOR, lambda row: (row.pipeline, row.data), lambda row: row.shared),
        (EXPERT, lambda row: (row.pipeline, row.expert), lambda row: row.experts),
    ):
        groups: dict[tuple[int, int], list[RankHashes]] = defaultdict(list)
        for row in rows:
            groups[group_key(row)].append(row)
        for group in groups.values():
            (most, count), *_ = Counter(map(value, group)).most_common()
            if count < len(group):
                has_majority = 2 * count > len(group)
                outliers = tuple(row.rank for row in group if not has_majority or value(row) != most)
                found.append(ReplicaMismatch(kind, tuple(row.rank for row in group), outliers))
    return found


def describe_mismatch(found: ReplicaMismatch, by_rank: Sequence[TensorHashes]) -> str:
    """One line: the ranks that differ, and the first tensor in which they do."""
    of_group = zip(*(by_rank[rank] for rank in found.ranks), strict=True)
    first = next(
        same[0][0] for same in of_group if found.kind in same[0][1] and len({value for _, _, value in same}) > 1
    )
    others = [rank for rank in found.ranks if rank not in found.outliers]
    outliers = f"rank{'s' if len(found.outliers) > 1 else ''} {', '.join(map(str, found.outliers))}"
    verb = "differ" if len(found.outliers) > 1 else "differs"
    text = f"{outliers} {verb} from {', '.join(map(str, others))}" if others else f"{outliers}, without a majority"
    return f"{found.kind}: {text}; first tensor: {first}"


BLOCK = 1 << 20
MAX_BLOCKS = MAX_TENSORS = 1 << 16
SEED = 20_261_120
WORD_BYTES = 4


class BitHash:
    """Hashes tensors of one device."""

    def __init__(self, device: torch.device):
        self.device = device

    @cached_property
    def multipliers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Multipliers of the words of a block, of the blocks of a tensor, and of tensors: int64, odd.

        They are drawn on the CPU, where a seed gives the same numbers on every machine.
        """
        sizes = [BLOCK, MAX_BLOCKS, MAX_TENSORS]
        drawn = torch.empty(sum(sizes), dtype=torch.int64)
        drawn.random_(-(1 << 63), None, generator=torch.Generator().manual_seed(SEED))
        return (drawn | 1).to(self.device).split(sizes)

    @torch.no_grad()
    def of(self, tensor: Tensor) -> Tensor:
        """The hash of the bytes of a tensor, whatever its dtype and shape: an int64 scalar on the device."""
        of_words, of_blocks, _ = self.multipliers
        return weighted_sum(
            torch.stack([weighted_sum(block, of_words) for block in words(tensor).split(BLOCK)]), of_blocks
        )

    @torch.no_grad()
    def of_all(self, tensors: Sequence[Tensor]) -> Tensor:
        """The hashes of several tensors, int64 [tensors]."""
        if not tensors:
            return torch.zeros(0, dtype=torch.int64, device=self.device)
        return torch.stack([self.of(tensor) for tensor in tensors])

    @torch.no_grad()
    def combined(self, hashes: Tensor) -> Tensor:
        """One hash of the hashes of several tensors, int64 scalar."""
        return weighted_sum(hashes, self.multipliers[2])


def weighted_sum(numbers: Tensor, multipliers: Tensor) -> Tensor:
    """The sum of numbers times their multipliers, int64 scalar."""
    assert len(numbers) <= len(multipliers), (len(numbers), len(multipliers))
    return (numbers * multipliers[: len(numbers)]).sum()


def words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as int32 [ceil(bytes / 4)]: a view if its memory is aligned, else a copy."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.data_ptr() % WORD_BYTES or len(flat) % WORD_BYTES:
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % WORD_BYTES))
    return flat.view(torch.int32)
