"""Verdicts on planted faults in a stability suite: detection, harm and repair, seed by seed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megafp8.analysis.plot_faults import plot_faults, trailing_mean
from megafp8.analysis.stability import build_report
from megafp8.analysis.stability_faults import (
    EVENTS,
    HEADER,
    REPAIR_EVENTS,
    FaultCost,
    detection_verdict,
    fault_cost,
    fault_rows,
    repair_verdict,
    row_cells,
)
from megafp8.analysis.stability_page import publish_suite, to_text, verdict_class
from megafp8.analysis.stability_runs import SUITE_FILE
from megafp8.metrics.records import EventRecord
from megafp8.metrics.sinks import JsonlSink

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


def write_faults(folder: Path, write_run: Callable[..., Path], num_seeds: int = 1) -> None:
    """A suite whose fault is in step 11 and whose losses are 5% worse from step 81 on."""
    runs = []
    for arm, (losses, steps) in ARMS.items():
        for seed in range(1, num_seeds + 1):
            name = f"{arm}-seed{seed}"
            sink = JsonlSink(write_run(name, losses, validations={100: losses[-1]}, recipe="fp8") / "records.jsonl")
            for step in steps:
                sink.write(EventRecord(step=step, name=EVENT[arm.partition("_with_")[2]], detail=f"event of {arm}"))
            sink.write(EventRecord(step=50, name="checkpoint saved", detail="no event of a fault"))
            sink.close()
            runs.append({"part": "faults", "folder": name, "recipe": "fp8", "seed": f"seed{seed}", "fault": arm})
    content = {"size": "tiny", "seeds": 5, "fault_step": FAULT_STEP, "runs": runs}
    (folder / SUITE_FILE).write_text(json.dumps(content))


def test_faults_are_compared_with_the_clean_run(tmp_path: Path, write_run: Callable[..., Path]) -> None:
    write_faults(tmp_path, write_run)
    report = build_report(tmp_path)
    found = {f"{row.fault}_with_{row.repair}" if row.repair else row.fault: row for row in report.faults}
    assert {arm: row.verdict for arm, row in found.items()} == VERDICTS
    first = found["outlier-channel"].costs[0]
    assert (first.noticed, first.worse, first.recovered) == (10, 71, None)
    assert first.lost_fraction == pytest.approx(0.25) and first.event == "guard: event of outlier-channel"
    repaired = found["outlier-channel_with_bf16-layer"].costs[0]
    assert (repaired.repaired, repaired.recovered) == (10, 67)  # the mean of 10 is within 1% again


def test_the_page_has_a_picture_and_intervals_over_seeds(tmp_path: Path, write_run: Callable[..., Path]) -> None:
    write_faults(tmp_path, write_run, num_seeds=2)
    report, (page, _) = publish_suite(tmp_path)
    text = page.read_text()
    assert text.count("<svg") == 2 and "Loss with planted faults, fp8" in text
    assert "5 of 8 rows of planted faults with a verdict are as they should be; in 1 more" in to_text(report)
    column = HEADER.index("95% interval")
    cells = {row.fault: row_cells(row) for row in report.faults if not row.repair}
    assert cells["outlier-channel"][column] == "+25.00% to +25.00%" and cells["clean"][column] == "-"
    figure = plot_faults(report.of_part("faults"), "fp8", FAULT_STEP)
    assert figure is not None
    assert [len(axes.get_title("left")) > 0 for axes in figure.axes] == [True] * 5 + [False]
    _, labels = figure.axes[0].get_legend_handles_labels()
    assert set(labels) == {"clean", "no repair", "bf16-layer", "skip", "bf16"}
    assert plot_faults(report.of_part("faults"), "other", FAULT_STEP) is None


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


def test_the_worse_of_two_verdicts_gives_the_style() -> None:
    assert verdict_class("in time, repaired") == "within" == verdict_class("in time")
    assert verdict_class("late, repaired") == "beyond" == verdict_class("in time, not repaired")
    assert verdict_class("in time, no harm") == "not-decided" == verdict_class("not watched")


def test_trailing_means_skip_losses_that_are_not_finite() -> None:
    found = trailing_mean(np.array([math.nan, 2.0, 4.0, math.inf] + [3.0] * 20))
    assert math.isnan(found[0]) and found[1:4].tolist() == [2.0, 3.0, 3.0] and found[-1] == 3.0
