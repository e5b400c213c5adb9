"""Nothing that is not finite reaches the weights, and the message names where it came from.

Before a bucket of gradients is reduced over the data-parallel ranks, its norm is taken: it is finite only if every
element is, and small enough to be clipped. That is one read of the gradients per step and no wait; the results gather
in one flag on the device. At the end of the backward pass one small all-reduce tells every rank the global loss and
whether any rank saw a bad value, so all of them leave out the update together, or stop together before it. Only then is
time spent on finding the tensor.

(After the reduction a NaN of one rank is everybody's: looking at the gradient norm, as trainers do, cannot name a rank.
With BF16 weights megatron-core does not look at all.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8 import faults
from megafp8.optim.reduction import on_reduction

NO_TENSOR = "none by itself; the squares of all gradients together overflow"
ONLY_LOSS = "none; weights and gradients are finite"


def is_finite(tensor: Tensor) -> Tensor:
    """Whether a tensor's norm is finite: no element is NaN or infinite, and their squares add up within FP32."""
    return torch.isfinite(torch.linalg.vector_norm(tensor, dtype=torch.float32))  # FP16's own ends at 65504


class GradientWatch:
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
                faults.poison("step.gradients", bucket.grad_data)
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
        num_bad_ranks: ranks whose own loss or gradients were not finite.
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
        bad_gradients: 0 where this rank's gradients were finite.
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


def first_bad_tensor(chunks: list[Any]) -> Optional[str]:
    """Name of the first tensor of this rank, in the model's order, that is not finite: weights, then gradients."""
    for kind in ("weight", "gradient"):
        for index, chunk in enumerate(chunks):
            for name, parameter in chunk.module.named_parameters():
                tensor = parameter if kind == "weight" else parameter.main_grad
                if not bool(is_finite(tensor.detach())):
                    place = f"chunk {index} " if len(chunks) > 1 else ""
                    return f"{kind} of {place}{name.removeprefix('module.')}"
    return None


def bad_ranks(local_loss: Optional[Tensor], bad_gradients: Tensor, chunks: list[Any], samples: str) -> list[str]:
    """What each rank saw that met a number that is not finite, a line each; the same on all ranks, which call it.

    Args:
        samples: what this rank read, in words.
    """
    loss_is_bad = local_loss is not None and not bool(torch.isfinite(local_loss).all())
    seen = None
    if loss_is_bad or bool(bad_gradients > 0):
        first = first_bad_tensor(chunks) or (NO_TENSOR if bool(bad_gradients > 0) else ONLY_LOSS)
        seen = f"{'loss is not finite; ' if loss_is_bad else ''}first bad tensor: {first}; {samples}"
    gathered: list[Optional[str]] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, seen)
    return [f"rank {rank}: {text}" for rank, text in enumerate(gathered) if text is not None]
