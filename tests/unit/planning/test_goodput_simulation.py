"""The goodput simulation against one that takes every period singly, and each kind of event alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from goodput_runs import small_inputs

from megafp8.planning import goodput_simulation
from megafp8.planning.goodput_inputs import GoodputInputs
from megafp8.planning.goodput_simulation import (
    DETECTION,
    LOST,
    MAINTENANCE,
    NODES,
    PARTS,
    RESTART,
    SAVES,
    STRAGGLERS,
    USEFUL,
    Outcome,
    Training,
    simulate,
)

EVERYTHING = small_inputs(
    num_gpus=64, num_nodes=8, days=20, stall_s=7, write_s=30, load_s=20, gpu_failures_per_s=1e-6,
    node_failures_per_s=2e-6, failures_per_burst=2, burst_gap_s=100, hang_fraction=0.3, hardware_fraction=0.5,
    detection_s=11, hang_detection_s=130, restart_s=60, spare_nodes=1, repair_s=5000, maintenance_interval_s=90_000,
    maintenance_s=3000, stragglers_per_s=2e-6, straggler_slowdown=1.5, straggler_s=4000,
)  # fmt: skip


def scripted(monkeypatch, *failures: goodput_simulation.Failure) -> None:
    """Let these failures strike, and no others."""

    def strike(inputs: GoodputInputs, seed: str) -> Iterator[goodput_simulation.Failure]:
        yield from failures
        while True:
            yield goodput_simulation.NEVER

    monkeypatch.setattr(goodput_simulation, "failures", strike)


def crash(time_s: float, is_hang: bool = False, is_hardware: bool = False) -> goodput_simulation.Failure:
    return time_s, is_hang, is_hardware


def run(inputs: GoodputInputs, duration_s: float) -> Outcome:
    return simulate(inputs, inputs.save_interval, duration_s, "1")


def complete_progress(period_s: float, stall_s: float, write_s: float, slowdown: float, at_s: float) -> float:
    """Progress in the last complete checkpoint at a time, one period after the other."""
    now_s, progress, complete = 0.0, 0.0, 0.0
    while True:
        now_s += period_s * slowdown
        if now_s > at_s:
            return complete
        progress += period_s
        written_s = now_s + write_s
        if written_s <= at_s:
            complete = progress
        now_s = max(now_s + stall_s, written_s - period_s * slowdown)


@pytest.mark.parametrize("slowdown", [1.0, 1.7])
@pytest.mark.parametrize(("stall_s", "write_s"), [(0, 0), (5, 5), (3, 20), (2, 250), (0, 130)])
def test_complete_checkpoints_are_those_of_single_periods(stall_s, write_s, slowdown) -> None:
    for at_s in (50.0, 99.9, 171.0, 173.5, 301.0, 999.0, 5003.7, 77_777.7):
        training = Training(100.0, stall_s, write_s)
        training.advance(0.0, at_s, slowdown)
        total_s = training.progress_s + training.stalled_s + training.slowed_s
        assert total_s == pytest.approx(at_s)
        training.fail(at_s)
        assert training.progress_s == pytest.approx(complete_progress(100.0, stall_s, write_s, slowdown, at_s))


def test_progress_does_not_depend_on_where_it_is_interrupted() -> None:
    whole, parts = Training(100.0, 3.0, 20.0), Training(100.0, 3.0, 20.0)
    whole.advance(0.0, 12_345.0, 1.0)
    for start in range(0, 12_345, 5):
        parts.advance(float(start), float(start + 5), 1.0)
    assert parts.progress_s == pytest.approx(whole.progress_s)
    assert parts.fail(12_345.0) == pytest.approx(whole.fail(12_345.0))


@pytest.mark.parametrize("seed", ["1", "2", "3"])
@pytest.mark.parametrize("fails_while_down", [True, False])
def test_the_parts_are_the_whole_duration(seed, fails_while_down) -> None:
    inputs = GoodputInputs(**vars(EVERYTHING) | {"fails_while_down": fails_while_down})
    outcome = simulate(inputs, 100, inputs.duration_s, seed)
    assert math.fsum(outcome.parts_s.values()) == pytest.approx(inputs.duration_s)
    assert all(outcome.parts_s[part] > 0 for part in PARTS)
    assert outcome == simulate(inputs, 100, inputs.duration_s, seed)
    assert outcome != simulate(inputs, 100, inputs.duration_s, f"{seed}, another")


def test_without_faults_only_saves_cost_time() -> None:
    outcome = run(small_inputs(stall_s=25, write_s=25), 125 * 40)
    assert outcome.effective_fraction == 0.8 and outcome.parts_s[SAVES] == 1000


def test_a_failure_loses_what_is_not_saved(monkeypatch) -> None:
    scripted(monkeypatch, crash(550.0))
    outcome = run(small_inputs(detection_s=10, restart_s=30, load_s=5), 1000)
    assert outcome.parts_s[LOST] == 50 and outcome.parts_s[DETECTION] == 10 and outcome.parts_s[RESTART] == 30
    assert outcome.parts_s[USEFUL] == 1000 - 50 - 45


def test_an_asynchronous_save_counts_when_it_is_complete(monkeypatch) -> None:
    for at_s, lost_s in ((529.0, 129.0), (531.0, 31.0)):  # the save that started at 500 takes 30 s
        scripted(monkeypatch, crash(at_s))
        assert run(small_inputs(write_s=30), 1000).parts_s[LOST] == lost_s


def test_a_hang_is_detected_later(monkeypatch) -> None:
    scripted(monkeypatch, crash(550.0, is_hang=True))
    assert run(small_inputs(detection_s=10, hang_detection_s=120), 1000).parts_s[DETECTION] == 120


@pytest.mark.parametrize(("fails_while_down", "restart_s", "num_failures"), [(True, 60, 2), (False, 80, 2)])
def test_a_failure_during_a_recovery(monkeypatch, fails_while_down, restart_s, num_failures) -> None:
    """It restarts the recovery; with --no-failures-while-down it strikes as much later as the run was down."""
    scripted(monkeypatch, crash(500.0), crash(520.0))
    outcome = run(small_inputs(restart_s=40, fails_while_down=fails_while_down), 1000)
    assert outcome.parts_s[RESTART] == restart_s and outcome.num_failures == num_failures
    assert outcome.parts_s[LOST] == (0 if fails_while_down else 20)


@pytest.mark.parametrize(
    ("spares", "second_s", "waited_s"), [(None, 530, 0), (2, 530, 0), (1, 530, 270), (0, 830, 600)]
)
def test_without_a_spare_node_the_run_waits(monkeypatch, spares, second_s, waited_s) -> None:
    """Two nodes fail; a repair takes 300 s."""
    scripted(monkeypatch, crash(500.0, is_hardware=True), crash(second_s, is_hardware=True))
    outcome = run(small_inputs(spare_nodes=spares, repair_s=300), 2000)
    assert outcome.parts_s[NODES] == waited_s


def test_a_software_failure_does_not_shorten_the_wait_for_a_node(monkeypatch) -> None:
    scripted(monkeypatch, crash(500.0, is_hardware=True), crash(600.0))
    outcome = run(small_inputs(spare_nodes=0, repair_s=300, detection_s=10), 2000)
    assert outcome.parts_s[NODES] == 90 + 190 and outcome.parts_s[DETECTION] == 20


def test_a_planned_interruption_loses_nothing() -> None:
    inputs = small_inputs(maintenance_interval_s=1000, maintenance_s=100, restart_s=20, write_s=3, stall_s=1)
    outcome = run(inputs, 10_000)
    assert outcome.num_planned == 10 and outcome.parts_s[LOST] == 0
    assert outcome.parts_s[MAINTENANCE] == pytest.approx(1000) and outcome.parts_s[RESTART] == pytest.approx(200)


def test_maintenance_that_is_due_while_the_run_is_down_is_done_then(monkeypatch) -> None:
    inputs = small_inputs(maintenance_interval_s=1000, maintenance_s=100, restart_s=3500)
    start_s = next(goodput_simulation.planned_interruptions(inputs, "1"))
    scripted(monkeypatch, crash(start_s - 10))  # the run is down at four planned times
    outcome = run(inputs, start_s + 4500)
    assert outcome.num_planned == 1 and outcome.parts_s[MAINTENANCE] == 100
    assert math.fsum(outcome.parts_s.values()) == pytest.approx(start_s + 4500)


def test_a_failure_during_maintenance_waits_for_its_end(monkeypatch) -> None:
    inputs = small_inputs(maintenance_interval_s=1000, maintenance_s=500, restart_s=20, detection_s=10)
    start_s = next(goodput_simulation.planned_interruptions(inputs, "1"))
    scripted(monkeypatch, crash(start_s + 100))
    outcome = run(inputs, start_s + 900)
    assert outcome.parts_s[MAINTENANCE] == pytest.approx(490) and outcome.parts_s[DETECTION] == 10
    assert outcome.parts_s[RESTART] == 20


def test_stragglers_slow_steps() -> None:
    always = small_inputs(num_nodes=10, stragglers_per_s=1e-3, straggler_slowdown=2, straggler_s=1e6)
    outcome = run(always, 1e6)
    assert outcome.effective_fraction == pytest.approx(0.5, abs=1e-3)
    assert outcome.parts_s[STRAGGLERS] == pytest.approx(outcome.parts_s[USEFUL], rel=1e-2)
    rare = small_inputs(stragglers_per_s=1e-4, straggler_slowdown=2, straggler_s=1000)
    # One node is slow for a share 1 - exp(-rate x duration) of the time.
    assert run(rare, 1e8).effective_fraction == pytest.approx(1 - 0.5 * (1 - math.exp(-0.1)), abs=2e-3)


@pytest.mark.parametrize("failures_per_burst", [1, 4])
def test_bursts_change_the_spread_and_not_the_rate(failures_per_burst) -> None:
    inputs = small_inputs(gpu_failures_per_s=0.01, failures_per_burst=failures_per_burst, burst_gap_s=20)
    times = goodput_simulation.failure_times(inputs, "1")
    windows, window_s, previous = [0] * 2000, 1000.0, 0.0
    for time_s in times:
        assert time_s >= previous
        previous = time_s
        if time_s >= len(windows) * window_s:
            break
        windows[int(time_s / window_s)] += 1
    mean = sum(windows) / len(windows)
    variance = sum((count - mean) ** 2 for count in windows) / len(windows)
    assert mean == pytest.approx(10, rel=0.05)
    # Of a Poisson process the two are equal. Bursts of geometric size n: up to E[n^2] / E[n] = 2 x 4 - 1.
    assert variance / mean == pytest.approx(1, abs=0.1) if failures_per_burst == 1 else 5 < variance / mean < 7.7
