import pytest

from megafp8.metrics.timers import StepTimer


class Stage:
    """A clock and a device: the first wait for the device after work was queued takes `lag` seconds."""

    def __init__(self):
        self.now, self.lag, self.num_waits = 0.0, 0.0, 0

    def clock(self) -> float:
        return self.now

    def synchronize(self) -> None:
        self.num_waits += 1
        self.now += self.lag
        self.lag = 0.0


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


def test_queued_work_belongs_to_the_step() -> None:
    stage = Stage()
    timer = StepTimer(synchronize=stage.synchronize, clock=stage.clock)
    timer.start()
    with timer.span("forward"):
        stage.lag = 2.0
    assert timer.spans_ms == {"forward": 0.0}, "the host did not wait"
    assert timer.stop() == 2000.0
    assert stage.num_waits == 2, "once at each end: no wait inside a step"


def test_queued_work_belongs_to_the_part_when_asked_for() -> None:
    stage = Stage()
    timer = StepTimer(synchronize=stage.synchronize, synchronize_spans=True, clock=stage.clock)
    timer.start()
    with timer.span("forward"):
        stage.lag = 2.0
    with timer.span("optimizer"):
        stage.now += 1.0
    assert timer.stop() == 3000.0
    assert timer.spans_ms == {"forward": 2000.0, "optimizer": 1000.0}


def test_a_failing_part_is_timed_and_raises() -> None:
    stage = Stage()
    timer = StepTimer(clock=stage.clock)
    timer.start()
    with pytest.raises(KeyError), timer.span("forward"):
        stage.now += 1.0
        raise KeyError("x")
    assert timer.spans_ms == {"forward": 1000.0}
