"""Non-finite and saturated values in the operands of quantized linears.

They are counted in every step. Their sums over the ranks are reduced together with the loss, so that all ranks take the
same decision before the update. A step with non-finite operands needs more: one reduction of the table, and the names
of amax histories with an infinite amax. Under the algorithm "max" such an amax would keep a scale until it leaves the
history, so that it is removed in any case. Under "most_recent" the next amax makes a new scale, so that nothing has to
be removed. Operands that saturate are named at multiples of `--log-interval` only: under delayed scaling some do in
nearly every step, and their table and names take milliseconds of the host while a GPU waits for the update.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor

from megafp8.config import precision_map
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.schema import ModelConfig, PrecisionConfig
from megafp8.mcore.modules import with_attention
from megafp8.metrics.records import OperandCounts
from megafp8.metrics.step_totals import OPERAND_COUNTS, StepTotals
from megafp8.models.layer_runtime import emulated_linears_by_name
from megafp8.nonfinite.detector import OperandDetector
from megafp8.nonfinite.experts import ExpertAmaxes
from megafp8.quantization.counters import NON_FINITE, QUANTIZERS, SATURATED, LinearCounts
from megafp8.quantization.delayed_scaling import OPERANDS, DelayedState, keeps_amaxes
from megafp8.recipes.base import Operand

FORWARD_OPERANDS = (Operand.INPUT, Operand.WEIGHT)
MAX_NAMED = 6


@dataclass(frozen=True)
class NonfiniteOperands:
    """The non-finite and saturated operands of one step over all ranks, the same on all ranks. Copies of a tensor on
    several ranks all count.

    Attributes:
        num_non_finite, num_saturated: values, each once for each GEMM that reads it.
        counts: of the quantizers that have any, as in `StepRecord.operand_counts`; none in a step that does not name
            them.
        infinite_amaxes: operands with an infinite amax that was removed from their history, for example
            `layers.3.linear_fc2.input`.
    """

    num_non_finite: int = 0
    num_saturated: int = 0
    counts: tuple[tuple[str, OperandCounts], ...] = ()
    infinite_amaxes: tuple[str, ...] = ()

    def non_finite_operands(self, operands: Sequence[Operand] = OPERANDS) -> dict[str, tuple[int, tuple[str, ...]]]:
        """Non-finite values and the GEMMs that read them, by tensor: `layers.3.linear_fc2.input`.

        Inputs and weights are in the order of the forward pass. Output gradients follow in that of the backward pass.
        """
        found: dict[str, tuple[int, tuple[str, ...]]] = {}
        for name, counts in self.counts:
            tensor, _, gemm = name.rpartition(".")
            if counts.non_finite and tensor.endswith(tuple(operand.value for operand in operands)):
                number, gemms = found.get(tensor, (0, ()))
                found[tensor] = max(number, counts.non_finite), (*gemms, gemm)
        for tensor in self.infinite_amaxes:
            found.setdefault(tensor, (0, ()))
        gradients = [tensor for tensor in found if tensor.endswith(Operand.GRAD_OUTPUT.value)]
        forward = [tensor for tensor in found if tensor not in gradients]
        return {tensor: found[tensor] for tensor in (*forward, *reversed(gradients))}

    def describe(self, operands: Sequence[Operand] = OPERANDS, max_named: int = MAX_NAMED) -> str:
        """The non-finite operands in words: layer, operand, GEMMs, number of values; the first ones, others counted."""
        parts = [
            f"{tensor} ({', '.join(gemms)}): {number} non-finite" if number else f"{tensor}: infinite amax"
            for tensor, (number, gemms) in self.non_finite_operands(operands).items()
        ]
        more = len(parts) - max_named
        return "; ".join(parts[:max_named]) + (f"; and {more} more" if more > 0 else "")


class EmulatedCounters:
    """The `OperandDetector` of emulated linears. Every rank has rows for all linears, and adds to those of its own.

    Args:
        linears: names of all quantized linears of the model, the same on all ranks.
        chunks: the model of this rank.
    """

    def __init__(self, linears: Sequence[str], chunks: Sequence[Any], device: torch.device):
        self.linears = tuple(linears)
        self.table = torch.zeros(len(self.linears), len(QUANTIZERS), 2, dtype=torch.int64, device=device)
        self.windows: dict[str, DelayedState] = {}
        for name, linear in emulated_linears_by_name(chunks):
            if name not in self.linears:
                continue
            linear.counts = self.of_linear(name)
            state = getattr(linear, "quantizer_state", None)
            if isinstance(state, DelayedState) and keeps_amaxes(state.options):
                self.windows[name] = state

    def of_linear(self, name: str) -> LinearCounts:
        """The counts of one linear, views of the table, to which its casts add."""
        return dict(zip(QUANTIZERS, self.table[self.linears.index(name)].unbind(), strict=True))

    def reset(self) -> None:
        self.table.zero_()

    def counts(self) -> Tensor:
        counts = self.table.sum(dim=(0, 1))  # a value counts once for each GEMM that reads it
        histories = [state.infinite_amaxes.any() for state in self.windows.values()]
        num_infinite = torch.stack(histories).sum() if histories else torch.zeros_like(counts[0])
        return torch.cat([counts, num_infinite[None]])

    def find(self) -> Tensor:
        return self.table.clone()

    def clear_infinite_amaxes(self) -> list[str]:
        names = []
        for name, state in self.windows.items():
            is_infinite = state.infinite_amaxes.tolist()
            names += [f"{name}.{operand.value}" for operand, bad in zip(OPERANDS, is_infinite, strict=True) if bad]
            state.clear_infinite_amaxes()
        return names


class OperandMonitor:
    """Counts non-finite and saturated operands of this rank, and names those of all ranks.

    Args:
        linears: names of the quantized linears of the model, and of attention in FP8, the same on all ranks.
        detectors: none where nothing quantizes.
    """

    def __init__(self, linears: Sequence[str] = (), detectors: Sequence[OperandDetector] = ()):
        self.linears, self.detectors = tuple(linears), detectors

    def reset(self) -> None:
        """Clear the counts before a step."""
        for detector in self.detectors:
            detector.reset()

    def counts(self) -> dict[str, Tensor]:
        """This rank's numbers, to sum over the ranks: int64 [3]."""
        counts = [detector.counts() for detector in self.detectors]
        return {OPERAND_COUNTS: functools.reduce(torch.add, counts)} if counts else {}

    def find(self, totals: StepTotals, names_saturated: bool) -> NonfiniteOperands:
        """The non-finite and saturated operands of a step over all ranks, and clear infinite amaxes.

        Collective, with communication only if operands are named.

        Args:
            names_saturated: whether operands are named that saturate, where all are finite; the same on all ranks.
        """
        if not self.detectors:
            return NonfiniteOperands()
        num_non_finite, num_saturated, num_infinite_amaxes = map(int, totals[OPERAND_COUNTS])
        if not (num_non_finite or num_infinite_amaxes) and not (num_saturated and names_saturated):
            return NonfiniteOperands(num_saturated=num_saturated)
        counts = functools.reduce(torch.add, [detector.find() for detector in self.detectors])
        dist.all_reduce(counts)
        names: tuple[str, ...] = ()
        if num_infinite_amaxes:
            gathered: list[list[str]] = [[]] * dist.get_world_size()
            cleared = [name for detector in self.detectors for name in detector.clear_infinite_amaxes()]
            dist.all_gather_object(gathered, cleared)
            everywhere = {name for each in gathered for name in each}
            order = {f"{linear}.{operand.value}": (row, column) for row, linear in enumerate(self.linears)
                     for column, operand in enumerate(OPERANDS)}  # fmt: skip
            names = tuple(sorted(everywhere, key=order.__getitem__))
        named = tuple(named_counts(self.linears, counts.cpu()))
        return NonfiniteOperands(num_non_finite, num_saturated, named, names)

    def metrics(self, nonfinite: NonfiniteOperands) -> dict[str, Any]:
        """Fields of the step's record."""
        if not self.detectors:
            return {}
        return {
            "num_non_finite_operands": nonfinite.num_non_finite,
            "num_saturated_operands": nonfinite.num_saturated,
            "operand_counts": dict(nonfinite.counts) or None,
        }


