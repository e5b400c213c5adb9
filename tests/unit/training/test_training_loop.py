"""The order in which the loop calls its extensions, with simulated steps."""

from __future__ import annotations

import ast
import contextlib
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch

from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.config.batch_schedule import constant
from megafp8.data.loader import BATCH_KEYS, build_loader
from megafp8.errors import NumericsError
from megafp8.metrics.records import EventRecord
from megafp8.metrics.sinks import Sinks
from megafp8.metrics.timers import BETWEEN_STEPS, RECORDS, ROLLBACK, VALIDATION, StepTimer, StepTimes
from megafp8.training import extension, loop
from megafp8.training.extension import Extension

EXTENSION_METHODS = ("open", "before_step", "before_update", "after_step", "recover", "close")


class State:
    """A run of a few steps without a model."""

    def __init__(self, total_steps: int = 2):
        self.run, self.batches, self.progress = SimpleNamespace(timer=StepTimer()), None, None
        self.step, self.total_steps = 0, total_steps
        self.stop_reason: Optional[str] = None
        self.needs_eager_step = False
        self.step_hooks: list[Any] = []
        self.sinks = Sinks(())

    @property
    def is_last(self) -> bool:
        return self.stop_reason is not None or self.step >= self.total_steps

    def advance(self, result: Any) -> None:
        self.step += 1

    def load_extensions(self, progress: Any) -> None:
        pass

    def close(self) -> None:
        pass


class Recorder(Extension):
    """Records its calls as `name.method`. A method in `does` does something more."""

    def __init__(self, name: str, calls: list[str], **does: Any):
        self.name, self.calls, self.does = name, calls, does
        for method in EXTENSION_METHODS:
            setattr(self, method, lambda *args, method=method: self.note(method, *args))

    def note(self, method: str, *args: Any) -> Any:
        self.calls.append(f"{self.name}.{method}")
        return self.does[method](*args) if method in self.does else None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of extensions and steps. A step is bad if its number is in `calls.bad`."""
    calls = Calls()

    def train_step(
        run: Any, batches: Any, progress: Any, before_update: Any, is_eager: bool, step_hooks: Any, after_launch: Any
    ) -> Any:
        calls.append("eager step" if is_eager else "step with hooks" if step_hooks else "step")
        if calls.num_bad:
            calls.num_bad -= 1
            raise NumericsError("bad numbers")
        before_update(SimpleNamespace())
        return SimpleNamespace()

    monkeypatch.setattr(loop, "train_step", train_step)
    return calls


class Calls(list[str]):
    num_bad = 0


def test_extensions_are_called_in_their_order_and_closed_in_reverse(calls: Calls) -> None:
    loop.train_steps(State(total_steps=2), [Recorder("a", calls), Recorder("b", calls)])
    step = [
        "a.before_step", "b.before_step", "step", "a.before_update", "b.before_update", "a.after_step", "b.after_step",
    ]  # fmt: skip
    assert calls == ["a.open", "b.open", *step, *step, "b.close", "a.close"]


def test_no_step_runs_if_opening_finds_a_reason_to_stop(calls: Calls) -> None:
    loop.train_steps(State(), [Recorder("a", calls, open=lambda state: setattr(state, "stop_reason", "a signal"))])
    assert calls == ["a.open", "a.close"]


def test_all_extensions_see_the_step_after_which_the_loop_stops(calls: Calls) -> None:
    stop = Recorder("a", calls, after_step=lambda state, result: setattr(state, "stop_reason", "a signal"))
    loop.train_steps(State(), [stop, Recorder("b", calls)])
    assert calls.count("step") == 1 and calls[-4:] == ["a.after_step", "b.after_step", "b.close", "a.close"]


def test_the_first_recovering_extension_handles_a_failed_step(calls: Calls) -> None:
    calls.num_bad, state = 1, State(total_steps=1)
    back = Recorder("b", calls, recover=lambda state, error: True)
    loop.train_steps(state, [Recorder("a", calls), back, Recorder("c", calls)])
    assert state.step == 1
    before, after = ([f"{name}.{method}" for name in "abc"] for method in ("before_step", "after_step"))
    update = [f"{name}.before_update" for name in "abc"]
    made = [*before, "step", "a.recover", "b.recover", *before, "step", *update, *after]
    assert calls[3:-3] == made


def test_without_recovery_the_error_ends_the_loop_and_reaches_every_close(calls: Calls) -> None:
    calls.num_bad, errors = 1, []
    listener = Recorder("b", calls, close=lambda state, error: errors.append(error))
    with pytest.raises(NumericsError) as raised:
        loop.train_steps(State(), [Recorder("a", calls), listener])
    assert calls[-4:] == ["a.recover", "b.recover", "b.close", "a.close"]
    assert errors == [raised.value]


def test_an_error_of_a_close_reaches_the_closes_after_it(calls: Calls) -> None:
    def fail(state: Any, error: Any) -> None:
        raise OSError("no space")

    errors: list[Any] = []
    listener = Recorder("a", calls, close=lambda state, error: errors.append(error))
    with pytest.raises(OSError, match="no space") as raised:
        loop.train_steps(State(), [listener, Recorder("b", calls, close=fail)])
    assert errors == [raised.value]


def test_eager_steps_and_steps_with_hooks_are_requested_for_each_step(calls: Calls) -> None:
    def ask(state: State) -> None:
        state.needs_eager_step = state.needs_eager_step or state.step == 0
        if state.step == 1:
            state.step_hooks.append("what an extension sees")

    loop.train_steps(State(total_steps=3), [Recorder("a", calls, before_step=ask)])
    assert [call for call in calls if "step" in call and "." not in call] == ["eager step", "step with hooks", "step"]


@pytest.mark.parametrize("fails", [False, True])
def test_loader_processes_end_with_the_loop_although_its_state_is_kept(
    fails: bool, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that keeps an earlier exception keeps the frames in its traceback, and all that they refer to."""

    def build_batches(*_: Any) -> Any:
        sizes = {"micro_batch_size": 1, "data_parallel_rank": 0, "data_parallel_size": 1, "total_samples": 8}
        dataset = [dict.fromkeys(BATCH_KEYS, torch.zeros(1))] * 8
        return build_loader(dataset, consumed_samples=0, batch_schedule=constant(1), num_workers=1, **sizes)

    monkeypatch.setattr(extension, "build_batches", build_batches)
    data = SimpleNamespace(num_workers=1)
    run: Any = SimpleNamespace(
        timer=StepTimer(),
        last_step=lambda progress: 1,
        end_sample=lambda progress: 8,
        datasets=[None],
        config=SimpleNamespace(data=data),
    )
    progress: Any = SimpleNamespace(step=0, consumed_samples=0, extensions={})
    state, num_processes = extension.LoopState(run, Sinks(()), progress, 0.0), list[int]()

    def read(state: Any) -> None:
        for _ in range(2):
            next(state.batches)
            num_processes.append(len(multiprocessing.active_children()))
            state.move_to(progress)
        state.stop_reason = "read enough"
        if fails:
            raise NumericsError("bad numbers")

    with pytest.raises(NumericsError) if fails else contextlib.nullcontext():
        loop.train_steps(state, [Recorder("a", calls, open=read)])
    assert num_processes == [1, 1]
    assert state.batches is None
    assert multiprocessing.active_children() == []


