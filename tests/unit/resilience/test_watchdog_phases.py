"""Time limits of phases."""

from __future__ import annotations

import pytest

from megafp8.resilience.watchdog import (
    AUTO_FACTOR,
    AUTO_MIN_S,
    EVALUATION,
    FIRST_FACTOR,
    FIRST_LIMIT_S,
    NUM_RECENT,
    START,
    STEP,
    PhaseClock,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(phases: PhaseClock, clock: Clock, name: str, seconds: float) -> None:
    phases.enter(name, 1)
    clock.now += seconds
    phases.enter("between", 1)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_startup_has_no_time_limit_and_each_phase_has_its_own(clock: Clock) -> None:
    phases = PhaseClock(10.0, 600.0, clock)
    clock.now += 1e6
    assert phases.current.name == START and phases.left_s() is None
    phases.enter("save", 7)
    clock.now += 601
    assert phases.left_s() == -1
    assert str(phases) == "save at step 7, for 601.0 s"


def test_a_given_limit_applies_after_the_first_of_a_phase(clock: Clock) -> None:
    phases = PhaseClock(10.0, 600.0, clock)
    phases.enter(STEP, 1)
    assert phases.left_s() == 10.0 * FIRST_FACTOR
    phases.enter(STEP, 2)
    clock.now += 4
    assert phases.left_s() == 6.0
    phases.enter(EVALUATION, 2)
    assert phases.left_s() == 10.0 * FIRST_FACTOR, "an evaluation has its own first batch"


def test_the_default_limit_follows_the_slowest_recent_phase(clock: Clock) -> None:
    phases = PhaseClock(None, 600.0, clock)
    assert phases.limit_s(STEP) == FIRST_LIMIT_S
    run(phases, clock, STEP, 1.0)
    assert phases.limit_s(STEP) == AUTO_MIN_S
    run(phases, clock, STEP, 100.0)
    assert phases.limit_s(STEP) == AUTO_FACTOR * 100.0
    for _ in range(NUM_RECENT):
        run(phases, clock, STEP, 50.0)
    assert phases.limit_s(STEP) == AUTO_FACTOR * 50.0
    assert phases.limit_s(EVALUATION) == FIRST_LIMIT_S


def test_the_default_limit_grows_with_the_batch(clock: Clock) -> None:
    phases = PhaseClock(None, 600.0, clock)
    run(phases, clock, STEP, 100.0)
    phases.expect_longer_steps(8.0)
    assert phases.limit_s(STEP) == AUTO_FACTOR * 800.0
    for _ in range(NUM_RECENT):
        run(phases, clock, STEP, 50.0)
    assert phases.limit_s(STEP) == AUTO_FACTOR * 50.0


def test_zero_means_no_limit(clock: Clock) -> None:
    phases = PhaseClock(0.0, 0.0, clock)
    for name in (STEP, EVALUATION, "save"):
        run(phases, clock, name, 1.0)
        assert phases.limit_s(name) is None


def test_time_in_which_the_process_was_stopped_does_not_count(clock: Clock) -> None:
    phases = PhaseClock(10.0, 600.0, clock)
    run(phases, clock, STEP, 1.0)
    phases.enter(STEP, 2)
    clock.now += 3600
    assert phases.left_s() < 0
    phases.exclude(3595)
    assert phases.left_s() == 5
    phases.enter(STEP, 3)
    assert phases.left_s() == 10, "the next one starts afresh"
