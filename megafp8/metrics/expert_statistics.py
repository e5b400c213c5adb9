"""Quantization statistics of the experts of a layer together: the mean over experts, and the worst expert.

A record has every expert: `layers.3.experts.17.linear_fc1.input`. All experts of the layer are
`layers.3.experts.linear_fc1.input`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Optional

from megafp8.config.precision_map import name_of_all_experts
from megafp8.metrics.records import TensorStats

NUMBER = re.compile(r"\.experts\.(\d+)\.")
LOW_IS_WORSE = ("sqnr_db", "mean_local_sqnr_db", "quant_scale_min", "update_to_weight", "codes_changed_fraction")
"""Of other statistics the largest value is the worst."""


class ExpertSpread(NamedTuple):
    """One statistic of a tensor over the experts of a layer."""

    mean: float
    worst: float
    worst_expert: int


def expert_of(tensor: str) -> Optional[int]:
    """The number of the expert in the name of a tensor; None if it is not of one expert."""
    found = NUMBER.search(tensor)
    return int(found[1]) if found else None


def expert_groups(tensors: Mapping[str, TensorStats]) -> dict[str, dict[int, TensorStats]]:
    """The tensors of experts, by their name without the expert and by the number of the expert."""
    groups: dict[str, dict[int, TensorStats]] = {}
    for name, stats in tensors.items():
        if (expert := expert_of(name)) is not None:
            groups.setdefault(name_of_all_experts(name), {})[expert] = stats
    return groups


def spread_of(experts: Mapping[int, TensorStats], field: str) -> Optional[ExpertSpread]:
    """A field of `TensorStats` over experts, without those that have no finite value; None if none has one."""
    values = {expert: float(value) for expert, stats in experts.items() if (value := getattr(stats, field)) is not None}
    finite = {expert: value for expert, value in values.items() if math.isfinite(value)}
    if not finite:
        return None
    worst = (min if field in LOW_IS_WORSE else max)(finite, key=lambda expert: finite[expert])
    return ExpertSpread(sum(finite.values()) / len(finite), finite[worst], worst)


def worst_of_experts(tensors: Mapping[str, TensorStats], field: str) -> dict[str, TensorStats]:
    """All tensors, but of the experts of a layer only the worst, under the name of all."""
    chosen = {name: stats for name, stats in tensors.items() if expert_of(name) is None}
    for name, experts in expert_groups(tensors).items():
        spread = spread_of(experts, field)
        chosen[name] = experts[min(experts) if spread is None else spread.worst_expert]
    return chosen


def exponent_counts(tensors: Mapping[str, TensorStats]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Codes by exponent of each tensor, and of all experts of a layer together."""
    for name, stats in tensors.items():
        if expert_of(name) is None:
            yield name, stats.exponent_counts
    for name, experts in expert_groups(tensors).items():
        counts = [stats.exponent_counts for stats in experts.values() if stats.exponent_counts]
        yield name, tuple(map(sum, zip(*counts, strict=True)))
