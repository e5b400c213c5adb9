import pytest

from megafp8.metrics.timers import StepTimer


class Stage:
    """A clock that tests set."""

    now = 0.0

    def clock(self) -> float:
        return self.now


def test_step_and_part_times() -> None:
    stage = Stage()
    timer = StepTimer(clock=stage.clock)
    timer.start()
    for _ in range(2):
        with timer.span("forward"):
            stage.now += 0.25
    with timer.span("optimizer"):
        stage.now += 0.125
    stage.now += 0.5
    assert timer.stop() == 1125.0
    assert timer.spans_ms == {"forward": 500.0, "optimizer": 125.0}


def test_each_step_starts_from_zero() -> None:
    stage = Stage()
    timer = StepTimer(clock=stage.clock)
    timer.start()
    with timer.span("forward"):
        stage.now += 1
    timer.stop()
    timer.start()
    stage.now += 0.5
    assert timer.stop() == 500.0
    assert timer.spans_ms == {}


def test_a_failing_part_is_timed_and_raises() -> None:
    stage = Stage()
    timer = StepTimer(clock=stage.clock)
    timer.start()
    with pytest.raises(KeyError), timer.span("forward"):
        stage.now += 1.0
        raise KeyError("x")
    assert timer.spans_ms == {"forward": 1000.0}