class Clock:
    """A clock that advances only where a test lets time pass."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> Any:
        def advance(*_: Any) -> None:
            self.now += seconds

        return advance


class Timed(Extension):
    """Ends the time of each step, as the step records do; what it writes takes 3 s, and its calls before a step 5 s."""

    span = RECORDS

    def __init__(self, clock: Clock):
        self.clock, self.times, self.ended = clock, list[StepTimes](), list[float]()

    def before_step(self, state: Any) -> None:
        self.clock.now += 5

    def after_step(self, state: Any, result: Any) -> None:
        self.times.append(state.run.timer.end_step())
        self.ended.append(self.clock.now)
        self.clock.now += 3


class Between(Extension):
    """Takes 7 s after the second step, which are no step's, and 11 s after each step, which are."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def after_step(self, state: Any, result: Any) -> None:
        self.clock.now += 11
        if state.step == 2:
            with state.run.timer.span(VALIDATION):
                self.clock.now += 7

    def recover(self, state: Any, error: NumericsError) -> bool:
        self.clock.now += 13
        return True


def test_the_times_of_steps_and_what_is_between_them_are_all_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is timed from the end of the one before: also what extensions and deferred records take."""
    clock, num_bad, event = Clock(), 0, EventRecord(step=1, name="late")
    clock.now = 100.0

    def train_step(run: Any, *args: Any, after_launch: Any) -> Any:
        nonlocal num_bad
        with run.timer.span("forward-backward"):
            clock.now += 17
            after_launch()
            clock.now += 2
        if num_bad:
            num_bad -= 1
            raise NumericsError("bad numbers")
        clock.now += 0.5

    def defer(state: Any, result: Any) -> None:
        nonlocal num_bad
        num_bad = int(state.step == 3)
        state.sinks.defer(lambda: [clock.passes(19)(), event][1:])

    monkeypatch.setattr(loop, "train_step", train_step)
    state, timed = State(total_steps=4), Timed(clock)
    state.run.timer = StepTimer(clock)
    loop.train_steps(state, [Recorder("a", [], open=clock.passes(1000), after_step=defer), timed, Between(clock)])
    own = {"records": 5.0, "forward-backward": 19.0}
    later = own | {"records": 5.0 + 3 + 19}
    expected = [
        (24.5, own, {}),
        (24.5 + 3 + 19 + 11, later, {}),
        (24.5 + 3 + 19 + 11, later, {VALIDATION: 7.0}),
        (24.5, own, {ROLLBACK: 3 + 11 + 5 + 19 + 19 + 13.0}),
    ]
    seconds = [tuple(_in_seconds(part) for part in times) for times in timed.times]
    assert seconds == expected
    recorded_s = sum(step + sum(between.values()) for step, _, between in seconds)
    assert recorded_s == timed.ended[-1] - 1100, "opening is before the first step"
    for step, spans, between in seconds:
        assert sum(spans.values()) <= step and set(between) <= set(BETWEEN_STEPS)


def _in_seconds(times: Any) -> Any:
    return {name: ms / 1000 for name, ms in times.items()} if isinstance(times, dict) else times / 1000


def test_the_loop_knows_no_extension_by_name() -> None:
    tree = ast.parse(Path(loop.__file__).read_text(encoding="utf-8"))
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {module for module in modules if module.startswith("megafp8.training.")}
    assert ours == {"megafp8.training.extension", "megafp8.training.step"}
