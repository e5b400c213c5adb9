from __future__ import annotations

import pytest

from megafp8.metrics.timers import CHECKPOINTS, ROLLBACK, VALIDATION, StepTimer


class Stage:
    """A clock that tests set."""

    now = 0.0

    def clock(self) -> float:
        return self.now


def test_step_and_part_times() -> None:
    stage = Stage()
    timer = StepTimer(clock=stage.clock)
    for _ in range(2):
        with timer.span("forward"):
            stage.now += 0.25
    with timer.span("optimizer"):
        stage.now += 0.125
    stage.now += 0.5
    assert timer.end_step() == (1125.0, {"forward": 500.0, "optimizer": 125.0}, {})


def test_a_step_begins_where_the_last_one_ended() -> None:
    stage = Stage()
    timer = StepTimer(clock=stage.clock)
    stage.now += 2
    timer.start()
    with timer.span("forward"):
        stage.now += 1
    assert timer.end_step().step_ms == 1000.0
    stage.now += 0.5
    assert timer.end_step() == (500.0, {}, {})


def test_a_step_that_ends_within_a_span() -> None:
    """The rest of the span is part of the next step."""
    stage = Stage()
    timer = StepTimer(clock=stage.clock)
    with timer.span("records"):
        stage.now += 1
        assert timer.end_step() == (1000.0, {"records": 1000.0}, {})
        stage.now += 2
    assert timer.end_step() == (2000.0, {"records": 2000.0}, {})


def test_an_inner_span_is_not_part_of_the_outer_one() -> None:
    stage = Stage()
    timer = StepTimer(clock=stage.clock)
    with timer.span("forward"):
        stage.now += 1
        with timer.span("records"):
            stage.now += 2
            with timer.span(None):
                stage.now += 16
        stage.now += 4
    assert timer.end_step() == (23_000.0, {"forward": 5000.0, "records": 2000.0}, {})


def test_what_is_between_steps_is_part_of_none() -> None:
    stage = Stage()
    timer = StepTimer(clock=stage.clock)
    stage.now += 1
    for name in (VALIDATION, CHECKPOINTS, VALIDATION):
        with timer.span(name):
            stage.now += 2
    assert timer.end_step() == (1000.0, {}, {VALIDATION: 4000.0, CHECKPOINTS: 2000.0})


def test_a_step_that_is_repeated_is_set_aside() -> None:
    stage = Stage()
    timer = StepTimer(clock=stage.clock)
    with timer.span(VALIDATION):
        stage.now += 1
    with timer.span("forward"):
        stage.now += 2
    stage.now += 4
    timer.set_aside(ROLLBACK)
    stage.now += 8
    assert timer.end_step() == (8000.0, {}, {VALIDATION: 1000.0, ROLLBACK: 6000.0})


def test_a_failing_part_is_timed_and_raises() -> None:
    stage = Stage()
    timer = StepTimer(clock=stage.clock)
    with pytest.raises(KeyError), timer.span("forward"):
        stage.now += 1.0
        raise KeyError("x")
    assert timer.end_step().spans_ms == {"forward": 1000.0}
