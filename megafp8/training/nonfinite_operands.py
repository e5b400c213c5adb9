"""Non-finite and saturated values in the operands of quantized linears, and what a run does about them.

`quantization/counters.py` counts them in every step. Their sums over the ranks are reduced together with the loss, so
that all ranks take the same decision before the update. A step with non-finite operands needs more: one reduction of
the table, and the names of amax histories with an infinite amax. Under the algorithm "max" such an amax would keep a
scale until it leaves the history, so that it is removed in any case. Under "most_recent" the next amax makes a new
scale, so that nothing has to be removed. Operands that saturate are named at multiples of `--log-interval` only: under
delayed scaling some do in nearly every step, and their table and names take milliseconds of the host while a GPU waits
for the update.

`--on-nonfinite-activation` says what follows from non-finite operands: `warn` records them, `stop` and `skip` treat the
step as a bad one (`bad_steps.py`), and `bf16` also computes the linears in high precision from the next step on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor

from megafp8.checkpoint.progress import HIGH_PRECISION, SMOOTHED, HighPrecisionFallback
from megafp8.config import precision_map
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.schema import RunConfig
from megafp8.mcore.layer_runtime import LinearCounters
from megafp8.mcore.modules import with_attention
from megafp8.metrics.records import OperandCounts
from megafp8.models.grouped_moe import named_mixtures
from megafp8.models.layer_runtime import layer_runtime
from megafp8.optimizer.gradient_checks import OPERANDS as OPERAND_COUNTS
from megafp8.optimizer.gradient_checks import StepTotals
from megafp8.quantization.counters import NON_FINITE, QUANTIZERS, SATURATED
from megafp8.quantization.delayed_scaling import OPERANDS
from megafp8.recipes.base import Operand
from megafp8.training.expert_amaxes import ExpertAmaxes

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


class OperandCounter:
    """Counts the operands of a run in which nothing quantizes: none."""

    def reset(self) -> None:
        """Clear the counts before a step."""

    def counts(self) -> Mapping[str, Tensor]:
        """This rank's numbers, to sum over the ranks."""
        return {}

    def nonfinite_operands(self, totals: StepTotals, names_saturated: bool) -> NonfiniteOperands:
        """The non-finite and saturated operands of a step over all ranks, and clear infinite amaxes.

        Collective, with communication only if operands are named.

        Args:
            names_saturated: whether operands are named that saturate, where all are finite; the same on all ranks.
        """
        return NonfiniteOperands()

    def metrics(self, nonfinite: NonfiniteOperands) -> Mapping[str, Any]:
        """Fields of the step's record."""
        return {}


class OperandMonitor(OperandCounter):
    """Counts non-finite and saturated operands of this rank's linears and of experts in one launch, and names those of
    all ranks.

    Args:
        counters: of the linears.
        chunks: the model.
    """

    def __init__(self, counters: LinearCounters, chunks: Sequence[Any]):
        self.counters = counters
        self.experts = ExpertAmaxes(counters.linears, unwrap_model(list(chunks)))

    def reset(self) -> None:
        self.counters.reset()
        self.experts.reset()

    def counts(self) -> Mapping[str, Tensor]:
        return {OPERAND_COUNTS: self.experts.add_to(self.counters.totals())}  # int64 [3]

    def metrics(self, nonfinite: NonfiniteOperands) -> Mapping[str, Any]:
        return {
            "num_non_finite_operands": nonfinite.num_non_finite,
            "num_saturated_operands": nonfinite.num_saturated,
            "operand_counts": dict(nonfinite.counts) or None,
        }

    def nonfinite_operands(self, totals: StepTotals, names_saturated: bool) -> NonfiniteOperands:
        num_non_finite, num_saturated, num_infinite_amaxes = map(int, totals[OPERAND_COUNTS])
        if not (num_non_finite or num_infinite_amaxes) and not (num_saturated and names_saturated):
            return NonfiniteOperands(num_saturated=num_saturated)
        linears, counts = self.counters.linears, self.experts.add_to_table(self.counters.table())
        dist.all_reduce(counts)
        names: tuple[str, ...] = ()
        if num_infinite_amaxes:
            gathered: list[list[str]] = [[]] * dist.get_world_size()
            cleared = self.counters.clear_infinite_amaxes() + self.experts.clear_infinite_amaxes()
            dist.all_gather_object(gathered, cleared)
            everywhere = {name for each in gathered for name in each}
            order = {f"{linear}.{operand.value}": (row, column) for row, linear in enumerate(linears)
                     for column, operand in enumerate(OPERANDS)}  # fmt: skip
            names = tuple(sorted(everywhere, key=order.__getitem__))
        named = tuple(named_counts(linears, counts.cpu()))
        return NonfiniteOperands(num_non_finite, num_saturated, named, names)


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
    config: RunConfig, chunks: Sequence[Any], implementation: LayerBackend, device: torch.device
) -> OperandCounter:
    """The counter of a run; it counts nothing where no linear quantizes."""
    if not precision_map.is_quantized(config.precision):
        return OperandCounter()
    linears = precision_map.linears_with_statistics(config.model, config.precision)
    if config.precision.fp8_dot_product_attention:  # on Transformer Engine
        linears = with_attention(config.model, linears)
    counters = layer_runtime(implementation).counters(linears, unwrap_model(list(chunks)), device)
    return OperandMonitor(counters, chunks)


def fall_back(chunks: Sequence[Any], linears: Sequence[HighPrecisionFallback], implementation: LayerBackend) -> None:
    """Compute linears in high precision, or with a scale per channel, from now on; those of this rank."""
    names = [linear.name for linear in linears if linear.form == HIGH_PRECISION]
    move_grouped_experts(chunks, names)
    smoothed = [linear.name for linear in linears if linear.form == SMOOTHED]
    layer_runtime(implementation).change_linears(unwrap_model(list(chunks)), names, smoothed)


def move_grouped_experts(chunks: Sequence[Any], names: Sequence[str]) -> None:
    """Compute experts in one launch in high precision from now on, if a linear of one of them is named."""
    fallbacks = {precision_map.name_of_all_experts(name) for name in names}
    for prefix, mixture in (named for chunk in unwrap_model(list(chunks)) for named in named_mixtures(chunk)):
        if f"{prefix}{precision_map.MLP_LINEARS[0]}" in fallbacks:
            mixture.experts.rule = mixture.experts.codes = None
            for state in mixture.experts.quantizer_state.values():  # the others' updates do not wait for it
                mixture.experts.exchange.leave(state)
