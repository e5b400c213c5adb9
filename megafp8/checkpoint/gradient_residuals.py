"""Errors of FP8 gradients in a checkpoint (`--grad-reduce-fp8-error-feedback`).

Each rank has the errors of the codes that it sent in the last step, in the rows of its buckets. A checkpoint has them
under the rank's number. They fit a run whose ranks send the same rows of the same parameters. Another run drops them,
and says so: the error of one step is then missing from the sum of all steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megafp8.config.schema import PrecisionConfig
from megafp8.device.collective_errors import call_on_all_ranks

KEY, LAYOUT_KEY = "gradient_residuals", "gradient_residual_places"
FLAG = "--grad-reduce-fp8-error-feedback"


def sharded_residuals(residuals: Sequence[Tensor]) -> dict[str, ShardedTensor]:
    """This rank's errors, to save or to load them."""
    return {
        str(index): ShardedTensor.from_rank_offsets(f"optimizer.{KEY}.{dist.get_rank()}.{index}", rows)
        for index, rows in enumerate(residuals)
        if len(rows)
    }


def row_layout(precision: PrecisionConfig, residuals: Sequence[Tensor]) -> Optional[dict[str, Any]]:
    """What the rows of all ranks belong to, as plain values; None without error feedback. Collective with it."""
    if not precision.grad_reduce_fp8_error_feedback:
        return None
    return {
        "rows": call_on_all_ranks(lambda: [len(rows) for rows in residuals]),
        "exclude": list(precision.grad_reduce_fp8_exclude),
    }


def state_to_save(precision: PrecisionConfig, residuals: Sequence[Tensor], is_written_later: bool) -> dict[str, Any]:
    """The part of a checkpoint's state dictionary with the errors; empty without error feedback. Collective with it.

    Args:
        is_written_later: clone them, since the next forward-backward changes them.
    """
    own = row_layout(precision, residuals)
    if own is None:
        return {}
    rows = [each.clone() for each in residuals] if is_written_later else residuals
    return {KEY: sharded_residuals(rows), LAYOUT_KEY: own}


def note_on_load(saved: Optional[Mapping[str, Any]], own: Optional[Mapping[str, Any]], same_layout: bool) -> str:
    """What happens to the errors of a checkpoint, as text for the user; empty if they are loaded, or there are none.

    Args:
        saved, own: `row_layout` of the checkpoint and of this run.
        same_layout: of the ranks.
    """
    if saved is None:
        return "" if own is None else f"the errors of FP8 gradients ({FLAG}) start at zero: the checkpoint has none"
    if own is None:
        return f"the errors of FP8 gradients are dropped: this run has no {FLAG}"
    if saved == own and same_layout:
        return ""
    reason = "buckets or excluded parameters differ" if same_layout else "different layout"
    return f"{reason}: the errors of FP8 gradients ({FLAG}) start at zero"


@torch.no_grad()
def load(residuals: Sequence[Tensor], state: Mapping[str, Tensor]) -> None:
    """Set this rank's errors to those that were read into `sharded_residuals`, the others to zero."""
    for index, rows in enumerate(residuals):
        rows.copy_(state.get(str(index), torch.zeros(())))
