"""The load of experts: its record, and the health rules about it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Optional

from megafp8.utils.plain_data import Float

COLLAPSED_FRACTION = 0.9
"""Of the way from equal loads to those of tokens that all pass the same experts."""
NUM_LASTING = 2  # records in a row
MAX_CHANCE = 1e-3
"""Of any idle expert in a record, up to which it is no chance. A fault needs several records, and runs have many."""
MAX_NAMED = 3  # experts
COLLAPSE, IDLE = "collapse", "idle experts"


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """How a step's tokens were assigned to the experts of one layer, over all ranks.

    Loads are those that the router chose, before a capacity drops assignments.
    """

    max_to_mean: Float
    """Tokens of the expert with the most, over the mean; 1 is balanced."""
    variation: Float
    """Standard deviation of the experts' tokens over their mean."""
    num_idle: int
    """Experts without tokens."""
    dropped_fraction: Float
    """Of the assignments of tokens to experts, those above a capacity."""
    entropy_fraction: Float
    """Mean entropy of the softmax of a token's logits, over the largest possible one."""
    bias_min: Optional[Float] = None
    """Smallest bias of an expert; None without --moe-router-enable-expert-bias."""
    bias_max: Optional[Float] = None
    busiest_expert: Optional[int] = None
    """The number of the expert with the most tokens; None in records of earlier versions."""
    padded_fraction: Optional[Float] = None
    """Of the rows that experts multiply, those without an assigned token; None on Transformer Engine's experts."""
    dispatch_bytes: Optional[int] = None
    """Bytes of tokens that all ranks together received from other expert-parallel ranks in the forward passes; None
    where no alltoall dispatcher sends any, and with Transformer Engine's experts."""
    idle_experts: tuple[int, ...] = ()
    """The numbers of the experts without tokens; empty in records of earlier versions."""
    num_assignments: Optional[int] = None
    """Tokens of all experts together; None in records of earlier versions."""
    topk_fraction: Optional[Float] = None
    """Of the assignments, those to the k busiest experts, where a token has k; None in records of earlier versions."""


@dataclass(frozen=True, kw_only=True)
class ExpertRecord:
    """The load of the experts in one logged step."""

    kind: ClassVar[str] = "experts"

    step: int
    layers: dict[str, LayerLoad]
    """By the number of the layer, from 0."""


def layer_load(
    counts: Sequence[float], topk: int, num_tokens: float, entropy_sum: float, num_remaining: float,
    bias: Optional[tuple[float, float]],
    num_rows: Optional[float] = None, dispatch_bytes: Optional[int] = None,
) -> LayerLoad:  # fmt: skip
    """The load of one layer.

    Args:
        counts: tokens that the router chose for each expert.
        topk: experts of a token.
        num_tokens: tokens that were routed.
        entropy_sum: of their softmax, in nats.
        num_remaining: assignments that no capacity dropped.
        bias: smallest and largest bias.
        num_rows: that experts multiplied, padding included; None if they are not counted.
        dispatch_bytes: of tokens that arrived.
    """
    num_experts, assigned, largest = len(counts), sum(counts), max(counts)
    mean = assigned / num_experts
    deviation = math.dist(counts, [mean] * num_experts) / math.sqrt(num_experts)
    idle = tuple(expert for expert, count in enumerate(counts) if not count)
    largest_entropy = math.log(num_experts) * num_tokens
    return LayerLoad(
        max_to_mean=largest / mean if mean else 0.0,
        variation=deviation / mean if mean else 0.0,
        num_idle=len(idle),
        dropped_fraction=1 - num_remaining / assigned if assigned else 0.0,
        entropy_fraction=entropy_sum / largest_entropy if largest_entropy else 0.0,
        bias_min=None if bias is None else bias[0],
        bias_max=None if bias is None else bias[1],
        busiest_expert=counts.index(largest),
        padded_fraction=None if not num_rows else 1 - num_remaining / num_rows,
        dispatch_bytes=dispatch_bytes,
        idle_experts=idle,
        num_assignments=int(assigned),
        topk_fraction=sum(sorted(counts)[-topk:]) / assigned if assigned else 0.0,
    )


class LoadWarning(NamedTuple):
    """What is wrong with the load of a layer.

    Attributes:
        layer: its number, from 0.
        kind: COLLAPSE or IDLE.
        what: the experts and values that show it.
    """

    layer: str
    kind: str
    what: str


def load_warnings(records: Sequence[ExpertRecord], num_experts: int, topk: int) -> Iterator[LoadWarning]:
    """What is wrong with the load in the last records, each of which shows it.

    Args:
        records: oldest first; fewer than `NUM_LASTING` give no warning.
    """
    recent = records[-NUM_LASTING:]
    if len(recent) < NUM_LASTING or num_experts <= topk:
        return
    for layer in recent[-1].layers:
        loads = [record.layers[layer] for record in recent if layer in record.layers]
        if all(is_collapsed(load, num_experts, topk) for load in loads):
            fraction = loads[-1].topk_fraction
            what = f"nearly all tokens pass the same {topk} of {num_experts} experts ({fraction:.1%} of assignments)"
            yield LoadWarning(layer, COLLAPSE, what)
            continue
        idle = set.intersection(*(set(load.idle_experts) for load in loads))
        if idle and not any(may_be_chance(load, num_experts, topk) for load in loads):
            yield LoadWarning(layer, IDLE, describe_idle(sorted(idle), num_experts))


def is_collapsed(load: LayerLoad, num_experts: int, topk: int) -> bool:
    """Whether nearly all tokens pass the same k experts."""
    balanced = topk / num_experts
    limit = balanced + COLLAPSED_FRACTION * (1 - balanced)
    return load.topk_fraction is not None and load.topk_fraction >= limit


def may_be_chance(load: LayerLoad, num_experts: int, topk: int) -> bool:
    """Whether a router without preferences would leave an expert without tokens, because there are few of them."""
    num_tokens = (load.num_assignments or 0) / topk
    return num_experts * (1 - topk / num_experts) ** num_tokens > MAX_CHANCE


def describe_idle(idle: Sequence[int], num_experts: int) -> str:
    """Name the first experts without tokens, and count the others."""
    named, more = ", ".join(map(str, idle[:MAX_NAMED])), len(idle) - MAX_NAMED
    if len(idle) == 1:
        return f"expert {named} of {num_experts} has no tokens"
    return f"experts {named}{f' and {more} more' if more > 0 else ''} of {num_experts} have no tokens"
