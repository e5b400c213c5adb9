"""Signal-to-noise ratio of the gradients of each layer, from Adam's moments.

The first moment m averages gradients, in which their noise cancels. The second moment v averages their squares, in
which it does not. Both without their bias, the ratio

    SNR of a layer = sum of m^2 / sum of v    over its weights

is 1 for gradients that do not change and (1 - beta1) / (1 + beta1) for noise, 0.05 at a beta1 of 0.9. It costs a read
of both moments, no other batch and no communication but of two sums for each layer. A layer whose ratio rises again has
consistent gradients in one direction, as when its loss grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import to_local_if_dtensor, unwrap_model
from torch import Tensor

MOMENT_DTYPES = (torch.float32, torch.bfloat16)


def gradient_snr(
    optimizer: Any, chunks: Sequence[Any], num_layers: int, betas: tuple[float, float]
) -> tuple[list[Optional[float]], int]:
    """The ratio of each layer over all ranks, None without moments, as under SGD; and the updates that the moments
    have. Collective.

    Args:
        optimizer: megatron-core's.
        betas: of Adam.
    """
    state: dict[Tensor, Mapping[str, Tensor]] = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        state |= getattr(part.optimizer, "state", {})
    device = next(chunks[0].parameters()).device
    sums = torch.zeros(num_layers, 2, dtype=torch.float64, device=device)
    for layer in (
        m for chunk in unwrap_model(list(chunks)) for m in chunk.modules() if isinstance(m, TransformerLayer)
    ):
        if layer.layer_number <= num_layers:  # layers of multi-token prediction come after the model's
            sums[layer.layer_number - 1] += sum(moment_sums(state, weight) for weight in layer.parameters())
    dist.all_reduce(sums)
    # Some ranks may have no weights.
    updates = torch.tensor(num_updates(optimizer), device=device)
    dist.all_reduce(updates, dist.ReduceOp.MAX)
    number = int(updates)
    if not number:
        return [None] * num_layers, 0
    correction = (1 - betas[1] ** number) / (1 - betas[0] ** number) ** 2
    return [signal / noise * correction if noise > 0 else None for signal, noise in sums.tolist()], number


def num_updates(optimizer: Any) -> int:
    """Updates that the moments of this rank have: fewer than steps after `--no-load-optim` and skipped steps."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        groups = getattr(part.optimizer, "param_groups", ())
        states = [*groups, *getattr(part.optimizer, "state", {}).values()]  # torch's own Adam counts for each weight
        if found := [int(state["step"]) for state in states if "step" in state]:
            return max(found)
    return 0


def moment_sums(state: Mapping[Tensor, Mapping[str, Tensor]], weight: Tensor) -> Tensor:
    """Sums of the squared first moment and of the second one, of this rank's shard of a weight, FP64 [2]."""
    moments = state.get(getattr(weight, "main_param", weight), {})
    first, second = moments.get("exp_avg"), moments.get("exp_avg_sq")
    if first is None or second is None or not all(is_plain(moment) for moment in (first, second)):
        return torch.zeros(2, dtype=torch.float64, device=weight.device)
    first, second = to_local_if_dtensor(first), to_local_if_dtensor(second)
    return torch.stack([first.float().square().sum(), second.float().sum()]).double()


def is_plain(moment: Tensor) -> bool:
    """Whether a moment is stored as its values, not as codes or with a scale."""
    return moment.dtype in MOMENT_DTYPES and not is_float8tensor(moment)
