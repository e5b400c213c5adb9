"""Non-finite and saturated tensors of experts in one launch, from amaxes.

As in `te/counters.py`, under delayed scaling amaxes and the scales that were used are read just before an update of the
scales, by sums on the device that a CUDA graph can hold. A tensor is the tokens, weight or output gradient of one
expert in a microbatch. Under current scaling the casts count a tensor of one expert with an infinite amax once a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from megafp8.models.grouped_moe import LINEARS, named_mixtures
from megafp8.quantization.counters import NON_FINITE, QUANTIZERS, count_amaxes, saturation_threshold
from megafp8.quantization.delayed_scaling import OPERANDS, DelayedState, keeps_amaxes


@dataclass(frozen=True)
class StackedCounts:
    """The counts of one linear of all experts of a layer.

    Attributes:
        names: of the linear of each expert, E.
        counts: int64 [2, 3, E], non-finite and saturated tensors of each operand.
        threshold: amaxes from this on saturate.
        state: of delayed scaling; None without it.
    """

    names: tuple[str, ...]
    counts: Tensor
    threshold: float
    state: Optional[DelayedState] = None

    def count(self, operands: slice) -> None:
        """Count the amaxes of some operands under delayed scaling."""
        assert self.state is not None
        amax, scale = self.state.amax_history[0, operands], self.state.quant_scale[operands]
        count_amaxes(amax, scale, self.threshold, self.counts[:, operands])


class ExpertAmaxes:
    """The `OperandDetector` of this rank's experts in one launch.

    Args:
        linears: names of the rows of tables, the same on all ranks.
        chunks: the model.
    """

    def __init__(self, linears: Sequence[str], chunks: Sequence[Any], device: torch.device):
        numbers = {name: row for row, name in enumerate(linears)}
        self.num_linears, self.device = len(linears), device
        self.linears = [counts for chunk in chunks for counts in stacked_counts(chunk, numbers.keys())]
        # On the device, where indices from the host would be waited for.
        self.rows = [torch.tensor([numbers[name] for name in linear.names], device=device) for linear in self.linears]

    def reset(self) -> None:
        for linear in self.linears:
            linear.counts.zero_()

    def counts(self) -> Tensor:
        counts = torch.zeros(3, dtype=torch.int64, device=self.device)
        for linear in self.linears:
            counts[:2] += linear.counts.sum(dim=(1, 2))
            if linear.state is not None and keeps_amaxes(linear.state.options):
                counts[2] += linear.counts[NON_FINITE].sum()
        return counts

    def find(self) -> Tensor:
        table = torch.zeros(self.num_linears, len(QUANTIZERS), 2, dtype=torch.int64, device=self.device)
        for linear, rows in zip(self.linears, self.rows, strict=True):
            for column, (operand, _) in enumerate(QUANTIZERS):
                table[:, column].index_add_(0, rows, linear.counts[:, OPERANDS.index(operand)].t())
        return table

    def clear_infinite_amaxes(self) -> list[str]:
        names = []
        for linear in self.linears:
            if linear.state is None or not keeps_amaxes(linear.state.options):
                continue
            linear.state.clear_infinite_amaxes()
            found = linear.counts[NON_FINITE].t().nonzero().tolist()
            names += [f"{linear.names[expert]}.{OPERANDS[operand].value}" for expert, operand in found]
        return names


def stacked_counts(chunk: Any, known: Any) -> Iterator[StackedCounts]:
    """The counts of a model chunk, to which the updates of its scales, or its casts, add from now on."""
    for prefix, mixture in named_mixtures(chunk):
        experts = mixture.experts
        for linear in LINEARS:
            names = tuple(f"{prefix}{number}.{linear}" for number in mixture.local_expert_indices)
            if experts.rule is None or not known >= set(names):
                continue
            state = dict(experts.quantizer_state.items()).get(linear)
            counts = torch.zeros(2, len(OPERANDS), len(names), dtype=torch.int64, device=experts.linear_fc1.device)
            stacked = StackedCounts(names, counts, saturation_threshold(experts.rule.format), state)
            if state is None:
                experts.infinities[linear] = counts[NON_FINITE]
            else:
                experts.exchange.observe(state, stacked.count)
            yield stacked
