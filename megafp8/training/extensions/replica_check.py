"""Weights that several ranks hold copies of, compared bit by bit.

Data-parallel ranks (context-parallel ones too) hold the same weights, and tensor-parallel ranks the same norms, biases
and positions. Nothing in training compares them: a rank whose memory or arithmetic went wrong once continues with other
weights, and every gradient is an average over different models. Here each rank hashes what it holds on its device, the
hashes of all ranks travel in one gather, and every rank sees which one differs. Only then is the tensor searched for.

A hash of a tensor's bits, taken on its device, that the order of a sum does not change.

A tensor's bytes are words of 32 bits w_0, w_1, ..., the last one filled with zeros. Modulo 2^64,

    hash = sum over blocks b of  n_b * sum over i of  m_i * w_(b * BLOCK + i)

with odd, random multipliers m and n of 64 bits that every rank has alike. Integers wrap and never round, so the value
is exact whatever the order of the sums. A change of any one word changes it for certain, since an odd multiplier takes
no number but 0 to 0; several changes cancel by chance only, once in 2^32 or less. (Words as wide as the sum would not
do: multiplied by any odd number, the highest bit is the highest bit, and the signs of two numbers would cancel.)

It costs one read of the tensor. Products are made block by block in one buffer that stays in a GPU's cache.
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

from megafp8.checkpoint.save import sync_parameters
from megafp8.device.collective_errors import call_on_all_ranks
from megafp8.errors import NumericsError
from megafp8.metrics.records import EventRecord
from megafp8.quantization.delayed_scaling import DelayedState
from megafp8.quantization.fp8_parameter import QuantizedParameter
from megafp8.training.extension import Extension, LoopState, is_multiple
from megafp8.training.run import Run
from megafp8.training.step import StepResult

DATA, TENSOR = "data-parallel", "tensor-parallel"
Hashes = list[tuple[str, bool, int]]  # name of a copy, whether tensor-parallel ranks have it, hash


@dataclass(frozen=True)
class Replica:
    """A tensor that other ranks have too.

    Attributes:
        is_on_tensor_ranks: the tensor-parallel ranks have it as well as the data-parallel ones.
    """

    name: str
    tensor: Tensor
    is_on_tensor_ranks: bool


@dataclass(frozen=True)
class RankHashes:
    """The combined hashes of one rank's replicas.

    Attributes:
        pipeline, tensor, data: where it stands; data counts context-parallel ranks too.
        complete: hash of all of them.
        shared: of those that tensor-parallel ranks have too.
    """

    rank: int
    pipeline: int
    tensor: int
    data: int
    complete: int
    shared: int


@dataclass(frozen=True)
class Disagreement:
    """Copies that differ within a group of ranks.

    Attributes:
        kind: of the group, DATA or TENSOR.
        ranks: of the group.
        odd: those that differ from the most; all where no value has a majority.
    """

    kind: str
    ranks: tuple[int, ...]
    odd: tuple[int, ...]


class ReplicaCheck(Extension):
    """Stops a run, before anything is saved, where ranks that hold the same weights differ."""

    def after_step(self, state: LoopState, result: StepResult) -> None:
        """Compare at `--check-weight-hash-across-dp-replicas-interval`.

        Raises:
            NumericsError: they differ.
        """
        interval = state.run.config.training.check_weight_hash_across_dp_replicas_interval
        if not is_multiple(state.step, interval):
            return
        try:
            check_replicas(state.run, state.step)
        except NumericsError as error:
            state.sinks.write(EventRecord(step=state.step, name="replicas differ", detail=str(error)))
            raise


def check_replicas(run: Run, step: int) -> None:
    """Compare the copies of all ranks; all ranks call it.

    Raises:
        NumericsError: on all ranks: some differ.
    """
    sync_parameters(run.config, run.trainee)
    copies, hasher = replicas_of(run), BitHash(run.platform.device)
    hashes = hasher.of_all([copy.tensor for copy in copies])
    found = disagreements(gather_hashes(run, copies, hashes, hasher))
    if found:
        by_rank = hashes_by_rank(copies, hashes)
        lines = "\n".join(f"  {describe(each, by_rank)}" for each in found)
        raise NumericsError(
            f"step {step}: ranks that hold the same weights differ "
            f"(--check-weight-hash-across-dp-replicas-interval):\n{lines}\n"
            "mend: resume from the last checkpoint; a rank that is named again has a faulty device, and "
            "--deterministic-mode excludes kernels that add in changing order"
        )


def replicas_of(run: Run) -> list[Replica]:
    """Everything of this rank that other ranks should have bit by bit: weights, with FP8 their codes and scales, master
    weights that are not sharded, and scales of delayed scaling that are reduced over the data-parallel ranks."""
    copies = []
    with_masters = not run.config.parallel.use_distributed_optimizer
    for number, chunk in enumerate(run.trainee.chunks):
        place = f"chunk {number} " if len(run.trainee.chunks) > 1 else ""
        for name, parameter in chunk.module.named_parameters():
            name, is_shared = place + name.removeprefix("module."), not is_split_over_tensor_ranks(parameter)
            copies += [Replica(name + part, tensor, is_shared) for part, tensor in stored(parameter)]
            master = getattr(parameter, "main_param", None)
            if with_masters and master is not None:
                copies.append(Replica(f"master weight of {name}", master, is_shared))
        for name, module in chunk.module.named_modules():
            if isinstance(module, DelayedState) and module.options.is_reduced_over_data:
                name = place + name.removeprefix("module.")
                copies += [Replica(f"{name}.{part}", tensor, False) for part, tensor in module.named_buffers()]
    return copies


def is_split_over_tensor_ranks(parameter: Tensor) -> bool:
    """Whether each tensor-parallel rank has a part of its own."""
    return getattr(parameter, "tensor_model_parallel", False)


def stored(parameter: Any) -> list[tuple[str, Tensor]]:
    """What a weight is in memory. Of Transformer Engine's FP8 weights, the numbers that they stand for in FP32: their
    scales are padded with whatever was there."""
    if isinstance(parameter, QuantizedParameter):
        return [(" (codes)", parameter.codes.raw), (" (scales)", parameter.codes.dequant_scale)]
    if is_float8tensor(parameter):
        return [("", parameter.dequantize(dtype=torch.float32))]
    return [("", parameter)]


def gather_hashes(run: Run, copies: Sequence[Replica], hashes: Tensor, hasher: BitHash) -> list[RankHashes]:
    """The combined hashes of all ranks, by one gather of a few bytes."""
    is_shared = torch.tensor([copy.is_on_tensor_ranks for copy in copies], dtype=torch.bool, device=hashes.device)
    place = (
        run.place.pipeline_rank, run.place.tensor_rank,
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )  # fmt: skip
    mine = torch.stack(
        [*torch.tensor(place, device=hashes.device), hasher.combined(hashes), hasher.combined(hashes * is_shared)]
    )
    rows = mine.new_empty(dist.get_world_size() * len(mine))
    dist.all_gather_into_tensor(rows, mine)
    return [RankHashes(rank, *values) for rank, values in enumerate(rows.view(-1, len(mine)).tolist())]


def disagreements(rows: Sequence[RankHashes]) -> list[Disagreement]:
    """The groups of ranks that should have the same hash and have not."""
    found = []
    for kind, place, value in (
        (DATA, lambda row: (row.pipeline, row.tensor), lambda row: row.complete),
        (TENSOR, lambda row: (row.pipeline, row.data), lambda row: row.shared),
    ):
        groups: dict[tuple[int, int], list[RankHashes]] = defaultdict(list)
        for row in rows:
            groups[place(row)].append(row)
        for group in groups.values():
            (most, count), *_ = Counter(map(value, group)).most_common()
            if count < len(group):
                has_majority = 2 * count > len(group)
                odd = tuple(row.rank for row in group if not has_majority or value(row) != most)
                found.append(Disagreement(kind, tuple(row.rank for row in group), odd))
    return found


def hashes_by_rank(copies: Sequence[Replica], hashes: Tensor) -> list[Hashes]:
    """The hash of each copy, by rank."""
    mine = [(copy.name, copy.is_on_tensor_ranks, value) for copy, value in zip(copies, hashes.tolist(), strict=True)]
    return call_on_all_ranks(lambda: mine)


def describe(found: Disagreement, by_rank: Sequence[Hashes]) -> str:
    """One line: which ranks, and the first tensor that differs among them."""
    of_group = zip(*(by_rank[rank] for rank in found.ranks), strict=True)
    first = next(
        same[0][0]
        for same in of_group
        if (found.kind == DATA or same[0][1]) and len({value for _, _, value in same}) > 1
    )
    others = [rank for rank in found.ranks if rank not in found.odd]
    odd = f"rank{'s' if len(found.odd) > 1 else ''} {', '.join(map(str, found.odd))}"
    text = f"{odd} unlike {', '.join(map(str, others))}" if others else f"{odd}, of which none has a majority"
    return f"{found.kind}: {text}; first tensor: {first}"


BLOCK = 1 << 20
MOST_BLOCKS = MOST_TENSORS = 1 << 16
SEED = 20_261_120
WORD_BYTES = 4


class BitHash:
    """Hashes tensors of one device."""

    def __init__(self, device: torch.device):
        self.device = device

    @cached_property
    def multipliers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the words of a block, of the blocks of a tensor, and of tensors: int64, odd.

        They are drawn on the CPU, where a seed gives the same numbers everywhere.
        """
        sizes = [BLOCK, MOST_BLOCKS, MOST_TENSORS]
        drawn = torch.empty(sum(sizes), dtype=torch.int64)
        drawn.random_(-(1 << 63), None, generator=torch.Generator().manual_seed(SEED))
        return (drawn | 1).to(self.device).split(sizes)

    @torch.no_grad()
    def of(self, tensor: Tensor) -> Tensor:
        """The hash of one tensor, int64 scalar on the device; its type and shape do not enter."""
        of_words, of_blocks, _ = self.multipliers
        return weighed(torch.stack([weighed(block, of_words) for block in words(tensor).split(BLOCK)]), of_blocks)

    @torch.no_grad()
    def of_all(self, tensors: Sequence[Tensor]) -> Tensor:
        """The hashes of several, int64 [tensors]."""
        if not tensors:
            return torch.zeros(0, dtype=torch.int64, device=self.device)
        return torch.stack([self.of(tensor) for tensor in tensors])

    @torch.no_grad()
    def combined(self, hashes: Tensor) -> Tensor:
        """One hash of the hashes of several tensors, int64 scalar."""
        return weighed(hashes, self.multipliers[2])


def weighed(numbers: Tensor, multipliers: Tensor) -> Tensor:
    """The sum of numbers times their multipliers, int64 scalar."""
    assert len(numbers) <= len(multipliers), (len(numbers), len(multipliers))
    return (numbers * multipliers[: len(numbers)]).sum()


def words(tensor: Tensor) -> Tensor:
    """A tensor's bits, int32 [ceil(bytes / 4)]: a view of it, or a copy where its memory does not divide."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.data_ptr() % WORD_BYTES or len(flat) % WORD_BYTES:
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % WORD_BYTES))
    return flat.view(torch.int32)
