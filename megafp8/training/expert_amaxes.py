"""Non-finite and saturated tensors of experts in one launch under delayed scaling, from amaxes.

As in `te/counters.py`, amaxes and the scales that were used are read just before an update of the scales, by sums on
the device that a CUDA graph can hold. A tensor is the tokens, weight or output gradient of one expert in a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megafp8.models.grouped_moe import named_mixtures
from megafp8.quantization.counters import NON_FINITE, QUANTIZERS, count_amaxes, saturation_threshold
from megafp8.quantization.delayed_scaling import OPERANDS, DelayedState


@dataclass(frozen=True)
class StackedCounts:
    """The counts of one linear of all experts of a layer.

    Attributes:
        names: of the linear of each expert, E.
        counts: int64 [2, 3, E], non-finite and saturated tensors of each operand.
        threshold: amaxes from this on saturate.
    """

    names: tuple[str, ...]
    state: DelayedState
    counts: Tensor
    threshold: float

    def count(self, operands: slice) -> None:
        """Count the amaxes of some operands."""
        amax, scale = self.state.amax_history[0, operands], self.state.quant_scale[operands]
        count_amaxes(amax, scale, self.threshold, self.counts[:, operands])


class ExpertAmaxes:
    """The counts of this rank's experts; no counts without delayed scaling.

    Args:
        linears: names of the rows of tables, the same on all ranks.
        chunks: the model.
    """

    def __init__(self, linears: Sequence[str], chunks: Sequence[Any]):
        self.rows = {name: row for row, name in enumerate(linears)}
        self.linears = [counts for chunk in chunks for counts in stacked_counts(chunk, self.rows.keys())]

    def reset(self) -> None:
        """Set all counts to zero, before a step."""
        for linear in self.linears:
            linear.counts.zero_()

    def add_to(self, totals: Tensor) -> Tensor:
        """Add to non-finite and saturated tensors, and to those in amax histories, int64 [3]."""
        for linear in self.linears:
            totals[:2] += linear.counts.sum(dim=(1, 2))
            totals[2] += linear.counts[NON_FINITE].sum()
        return totals

    def add_to_table(self, table: Tensor) -> Tensor:
        """Add to counts by linear and quantizer, int64 [linears, QUANTIZERS, 2]."""
        for linear in self.linears:
            rows = [self.rows[name] for name in linear.names]
            for column, (operand, _) in enumerate(QUANTIZERS):
                table[rows, column] += linear.counts[:, OPERANDS.index(operand)].t()
        return table

    def clear_infinite_amaxes(self) -> list[str]:
        """Remove infinite amaxes from histories; names of the operands that had one in this step."""
        names = []
        for linear in self.linears:
            linear.state.clear_infinite_amaxes()
            found = linear.counts[NON_FINITE].t().nonzero().tolist()
            names += [f"{linear.names[expert]}.{OPERANDS[operand].value}" for expert, operand in found]
        return names


def stacked_counts(chunk: Any, known: Any) -> Iterator[StackedCounts]:
    """The counts of a model chunk, to which the updates of its scales add from now on."""
    for prefix, mixture in named_mixtures(chunk):
        experts = mixture.experts
        for linear, state in experts.quantizer_state.items():
            names = tuple(f"{prefix}{number}.{linear}" for number in mixture.local_expert_indices)
            if not known >= set(names):
                continue
            assert experts.rule is not None
            counts = torch.zeros(2, *state.quant_scale.shape, dtype=torch.int64, device=state.quant_scale.device)
            stacked = StackedCounts(names, state, counts, saturation_threshold(experts.rule.format))
            experts.exchange.observe(state, stacked.count)
            yield stacked
