"""Numbers of a step that all ranks sum, by name, in one all-reduce."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

LOSS, BAD_RANKS, SQUARED_NORM, STOPPING_RANKS = "loss", "bad ranks", "squared norm", "stopping ranks"
OPERAND_COUNTS = "operands"


@dataclass(frozen=True)
class StepTotals:
    """Numbers of a step, summed over all ranks, by name.

    LOSS has the sum of the losses of the global batch in nats, and the tokens that count in it. BAD_RANKS is the number
    of ranks with a non-finite loss or non-finite gradients. SQUARED_NORM is of all gradients, where the optimizer gives
    it. STOPPING_RANKS is the number of ranks that received a stop signal. OPERAND_COUNTS has the non-finite and the
    saturated values of quantized operands, and the infinite amaxes of their histories (`nonfinite/detector.py`).
    """

    sums: Mapping[str, tuple[float, ...]]

    def __getitem__(self, name: str) -> tuple[float, ...]:
        return self.sums[name]

    def number(self, name: str) -> float:
        """A sum that is one number."""
        (number,) = self.sums[name]
        return number

    @property
    def num_tokens(self) -> float:
        """Tokens that count in the loss."""
        return self.sums[LOSS][1]

    @property
    def loss(self) -> float:
        """Mean loss per token; NaN without tokens."""
        loss, num_tokens = self.sums[LOSS]
        return loss / num_tokens if num_tokens else float("nan")

    @property
    def grad_norm(self) -> float:
        """L2 norm of all gradients, where the optimizer gave it."""
        return math.sqrt(self.number(SQUARED_NORM))


def sum_over_ranks(numbers: Mapping[str, Tensor], device: torch.device) -> StepTotals:
    """Sum named numbers over all ranks, in one all-reduce; all ranks give the same names and shapes."""
    # FP64, because token counts exceed FP32's integers.
    flat = torch.cat([value.to(device, torch.float64).flatten() for value in numbers.values()])
    dist.all_reduce(flat)
    sums = iter(flat.tolist())
    return StepTotals({name: tuple(itertools.islice(sums, value.numel())) for name, value in numbers.items()})
