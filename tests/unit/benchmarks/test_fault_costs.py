"""Verdicts on planted faults: detection, harm and repair, seed by seed."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.fault_costs import (
    EVENTS,
    HEADER,
    REPAIR_EVENTS,
    FaultCost,
    FaultRow,
    detection_verdict,
    fault_cost,
    fault_rows,
    repair_verdict,
    row_cells,
)
from megafp8.metrics.records import EventRecord

FAULT_STEP, CLEAN = 11, [4.0] * 100
HARMED = CLEAN[:80] + [5.0] * 20
EVENT = {"": "guard", "bf16-layer": "layer moved", "skip": "step skipped", "bf16": "linear moved"}
ARMS: dict[str, tuple[list[float], list[int]]] = {
    "clean": (CLEAN, []),
    "outlier-channel": (HARMED, [21]),
    "outlier-channel_with_bf16-layer": (CLEAN[:60] + [4.16] * 10 + CLEAN[70:], [21]),
    "aligned-swiglu": (CLEAN[:50] + [5.0] * 50, [21]),
    "inflated-qk": (CLEAN, []),
    "spike-batch": (HARMED, []),
    "spike-batch_with_skip": (CLEAN, [11]),
    "infinite-activation": (CLEAN, [11]),
    "infinite-activation_with_skip": ([*CLEAN[:80], *[4.1] * 20], [12]),
    "infinite-activation_with_bf16": (CLEAN, [11]),
}
VERDICTS = {
    "clean": "no alarm", "outlier-channel": "in time", "outlier-channel_with_bf16-layer": "in time, repaired",
    "aligned-swiglu": "late", "inflated-qk": "missed", "spike-batch": "not watched",
    "spike-batch_with_skip": "in time, repaired", "infinite-activation": "in time",
    "infinite-activation_with_skip": "late, not repaired", "infinite-activation_with_bf16": "in time, no harm",
}  # fmt: skip


def rows_of(num_seeds: int) -> dict[str, FaultRow]:
    """The rows of runs whose fault is in step 11 and whose losses are 5% worse from step 81 on, by arm."""
    losses, events = {}, {}
    for arm, (own, steps) in ARMS.items():
        for seed in range(1, num_seeds + 1):
            name = EVENT[arm.partition("_with_")[2]]
            found = [EventRecord(step=step, name=name, detail=f"event of {arm}") for step in steps]
            saved = EventRecord(step=50, name="checkpoint saved", detail="no event of a fault")
            losses["fp8", arm, f"seed{seed}"], events["fp8", arm, f"seed{seed}"] = own, [*found, saved]
    rows = fault_rows(losses, events, FAULT_STEP)
    return {f"{row.fault}_with_{row.repair}" if row.repair else row.fault: row for row in rows}


def test_faults_are_compared_with_the_clean_run() -> None:
    found = rows_of(num_seeds=1)
    assert {arm: row.verdict for arm, row in found.items()} == VERDICTS
    first = found["outlier-channel"].costs[0]
    assert (first.noticed, first.worse, first.recovered) == (10, 71, None)
    assert first.lost_fraction == pytest.approx(0.25) and first.event == "guard: event of outlier-channel"
    repaired = found["outlier-channel_with_bf16-layer"].costs[0]
    assert (repaired.repaired, repaired.recovered) == (10, 67)  # the mean of 10 is within 1% again


def test_intervals_are_over_seeds() -> None:
    column, found = HEADER.index("95% interval"), rows_of(num_seeds=2)
    cells = {arm: row_cells(found[arm])[column] for arm in ("outlier-channel", "clean")}
    assert cells == {"outlier-channel": "+25.00% to +25.00%", "clean": "-"}


def cost(**fields) -> FaultCost:
    empty = {"noticed": 0, "repaired": 0, "worse": None, "recovered": 0, "lost_fraction": 0.0, "event": "guard: x"}
    return FaultCost(**(empty | fields))


HARM, NO_HARM = cost(worse=20, lost_fraction=0.2), cost(lost_fraction=0.009)


@pytest.mark.parametrize(
    ("repaired", "unrepaired", "verdict"),
    [
        ([cost(), cost()], [HARM, HARM], "repaired"),
        ([cost(), cost()], [HARM, NO_HARM], "repaired"),
        ([cost(lost_fraction=0.049), cost(lost_fraction=-0.05)], [HARM, HARM], "not repaired"),  # no mean of seeds
        ([cost(), cost(repaired=None)], [HARM, HARM], "not repaired"),  # the event is missing
        ([cost(), cost()], [NO_HARM, NO_HARM], "no harm"),
        ([cost(lost_fraction=0.02), cost()], [NO_HARM, NO_HARM], "not repaired"),  # the repair did the harm
        ([cost(), cost(lost_fraction=math.nan)], [HARM, HARM], "not repaired"),
        ([cost(), cost()], [], "not decided"),
    ],
)  # fmt: skip
def test_a_repair_is_judged_by_seed_with_its_event_and_where_there_was_harm(repaired, unrepaired, verdict) -> None:
    assert repair_verdict(dict(enumerate(repaired)), dict(enumerate(unrepaired))) == verdict


@pytest.mark.parametrize(
    ("fault", "noticed", "verdict"),
    [
        ("spike-batch", 0, "in time"), ("spike-batch", None, "missed"), ("spike-batch", 40, "late"),
        ("infinite-activation", 1, "late"), ("outlier-channel", 40, "in time"),
    ],
)  # fmt: skip
def test_a_sudden_fault_is_noticed_in_its_own_step(fault: str, noticed: int | None, verdict: str) -> None:
    found = [cost(), cost(noticed=noticed)]
    assert detection_verdict(fault, "skip", found) == verdict


def test_every_repair_has_an_event_that_counts_as_noticed() -> None:
    assert set(REPAIR_EVENTS.values()) <= set(EVENTS)
    moved = EventRecord(step=FAULT_STEP, name="linear moved", detail="linear_fc2")
    found = fault_cost(CLEAN, CLEAN, [moved], FAULT_STEP, "infinite-activation", "bf16")
    assert (found.noticed, found.repaired) == (0, 0)
    skipped = EventRecord(step=FAULT_STEP, name="step skipped", detail="not finite")
    assert fault_cost(CLEAN, CLEAN, [skipped], FAULT_STEP, "infinite-activation", "bf16").repaired is None


def test_a_repair_that_was_never_made_is_not_repaired() -> None:
    """A step that was skipped for its loss, where linears should have moved."""
    events = [EventRecord(step=FAULT_STEP, name="step skipped", detail="loss or gradients are not finite")]
    arms = {"clean": CLEAN, "infinite-activation": CLEAN[:10], "infinite-activation_with_bf16": CLEAN}
    losses = {("fp8", arm, "seed1"): own for arm, own in arms.items()}
    rows = fault_rows(losses, {key: [] if key[1] == "clean" else events for key in losses}, FAULT_STEP)
    assert [row.verdict for row in rows] == ["no alarm", "in time", "in time, not repaired"]


def test_the_step_of_a_sudden_fault_is_no_harm() -> None:
    losses = CLEAN[:10] + [math.nan] + CLEAN[11:]
    assert not fault_cost(losses, CLEAN, [], FAULT_STEP, "spike-batch").is_harmed
    assert fault_cost(losses, CLEAN, [], FAULT_STEP, "outlier-channel").is_harmed


def test_losses_that_are_not_finite_are_worse() -> None:
    found = fault_cost([4.0] * 20 + [math.nan] * 10, [4.0] * 30, [], 11, "outlier-channel", "bf16-layer")
    assert (found.noticed, found.worse, found.recovered) == (None, 10, None) and found.is_harmed


def test_a_run_that_stopped_lost_everything() -> None:
    event = EventRecord(step=15, name="guard", detail="grew")
    losses = {("delayed", "clean", "seed1"): [4.0] * 30, ("delayed", "inflated-qk", "seed1"): [4.0] * 18}
    _, row = fault_rows(losses, {key: [event] if key[1] != "clean" else [] for key in losses}, 11)
    (found,) = row.costs
    assert (found.noticed, found.worse, found.recovered, found.lost_fraction) == (4, 8, None, math.inf)
    assert row.verdict == "late" and row.lost is None and "stopped" in row_cells(row)