def named_counts(linears: Sequence[str], table: Tensor) -> Iterator[tuple[str, OperandCounts]]:
    """The counts that are not zero, with names such as `layers.3.linear_fc2.input.fprop`."""
    counts = table.tolist()
    for row, column in (table > 0).any(dim=-1).nonzero().tolist():
        operand, gemm = QUANTIZERS[column]
        of_quantizer = counts[row][column]
        yield (
            f"{linears[row]}.{operand.value}.{gemm.value}",
            OperandCounts(non_finite=of_quantizer[NON_FINITE], saturated=of_quantizer[SATURATED]),
        )


def build_operand_monitor(
    model: ModelConfig, precision: PrecisionConfig, chunks: Sequence[Any], backend: LayerBackend, device: torch.device
) -> OperandMonitor:
    """The monitor of a run; it counts nothing where no linear quantizes."""
    if not precision_map.is_quantized(precision):
        return OperandMonitor()
    linears = precision_map.linears_with_statistics(model, precision)
    if precision.fp8_dot_product_attention:  # on Transformer Engine
        linears = with_attention(model, linears)
    chunks = unwrap_model(list(chunks))
    if backend.needs_transformer_engine:
        from megafp8.te.counters import AmaxCounters  # needs Transformer Engine

        detectors: list[OperandDetector] = [AmaxCounters(linears, chunks, device)]
    else:
        detectors = [EmulatedCounters(linears, chunks, device)]
    experts = ExpertAmaxes(linears, chunks, device)
    return OperandMonitor(linears, [*detectors, experts] if experts.linears else detectors)
