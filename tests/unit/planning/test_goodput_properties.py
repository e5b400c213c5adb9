"""Properties of the goodput simulation: each cost lowers the result through its own part, and ranges cover what they
say."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from typing import Any

import pytest
from goodput_runs import small_inputs

from megafp8.planning.goodput import prediction_interval, study_goodput
from megafp8.planning.goodput_inputs import DAY_S, GoodputInputs
from megafp8.planning.goodput_simulation import (
    DETECTION,
    LOADING,
    LOST,
    MAINTENANCE,
    NODES,
    PARTS,
    RESTART,
    SAVES,
    STRAGGLERS,
    Outcome,
    simulate,
)

SEEDS = 6


def random_inputs(seed: int) -> GoodputInputs:
    """A cluster with all kinds of trouble: a failure each 1.4 to 2.7 hours, two spare nodes."""
    draw = random.Random(seed)
    write_s = draw.uniform(10, 40)
    return small_inputs(
        num_gpus=512, num_nodes=64, days=25, save_interval=draw.randint(400, 1200), stall_s=write_s * draw.random(),
        write_s=write_s, load_s=draw.uniform(5, 40), gpu_failures_per_s=draw.uniform(1e-7, 2e-7),
        node_failures_per_s=draw.uniform(8e-7, 1.6e-6), hang_fraction=0.2, hardware_fraction=0.6,
        detection_s=draw.uniform(10, 60), hang_detection_s=draw.uniform(120, 300), restart_s=draw.uniform(60, 200),
        spare_nodes=2, repair_s=draw.uniform(3000, 6000), maintenance_interval_s=draw.uniform(0.8, 2) * DAY_S,
        maintenance_s=draw.uniform(600, 1800), stragglers_per_s=draw.uniform(2e-7, 6e-7),
        straggler_slowdown=draw.uniform(1.2, 2), straggler_s=draw.uniform(1000, 6000),
    )  # fmt: skip


def outcomes(inputs: GoodputInputs) -> list[Outcome]:
    return [simulate(inputs, inputs.save_interval, inputs.duration_s, str(seed)) for seed in range(SEEDS)]


def effective(found: list[Outcome]) -> float:
    return statistics.fmean(each.effective_fraction for each in found)


def seconds(found: list[Outcome], part: str) -> float:
    return statistics.fmean(each.parts_s[part] for each in found)


WORSE: dict[str, tuple[dict[str, float], str]] = {
    "failures of GPUs": ({"gpu_failures_per_s": 3}, DETECTION),
    "failures of nodes": ({"node_failures_per_s": 3}, DETECTION),
    "detection": ({"detection_s": 5}, DETECTION),
    "detection of hangs": ({"hang_detection_s": 5}, DETECTION),
    "share of hangs": ({"hang_fraction": 4}, DETECTION),
    "restart": ({"restart_s": 3}, RESTART),
    "load": ({"load_s": 10}, LOADING),
    "slower saves": ({"stall_s": 4, "write_s": 4}, SAVES),
    "stall of a save": ({"stall_s": 0, "write_s": 1}, SAVES),  # 0: it becomes as long as the save
    "repair": ({"repair_s": 6}, NODES),
    "share of replaced nodes": ({"hardware_fraction": 1.6}, NODES),
    "frequent maintenance": ({"maintenance_interval_s": 1 / 4}, MAINTENANCE),
    "long maintenance": ({"maintenance_s": 4}, MAINTENANCE),
    "stragglers": ({"stragglers_per_s": 4}, STRAGGLERS),
    "slower stragglers": ({"straggler_slowdown": 2}, STRAGGLERS),
    "long stragglers": ({"straggler_s": 4}, STRAGGLERS),
}
"""Factors of inputs, and the part of the time that they increase."""


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("cost", WORSE)
def test_a_higher_cost_lowers_the_effective_time_through_its_part(cost: str, seed: int) -> None:
    inputs, (factors, part) = random_inputs(seed), WORSE[cost]
    changes: dict[str, Any] = {name: getattr(inputs, name) * factor for name, factor in factors.items()}
    if factors.get("stall_s") == 0:
        changes["stall_s"] = inputs.write_s
    before, after = outcomes(inputs), outcomes(dataclasses.replace(inputs, **changes))
    assert effective(after) < effective(before) - 1e-3
    assert seconds(after, part) > 1.2 * seconds(before, part)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_without_any_cost_a_run_is_effective_all_the_time(seed: int) -> None:
    """Each cost removed in turn never lowers the effective time, and nothing is left at the end."""
    inputs, before = random_inputs(seed), effective(outcomes(random_inputs(seed)))
    for changes in (
        {"stragglers_per_s": 0.0}, {"maintenance_interval_s": None}, {"spare_nodes": None}, {"restart_s": 0.0},
        {"load_s": 0.0}, {"detection_s": 0.0, "hang_detection_s": 0.0}, {"stall_s": 0.0, "write_s": 0.0},
        {"gpu_failures_per_s": 0.0, "node_failures_per_s": 0.0},
    ):  # fmt: skip
        inputs = dataclasses.replace(inputs, **changes)
        after = effective(outcomes(inputs))
        assert after > before
        before = after
    assert before == 1


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fewer_spare_nodes_mean_longer_waits(seed: int) -> None:
    inputs = random_inputs(seed)
    found = [outcomes(dataclasses.replace(inputs, spare_nodes=count)) for count in (0, 1, 2, 3, 60)]
    waits = [seconds(each, NODES) for each in found]
    assert waits == sorted(waits, reverse=True) and waits[0] > 2 * waits[1] and waits[-1] == 0
    assert [effective(each) for each in found] == sorted(effective(each) for each in found)
    assert effective(found[-1]) == effective(outcomes(dataclasses.replace(inputs, spare_nodes=None)))


@pytest.mark.parametrize("repair_s", [100.0, 1000.0, 4000.0])
def test_without_a_spare_node_each_failure_costs_a_repair(repair_s: float) -> None:
    """Failures only while the run trains, and saves that are free: 1 / (1 + rate x repair)."""
    inputs = small_inputs(
        gpu_failures_per_s=1e-3, hardware_fraction=1.0, spare_nodes=0, repair_s=repair_s, save_interval=1,
        step_s=0.01, fails_while_down=False,
    )  # fmt: skip
    found = simulate(inputs, 1, 3e7, "1")
    assert found.effective_fraction == pytest.approx(1 / (1 + 1e-3 * repair_s), rel=0.02)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_bursts_lose_less_at_the_same_rate_and_make_runs_differ_more(seed: int) -> None:
    """The failures of a burst strike while the run recovers from its first one, when there is nothing to lose."""
    inputs = dataclasses.replace(random_inputs(seed), spare_nodes=None)
    single = [simulate(inputs, inputs.save_interval, inputs.duration_s, str(run)) for run in range(40)]
    bursts = dataclasses.replace(inputs, failures_per_burst=5, burst_gap_s=20.0)
    burst = [simulate(bursts, inputs.save_interval, inputs.duration_s, str(run)) for run in range(40)]
    counts = [[each.num_failures for each in group] for group in (single, burst)]
    # Their numbers have variances near the mean and at most 9 times that.
    error = math.sqrt(10 * statistics.fmean(counts[0]) / 40)
    assert statistics.fmean(counts[1]) == pytest.approx(statistics.fmean(counts[0]), abs=4 * error)
    assert statistics.pstdev(counts[1]) > 1.5 * statistics.pstdev(counts[0])
    assert seconds(burst, LOST) < 0.5 * seconds(single, LOST)
    assert effective(burst) > effective(single)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_asynchronous_saves_stall_less_and_lose_more(seed: int) -> None:
    """At the same interval; a checkpoint is complete later in terms of steps that follow it."""
    inputs = dataclasses.replace(random_inputs(seed), stragglers_per_s=0.0, maintenance_interval_s=None)
    synchronous = outcomes(dataclasses.replace(inputs, stall_s=inputs.write_s))
    asynchronous = outcomes(dataclasses.replace(inputs, stall_s=0.0))
    assert effective(asynchronous) > effective(synchronous)
    assert seconds(asynchronous, SAVES) == 0 < seconds(synchronous, SAVES)
    assert seconds(asynchronous, LOST) > seconds(synchronous, LOST)


@pytest.mark.parametrize("failures_per_burst", [1, 4])
def test_ranges_and_errors_cover_what_they_say(failures_per_burst: int) -> None:
    """99 runs, as by default: the range of one more run, and the mean within two standard errors."""
    inputs = small_inputs(
        gpu_failures_per_s=6 / DAY_S, failures_per_burst=failures_per_burst, restart_s=900, detection_s=30,
        save_interval=600,
    )  # fmt: skip
    trials, runs = 100, 100
    groups = [
        [simulate(inputs, 600, inputs.duration_s, f"{trial}/{run}").effective_fraction for run in range(runs)]
        for trial in range(trials)
    ]
    mean = statistics.fmean(value for group in groups for value in group)
    in_range = in_error = 0
    for group in groups:
        interval, last = prediction_interval(group[:-1]), group[-1]
        assert interval.coverage == 0.9
        in_range += interval.low <= last <= interval.high
        error = statistics.stdev(group[:-1]) / math.sqrt(runs - 1)
        in_error += abs(statistics.fmean(group[:-1]) - mean) <= 1.96 * error
    # 4 standard errors of binomial shares of 0.9 and 0.95.
    assert in_range / trials == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / trials))
    assert in_error / trials == pytest.approx(0.95, abs=4 * math.sqrt(0.0475 / trials))


@pytest.mark.parametrize("seed", range(8))
def test_extreme_inputs_give_a_result(seed: int) -> None:
    """Any values within their ranges: parts add up, and nothing is negative or without end."""
    draw = random.Random(seed)
    inputs = small_inputs(
        num_gpus=draw.choice([1, 100_000]), num_nodes=draw.choice([1, 12_500]), days=draw.choice([0.01, 30.0]),
        step_s=draw.choice([1e-4, 864.0]), save_interval=draw.choice([1, 10**9, None]),
        stall_s=draw.choice([0.0, 1e6]), write_s=1e6, load_s=draw.choice([0.0, 1e6]),
        gpu_failures_per_s=draw.choice([0.0, 1e-9]), node_failures_per_s=draw.choice([0.0, 1e-7]),
        failures_per_burst=draw.choice([1, 1000]), burst_gap_s=draw.choice([0.001, 1e7]),
        hang_fraction=draw.choice([0.0, 1.0]), hardware_fraction=1.0, spare_nodes=draw.choice([0, 1]),
        repair_s=draw.choice([0.0, 3.6e8]), maintenance_interval_s=draw.choice([None, 86.4, 8.64e9]),
        stragglers_per_s=draw.choice([0.0, 1e-9]), straggler_slowdown=1000.0, straggler_s=0.4, replicas=19,
    )  # fmt: skip
    goodput = study_goodput(inputs)
    assert math.fsum(goodput.parts.values()) == pytest.approx(1) and set(goodput.parts) == set(PARTS)
    assert all(share >= 0 for share in goodput.parts.values())
    assert 0 <= goodput.interval.low <= goodput.interval.high <= 1
