"""What a step does to weights: how far it moves them, and how much of their gradients is noise.

The gradient noise scale is the "simple" one of McCandlish et al., "An Empirical Model of Large-Batch Training"
(arXiv:1812.06162), appendix A.1. The squared norm of the mean gradient over b sequences is on average

    E |G_b|^2 = |G|^2 + tr(S) / b

with the expected gradient G and the covariance S of one sequence's. From a small b and the whole batch B

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)        tr(S) = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B)

and the noise scale is tr(S) / |G|^2, in sequences. Both estimates have no bias, and much variance: average them over
steps before dividing. Here b is one microbatch of a rank, averaged over the data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megafp8.optim.reduction import on_reduction


def signal_and_noise(few: float, all: float, num_few: int, num_all: int) -> tuple[float, float]:
    """Estimates of |G|^2 and tr(S).

    Args:
        few, all: mean squared norms of the mean gradients over `num_few` and `num_all` sequences.
    """
    signal = (num_all * all - num_few * few) / (num_all - num_few)
    noise = (few - all) / (1 / num_few - 1 / num_all)
    return signal, noise


@contextmanager
def before_reduction(chunks: Sequence[Any], note: Callable[[Tensor], None]) -> Iterator[None]:
    """Within, show every weight whose gradient is about to be reduced over the data-parallel ranks."""

    def show(group: Any) -> None:
        for bucket in group.buckets:
            for weight in bucket.params:
                note(weight)

    with ExitStack() as stack:
        for group in (group for chunk in chunks for group in chunk.bucket_groups):
            stack.callback(on_reduction(group, partial(show, group)))
        yield


def reduced_gradient(optimizer: Any, weight: Tensor) -> Optional[Tensor]:
    """The part of a weight's reduced gradient that this rank alone counts, flat; None where it has none."""
    parts = [part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)]
    if not parts:
        is_first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        return weight.main_grad.view(-1) if is_first else None
    for part in parts:
        if not part.is_stub_optimizer and weight in part.model_param_gbuf_map:
            place = part._get_model_param_range_map(weight)["param"]
            return weight.main_grad.view(-1)[place.start : place.end]
    return None


def trained_values(weight: Tensor, has_masters: bool) -> Optional[Tensor]:
    """What the optimizer updates; None where other ranks have it.

    Args:
        has_masters: whether FP32 master weights stand beside weights of fewer bits; else the weight itself is looked
            at, and updates that its type rounds away are not seen.
    """
    if has_masters and hasattr(weight, "main_param"):
        return weight.main_param
    values = weight.detach()
    return values.float() if is_float8tensor(values) else values  # which torch would round to the weight's BF16 first


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Norm of each tensor, FP32 scalars; all of them in few operations on a GPU."""
    return list(torch._foreach_norm(tensors, 2, torch.float32)) if tensors else []


def squared(norms: Sequence[Tensor]) -> Tensor:
    """Their squares, FP64 [tensors]."""
    return torch.stack(list(norms)).double().square() if norms else torch.zeros(0)
