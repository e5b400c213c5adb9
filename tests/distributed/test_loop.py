"""The complete training loop: records, validation, checkpoints, reasons to stop, resumption."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from small_run import PLAIN, VIRTUAL, build_run, fingerprint, small_config, weights

from megafp8.analysis.runs import LoadedRun as Recorded
from megafp8.analysis.runs import load_run
from megafp8.checkpoint.directory import complete_steps
from megafp8.checkpoint.metadata import load_common_state
from megafp8.checkpoint.progress import Progress
from megafp8.errors import CheckpointError
from megafp8.metrics.timers import StepTimer, StepTimes
from megafp8.training import pretrain
from megafp8.training.extension import Extension, LoopState
from megafp8.training.extensions import build_extensions
from megafp8.training.pretrain import train
from megafp8.training.step import StepResult

OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
LENGTH = "--train-iters 6 --lr-warmup-iters 1 --eval-interval 2 --eval-iters 1 --no-progress-bar"


def run_loop(folder: Path, flags: str, world_size: int) -> tuple[Progress, str]:
    """One start of a run on every rank: its last step, and rank 0's weights."""
    config = small_config("llama", f"{LENGTH} --save {folder} --load {folder} {flags}", world_size)

    def start() -> tuple[Progress, str]:
        run = build_run(config)
        return train(run), fingerprint(weights(run))

    return run_ranks(world_size, start)[0]


def curves(run: Recorded) -> tuple[list[float], list[float]]:
    return [record.loss for record in run.steps], [record.loss for record in run.evals_of("valid")]


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(1, f"{PLAIN} {DROPOUT}", id="one"),
        pytest.param(2, f"--bf16 {OVERLAP} {DROPOUT}", id="dp2-overlap"),
        pytest.param(2, f"{PLAIN} {VIRTUAL}", id="pp2-virtual2"),
    ],
)
def test_a_resumed_run_has_the_records_of_the_unbroken_run(world_size: int, flags: str, tmp_path: Path) -> None:
    progress, unbroken_weights = run_loop(tmp_path / "unbroken", flags, world_size)
    assert progress == Progress(6, 48)
    unbroken = load_run(tmp_path / "unbroken")

    stopped, _ = run_loop(tmp_path / "parts", f"{flags} --exit-interval 4", world_size)
    assert stopped == Progress(4, 32)
    assert complete_steps(tmp_path / "parts") == [4], "saved because it stopped"
    (started,) = (event for event in load_run(tmp_path / "parts").events if event.name == "checkpoint")
    assert started.detail.startswith(f"no checkpoint in {tmp_path / 'parts'}: starting from step 0")
    finished, resumed_weights = run_loop(tmp_path / "parts", flags, world_size)
    parts = load_run(tmp_path / "parts")

    assert finished == progress
    assert resumed_weights == unbroken_weights
    assert curves(parts) == curves(unbroken)
    assert [record.step for record in parts.steps] == [1, 2, 3, 4, 5, 6]
    assert [record.consumed_samples for record in parts.steps] == [8, 16, 24, 32, 40, 48]
    assert [record.step for record in parts.evals_of("valid")] == [2, 4, 6]
    assert [start.resumed_from_step for start in parts.runs] == [None, 4]
    assert complete_steps(tmp_path / "parts") == [4, 6]


class StepCounter(Extension):
    """Counts the steps of a run, also those of the process before."""

    name, num_steps = "StepCounter", 0

    def state(self) -> dict[str, Any]:
        return {"steps": self.num_steps} if self.num_steps else {}

    def load_state(self, values: Mapping[str, Any]) -> None:
        self.num_steps = values.get("steps", 0)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        self.num_steps += 1


