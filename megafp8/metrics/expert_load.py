"""The load of experts: its record, and the health rules about it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Optional

COLLAPSED_FRACTION = 0.9
"""Of the largest possible load of one expert, with which all tokens pass the same experts."""
NUM_LASTING = 2  # records in a row


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """How a step's tokens were assigned to the experts of one layer, over all ranks.

    Loads are those that the router chose, before a capacity drops assignments.
    """

    max_to_mean: float
    """Tokens of the expert with the most, over the mean; 1 is balanced."""
    variation: float
    """Standard deviation of the experts' tokens over their mean."""
    num_idle: int
    """Experts without tokens."""
    dropped_fraction: float
    """Of the assignments of tokens to experts, those above a capacity."""
    entropy_fraction: float
    """Mean entropy of the softmax of a token's logits, over the largest possible one."""
    bias_min: Optional[float] = None
    """Smallest bias of an expert; None without --moe-router-enable-expert-bias."""
    bias_max: Optional[float] = None
    busiest_expert: Optional[int] = None
    """The number of the expert with the most tokens; None in records of earlier versions."""
    padded_fraction: Optional[float] = None
    """Of the rows that experts multiply, those without an assigned token; None on Transformer Engine's experts."""
    dispatch_bytes: Optional[int] = None
    """Bytes of tokens that all ranks together received from other expert-parallel ranks in the forward passes; None
    where no alltoall dispatcher sends any, and with Transformer Engine's experts."""


@dataclass(frozen=True, kw_only=True)
class ExpertRecord:
    """The load of the experts in one logged step."""

    kind: ClassVar[str] = "experts"

    step: int
    layers: dict[str, LayerLoad]
    """By the number of the layer, from 0."""


def layer_load(
    counts: Sequence[float], num_tokens: float, entropy_sum: float, num_kept: float,
    bias: Optional[tuple[float, float]],
    num_rows: Optional[float] = None, dispatch_bytes: Optional[int] = None,
) -> LayerLoad:  # fmt: skip
    """The load of one layer.

    Args:
        counts: tokens that the router chose for each expert.
        num_tokens: tokens that were routed.
        entropy_sum: of their softmax, in nats.
        num_kept: assignments that no capacity dropped.
        bias: smallest and largest bias.
        num_rows: that experts multiplied, padding included; None if they are not counted.
        dispatch_bytes: of tokens that arrived.
    """
    num_experts, assigned = len(counts), sum(counts)
    mean = assigned / num_experts
    deviation = math.sqrt(sum((count - mean) ** 2 for count in counts) / num_experts)
    largest_entropy = math.log(num_experts) * num_tokens
    return LayerLoad(
        max_to_mean=max(counts) / mean if mean else 0.0,
        variation=deviation / mean if mean else 0.0,
        num_idle=sum(count == 0 for count in counts),
        dropped_fraction=1 - num_kept / assigned if assigned else 0.0,
        entropy_fraction=entropy_sum / largest_entropy if largest_entropy else 0.0,
        bias_min=None if bias is None else bias[0],
        bias_max=None if bias is None else bias[1],
        busiest_expert=max(range(num_experts), key=lambda expert: counts[expert]),
        padded_fraction=None if not num_rows else 1 - num_kept / num_rows,
        dispatch_bytes=dispatch_bytes,
    )


def load_findings(records: Sequence[ExpertRecord], num_experts: int, topk: int) -> Iterator[str]:
    """What is wrong with the load in the last records, each of which shows it.

    Args:
        records: oldest first; fewer than `NUM_LASTING` give no finding.
    """
    recent = records[-NUM_LASTING:]
    if len(recent) < NUM_LASTING or num_experts <= topk:
        return
    limit = COLLAPSED_FRACTION * num_experts / topk
    for layer in recent[-1].layers:
        loads = [record.layers[layer] for record in recent if layer in record.layers]
        if all(load.max_to_mean >= limit for load in loads):
            yield (
                f"layer {layer}: collapse: nearly all tokens pass the same {topk} of {num_experts} experts "
                f"(max/mean {loads[-1].max_to_mean:.2f}); raise --moe-aux-loss-coeff or lower --lr"
            )
        elif all(load.num_idle for load in loads):
            yield (
                f"layer {layer}: {loads[-1].num_idle} of {num_experts} experts have no tokens; raise "
                "--moe-aux-loss-coeff, or give --moe-router-enable-expert-bias"
            )
