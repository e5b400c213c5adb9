"""Statistics over the experts of a layer: mean and worst expert, in scalars and histograms of the trackers."""

from __future__ import annotations

import math

import pytest

from megafp8.metrics.expert_statistics import exponent_counts, spread_of, worst_of_experts
from megafp8.metrics.records import QuantizationRecord, TensorStats
from megafp8.metrics.sinks.trackers import scalars

NAME = "layers.3.experts.linear_fc1.input"
DENSE = "layers.0.linear_fc1.input"
SHARED = "layers.3.shared_experts.linear_fc1.input"


def stats(sqnr_db: float, underflow: float) -> TensorStats:
    return TensorStats(
        format="e4m3", num_values=8, num_non_finite=0, amax=2.0, sqnr_db=sqnr_db, underflow_fraction=underflow,
        exponent_counts=(1, 2),
    )  # fmt: skip


TENSORS = {
    "layers.3.experts.4.linear_fc1.input": stats(30.0, 0.0),
    "layers.3.experts.17.linear_fc1.input": stats(12.0, 0.5),
    "layers.3.experts.18.linear_fc1.input": stats(math.inf, 0.1),
    DENSE: stats(31.0, 0.2),
    SHARED: stats(29.0, 0.3),
}


def test_the_worst_expert_has_the_lowest_accuracy_or_the_largest_loss() -> None:
    experts = {4: stats(30.0, 0.0), 17: stats(12.0, 0.5), 18: stats(math.inf, 0.1)}
    assert spread_of(experts, "sqnr_db") == (21.0, 12.0, 17)
    assert spread_of(experts, "underflow_fraction") == (pytest.approx(0.2), 0.5, 17)
    assert spread_of(experts, "staleness_octaves") is None, "not measured"


def test_the_worst_expert_stands_for_all() -> None:
    chosen = worst_of_experts(TENSORS, "sqnr_db")
    assert chosen == {NAME: stats(12.0, 0.5), DENSE: stats(31.0, 0.2), SHARED: stats(29.0, 0.3)}


def test_trackers_get_mean_and_worst_expert_instead_of_every_expert() -> None:
    found = scalars(QuantizationRecord(step=1, recipe="tensorwise", tensors=TENSORS))
    assert found[f"fp8/sqnr_db/{NAME}"] == 21.0
    assert found[f"fp8/worst/sqnr_db/{NAME}"] == 12.0
    assert found[f"fp8/worst-expert/sqnr_db/{NAME}"] == 17
    assert found[f"fp8/sqnr_db/{DENSE}"] == 31.0 and found[f"fp8/sqnr_db/{SHARED}"] == 29.0
    assert not any(".experts.17." in name or f"worst/sqnr_db/{DENSE}" in name for name in found)


def test_codes_of_experts_are_added() -> None:
    assert dict(exponent_counts(TENSORS)) == {NAME: (3, 6), DENSE: (1, 2), SHARED: (1, 2)}