@pytest.mark.parametrize("flags", [PLAIN, f"{PLAIN} --async-save"], ids=["plain", "async"])
def test_the_state_of_an_extension_is_resumed(flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_loop(tmp_path / "without", f"{flags} --exit-interval 2", 1)
    assert "extensions" not in load_common_state(tmp_path / "without" / "iter_0000002")
    monkeypatch.setattr(pretrain, "build_extensions", lambda: [StepCounter(), *build_extensions()])
    run_loop(tmp_path / "with", f"{flags} --exit-interval 4", 1)
    assert load_common_state(tmp_path / "with" / "iter_0000004")["extensions"] == {"StepCounter": {"steps": 4}}
    progress, _ = run_loop(tmp_path / "with", flags, 1)
    assert progress == Progress(6, 48, extensions={"StepCounter": {"steps": 6}})


def test_checkpoints_at_the_interval_and_at_the_end(tmp_path: Path) -> None:
    run_loop(tmp_path, f"{PLAIN} --save-interval 4", 1)
    assert complete_steps(tmp_path) == [4, 6]
    assert {event.name for event in load_run(tmp_path).events} >= {"checkpoint saved", "attention"}


def test_all_records_read_back(tmp_path: Path) -> None:
    run_loop(tmp_path, f"{PLAIN} --log-interval 1 --log-num-zeros-in-grad --log-params-norm", 1)
    for record in load_run(tmp_path).steps:
        assert isinstance(record.num_zeros_in_grad, int)
        assert record.params_norm is not None and record.params_norm > 0
        assert record.memory_peak_bytes is not None and record.memory_peak_bytes > 0


class Ticks(StepTimer):
    """A timer whose clock advances by a second whenever it is read."""

    def __init__(self) -> None:
        self.now_s, self.started_s, self.ended_s = 0.0, 0.0, 0.0
        super().__init__(self.tick)

    def tick(self) -> float:
        self.now_s += 1
        return self.now_s

    def start(self) -> None:
        super().start()
        self.started_s = self.now_s

    def end_step(self) -> StepTimes:
        times = super().end_step()
        self.ended_s = self.now_s
        return times


def test_the_recorded_times_are_all_that_passed(tmp_path: Path) -> None:
    """Steps, validations, saves and replica checks, from the start of the first step to the end of the last one."""
    flags = f"{PLAIN} --save-interval 3 --check-weight-hash-across-dp-replicas-interval 4"
    config = small_config("llama", f"{LENGTH} --save {tmp_path} {flags}")

    def start() -> float:
        timer = Ticks()
        train(dataclasses.replace(build_run(config), timer=timer))
        return timer.ended_s - timer.started_s

    (passed_s,) = run_ranks(1, start)
    steps = load_run(tmp_path).steps
    between = [record.between_ms or {} for record in steps]
    assert sum(record.step_ms + sum(times.values()) for record, times in zip(steps, between, strict=True)) == (
        1000 * passed_s
    )
    names = [set(), set(), {"validation"}, {"checkpoints"}, {"validation", "replica check"}, set()]
    assert [set(times) for times in between] == names
    for record in steps:
        spans = record.timers_ms or {}
        assert (
            set(spans) == {"records", "data-wait", "forward-backward", "optimizer"}
            and sum(spans.values()) <= record.step_ms
        )
        rate = record.tokens_per_second * record.step_ms / 1000
        assert rate == pytest.approx((record.global_batch_size or 0) * config.data.seq_length)


def test_a_finished_run_does_nothing(tmp_path: Path) -> None:
    _, before = run_loop(tmp_path, PLAIN, 1)
    again, after = run_loop(tmp_path, PLAIN, 1)
    assert again == Progress(6, 48)
    assert after == before
    assert len(load_run(tmp_path).steps) == 6


def test_saving_into_a_folder_with_newer_checkpoints_is_refused(tmp_path: Path) -> None:
    """The next start would resume from those, and a run without --load would be lost silently."""
    run_loop(tmp_path, PLAIN, 1)

    def start() -> str:
        with pytest.raises(CheckpointError) as raised:
            train(build_run(small_config("llama", f"{LENGTH} {PLAIN} --save {tmp_path}")))
        return str(raised.value)

    (message,) = run_ranks(1, start)
    assert "has a checkpoint of step 6, but this run starts at step 0" in message
    assert complete_steps(tmp_path) == [6]


def test_ranks_with_different_checkpoints_stop_together(tmp_path: Path) -> None:
    """A folder that is not shared: the first machine has a checkpoint, the second one has none."""
    run_loop(tmp_path / "0", PLAIN, 1)
    (tmp_path / "1").mkdir()

    def start() -> str:
        folder = tmp_path / os.environ["RANK"]
        with pytest.raises(CheckpointError) as raised:
            train(build_run(small_config("llama", f"{LENGTH} {PLAIN} --load {folder}", 2)))
        return str(raised.value)

    for message in run_ranks(2, start):
        assert "rank 0 finds 6, rank 1 finds none" in message


def test_finetune_starts_at_step_one(tmp_path: Path) -> None:
    run_loop(tmp_path / "base", PLAIN, 1)
    folders = f"--load {tmp_path / 'base'} --finetune --save {tmp_path / 'tuned'}"
    config = small_config("llama", f"{LENGTH} {PLAIN} {folders}")
    assert run_ranks(1, lambda: train(build_run(config))) == [Progress(6, 48)]
    base, tuned = load_run(tmp_path / "base"), load_run(tmp_path / "tuned")
    assert [record.step for record in tuned.steps] == [1, 2, 3, 4, 5, 6]
    assert tuned.steps[0].loss < base.steps[0].loss - 0.1, "from the weights that the base run left"


@pytest.mark.parametrize(
    "schedule", ["--lr-decay-style constant", "--lr-decay-style WSD --lr-wsd-decay-iters 2"], ids=["constant", "WSD"]
)
def test_a_longer_run_continues_a_shorter_one(schedule: str, tmp_path: Path, capfd) -> None:
    """It needs no flag, ends as if it had been as long from the start, and says what was extended."""
    flags = f"{PLAIN} {schedule}"
    unbroken = run_loop(tmp_path / "unbroken", f"{flags} --train-iters 8", 1)
    run_loop(tmp_path / "parts", f"{flags} --train-iters 6 --exit-interval 4", 1)
    assert run_loop(tmp_path / "parts", f"{flags} --train-iters 8", 1) == unbroken
    whole, parts = load_run(tmp_path / "unbroken"), load_run(tmp_path / "parts")
    assert [record.learning_rate for record in parts.steps] == [record.learning_rate for record in whole.steps]
    (note,) = (event.detail for event in parts.events if "the end of the schedule has moved" in event.detail)
    assert "samples of the run (--train-iters or --train-samples): 48 -> 64" in note
    assert capfd.readouterr().out.count(note) == 1


def test_a_finished_run_continues_with_more_steps(tmp_path: Path) -> None:
    flags = f"{PLAIN} --lr-decay-style constant"
    unbroken = run_loop(tmp_path / "unbroken", f"{flags} --train-iters 8", 1)
    assert run_loop(tmp_path / "parts", flags, 1)[0] == Progress(6, 48)
    assert run_loop(tmp_path / "parts", f"{flags} --train-iters 8", 1) == unbroken


def test_changed_settings_are_named_in_one_line(tmp_path: Path, capfd) -> None:
    run_loop(tmp_path, f"{PLAIN} --exit-interval 2", 1)
    run_loop(tmp_path, f"{PLAIN} --exit-interval 4", 1)
    assert not [event for event in load_run(tmp_path).events if "differ from" in event.detail]
    run_loop(tmp_path, f"{PLAIN} --clip-grad 0.5 --hidden-dropout 0.1 --no-load-optim", 1)
    details = [event.detail for event in load_run(tmp_path).events if event.name == "checkpoint"]
    note = (
        "settings that differ from the checkpoint's: model.hidden_dropout: 0.0 -> 0.1; optimizer.clip_grad: 1.0 -> 0.5"
    )
    assert details.count(note) == 1 and "optimizer state and schedule restart" in details
    output = capfd.readouterr().out
    assert output.count(note) == 1 and "optimizer state and schedule restart" in output
