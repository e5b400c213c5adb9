"""The list of extensions: complete, and in an order that each of them can rely on."""

from __future__ import annotations

import gc
import importlib
import pkgutil
from types import SimpleNamespace
from typing import Any, Optional

import pytest

from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.config.schema import LoggingConfig, RunConfig, TrainingConfig
from megafp8.errors import CheckpointError, NumericsError
from megafp8.metrics.timers import StepTimer
from megafp8.training import extensions
from megafp8.training.extension import Extension
from megafp8.training.extensions import build_extensions, checkpoints, every_run, profiler
from megafp8.training.extensions.every_run import GarbageCollection

NAMES = [type(extension).__name__ for extension in build_extensions()]


def names_with(method: str) -> list[str]:
    """The extensions that implement a method, in call order."""
    return [type(each).__name__ for each in build_extensions() if method in vars(type(each))]


def test_every_extension_is_in_the_list() -> None:
    names = [each.name for each in pkgutil.iter_modules(extensions.__path__)]
    modules = [importlib.import_module(f"{extensions.__name__}.{name}") for name in names]
    defined = {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Extension) and value.__module__ == module.__name__
    }
    assert sorted(NAMES) == sorted(defined)


def test_every_state_has_a_name_of_its_own() -> None:
    names = [each.name for each in build_extensions() if type(each).state is not Extension.state]
    assert "LayerGuard" in names and "" not in names and len(names) == len(set(names))


@pytest.mark.parametrize(
    ("method", "first", "then"),
    [
        ("before_step", "PrecisionSchedule", "AmaxCalibration"),
        ("before_step", "AmaxCalibration", "StepRecords"),
        ("open", "AmaxCalibration", "Validation"),
        ("open", "Validation", "StopConditions"),
        ("after_step", "StepRecords", "QuantizationStatistics"),
        ("after_step", "Heartbeat", "Stragglers"),
        ("after_step", "LayerGuard", "Checkpoints"),
        ("after_step", "ReplicaCheck", "Checkpoints"),
        ("after_step", "AttentionReport", "Validation"),
        ("after_step", "AttentionReport", "Checkpoints"),
        ("after_step", "Validation", "StopConditions"),
        ("after_step", "StopConditions", "Checkpoints"),
        ("recover", "StepRecords", "QuantizationStatistics"),
        ("recover", "QuantizationStatistics", "Rollback"),
        # Closed in reverse: the last save is complete before the final records.
        ("close", "Rollback", "Checkpoints"),
        ("close", "StopConditions", "Rollback"),
        ("close", "QuantizationStatistics", "StopConditions"),
    ],
)
def test_order_constraints_of_extensions(method: str, first: str, then: str) -> None:
    names = names_with(method)
    assert names.index(first) < names.index(then)


def test_the_last_before_a_step_and_the_last_after_it() -> None:
    assert names_with("before_step")[-1] == "Stragglers", "what others do counts as this rank's own time"
    assert names_with("after_step")[-1] == "GarbageCollection"


# --- checkpoints at the end -------------------------------------------------------------------------------------------


class Saver:
    """A pending save, which fails."""

    def __init__(self, saves: bool = True) -> None:
        self.calls: list[bool] = []
        self.saved_step, self.saves = 3, saves

    def finish(self, is_last: bool) -> None:
        self.calls.append(is_last)
        raise CheckpointError("disk full")

    def save(self, progress: Any, is_last: bool) -> bool:
        return self.saves


def closed(error: Optional[BaseException]) -> Saver:
    extension, saver = checkpoints.Checkpoints(), Saver()
    extension.saver = saver  # type: ignore[assignment]
    extension.close(SimpleNamespace(), error)  # type: ignore[arg-type]
    return saver


def test_a_save_that_fails_at_the_end_of_a_run_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="disk full"):
        closed(None)


def test_nonfinite_values_wait_for_a_save_but_keep_their_error() -> None:
    assert closed(NumericsError("bad numbers")).calls == [False]


def test_other_errors_do_not_wait_for_a_save() -> None:
    """Other ranks may be gone."""
    assert closed(RuntimeError("a peer")).calls == []


@pytest.mark.parametrize(
    ("saves", "stop_reason", "expected"),
    [(True, None, "SIGTERM"), (False, None, None), (True, "--exit-interval 2", "--exit-interval 2")],
)
def test_ranks_agree_on_signals_after_a_save(
    saves: bool, stop_reason: Optional[str], expected: Optional[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "is_stop_requested", lambda run: True)
    monkeypatch.setattr(checkpoints, "record_stop_signals", lambda watchdog: "SIGTERM")
    extension: Any = checkpoints.Checkpoints()
    extension.saver = Saver(saves)
    run = SimpleNamespace(watchdog=None)
    state = SimpleNamespace(run=run, progress=None, stop_reason=stop_reason, is_last=stop_reason is not None)
    state.with_extensions = lambda progress: progress
    extension.after_step(state, None)
    assert state.stop_reason == expected


# --- others -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_agreed", [True, False])
def test_a_signal_in_a_validation_before_the_first_step_ends_the_run(
    is_agreed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(every_run, "record_stop_signals", lambda watchdog: "SIGTERM")
    state: Any = SimpleNamespace(run=SimpleNamespace(watchdog=SimpleNamespace(stop_agreed=is_agreed)), stop_reason=None)
    every_run.StopConditions().open(state)
    assert state.stop_reason == ("SIGTERM" if is_agreed else None)


def test_automatic_garbage_collection_is_off_during_training() -> None:
    config = RunConfig(training=TrainingConfig(manual_gc=True))
    state: Any = SimpleNamespace(run=SimpleNamespace(config=config))
    extension = GarbageCollection()
    extension.open(state)
    try:
        assert not gc.isenabled()
    finally:
        extension.close(state, RuntimeError("an error"))
    assert gc.isenabled()


def test_validations_start_at_the_step_of_their_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(every_run, "validate", lambda run, sinks, progress: steps.append(progress))
    config = RunConfig(training=TrainingConfig(eval_interval=2, start_eval_at_iter=4))
    run = SimpleNamespace(config=config, timer=StepTimer())
    for step in range(1, 11):
        state: Any = SimpleNamespace(run=run, sinks=None, progress=step, step=step, total_steps=10)
        every_run.Validation().after_step(state, None)
    assert steps == [4, 6, 8]


def test_the_profile_has_shapes_and_call_stacks_when_asked() -> None:
    config = RunConfig(logging=LoggingConfig(profile=True, profile_shapes=True, profile_callstack=True))
    run: Any = SimpleNamespace(config=config, rank_position=SimpleNamespace(rank=0))
    profile = profiler.build_profile(run)
    assert (profile.record_shapes, profile.with_stack) == (True, True)
    plain: Any = SimpleNamespace(config=RunConfig(), rank_position=SimpleNamespace(rank=0))
    assert (profiler.build_profile(plain).record_shapes, profiler.build_profile(plain).with_stack) == (False, False)
