"""Runs under a batch schedule: exact samples, learning rate by samples, resumption to the bit, and any layout."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from ranks import run_ranks
from small_run import COMMON, PLAIN, STYLES, build_run, fingerprint, weights
from tolerances import LAYOUT_LOSS

from megafp8.analysis.runs import LoadedRun, load_run
from megafp8.checkpoint.progress import Progress
from megafp8.config import flags, rules
from megafp8.config.schema import RunConfig
from megafp8.training.pretrain import train

LENGTH = COMMON.replace("--train-iters 100", "--train-samples 60").replace("--lr-warmup-iters 2", "")
SCHEDULE = (
    "--micro-batch-size 2 --global-batch-size 12 --rampup-batch-size 4 4 20 --lr-warmup-samples 16 --min-lr 1e-4 "
    "--weight-decay-incr-style linear --start-weight-decay 0.0 --end-weight-decay 0.2 --no-progress-bar "
    "--eval-iters 1 --eval-interval 100 --eval-global-batch-size 8"
)
STEPS = "--micro-batch-size 2 --step-batch-size-schedule 0:4,320:8,640:12 --lr-warmup-samples 16 --eval-iters 0"
# The ramp has sizes 4, 8 and 12 from samples 0, 10 and 20; a run of 60 samples leaves an incomplete batch of 4.
SIZES = [4, 4, 4, 8, 12, 12, 12]
CONSUMED = [4, 8, 12, 20, 32, 44, 56]
LAYOUTS = {
    "dp2": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
}


def config_of(words: str, world_size: int) -> RunConfig:
    length = LENGTH.replace("--global-batch-size 8", "")
    config = flags.parse(f"{length} {STYLES['llama']} {PLAIN} {words}".split()).config
    assert not rules.problems(config, world_size), rules.problems(config, world_size)
    return config


def run_loop(folder: Path, words: str = SCHEDULE, world_size: int = 1) -> tuple[Progress, str, LoadedRun]:
    """One start of a run: its progress, rank 0's weights, and its records."""
    config = config_of(f"{words} --save {folder} --load {folder}", world_size)

    def start() -> tuple[Progress, str]:
        run = build_run(config)
        return train(run), fingerprint(weights(run))

    return *run_ranks(world_size, start)[0], load_run(folder)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Progress, str, LoadedRun]:
    return run_loop(tmp_path_factory.mktemp("unbroken"))


def test_samples_and_rates_are_exact(unbroken: tuple[Progress, str, LoadedRun]) -> None:
    progress, _, records = unbroken
    assert progress == Progress(7, 56)
    assert [record.global_batch_size for record in records.steps] == SIZES
    assert [record.consumed_samples for record in records.steps] == CONSUMED
    for record, size in zip(records.steps, SIZES, strict=True):
        assert math.isclose(record.tokens_per_second * record.step_ms / 1000, size * 32)
    (evaluation,) = records.evals_of("valid")
    assert evaluation.num_tokens == 8 * 32


def test_learning_rate_follows_samples(unbroken: tuple[Progress, str, LoadedRun]) -> None:
    """Megatron-LM's formula: linear warm-up, then a cosine up to --train-samples, both over consumed samples."""
    for record, samples in zip(unbroken[2].steps, [0, *CONSUMED], strict=False):
        if samples <= 16:
            rate = 1e-3 * samples / 16
        else:
            rate = 1e-4 + 9e-4 * (math.cos(math.pi * (samples - 16) / (60 - 16)) + 1) / 2
        assert math.isclose(record.learning_rate, rate, rel_tol=1e-12), samples


@pytest.mark.parametrize("last_step", [2, 3, 5])
def test_resumption_at_and_across_a_change(
    last_step: int, unbroken: tuple[Progress, str, LoadedRun], tmp_path: Path
) -> None:
    stopped, _, _ = run_loop(tmp_path, f"{SCHEDULE} --exit-interval {last_step}")
    assert stopped == Progress(last_step, CONSUMED[last_step - 1])
    finished, resumed_weights, records = run_loop(tmp_path)
    assert (finished, resumed_weights) == unbroken[:2]
    assert [record.loss for record in records.steps] == [record.loss for record in unbroken[2].steps]
    assert [record.consumed_samples for record in records.steps] == CONSUMED


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_alike(layout: str, unbroken: tuple[Progress, str, LoadedRun], tmp_path: Path) -> None:
    world_size, words = LAYOUTS[layout]
    progress, _, records = run_loop(tmp_path, f"{SCHEDULE} {words}", world_size)
    assert progress == Progress(7, 56)
    expected = [record.loss for record in unbroken[2].steps]
    assert [record.loss for record in records.steps] == pytest.approx(expected, rel=LAYOUT_LOSS)


def test_step_schedule_in_tokens_trains_as_the_ramp(tmp_path: Path) -> None:
    """Thresholds of 320 and 640 tokens are samples 10 and 20 of 32 tokens."""
    _, own, records = run_loop(tmp_path / "steps", STEPS)
    ramp = "--micro-batch-size 2 --global-batch-size 12 --rampup-batch-size 4 4 20 --lr-warmup-samples 16"
    _, other, _ = run_loop(tmp_path / "ramp", f"{ramp} --eval-iters 0")
    assert [record.consumed_samples for record in records.steps] == CONSUMED
    assert own == other


def test_a_decreased_batch_follows_the_ranks_of_each_start(tmp_path: Path) -> None:
    """Of 10 sequences one rank takes all, and two ranks, with microbatches of 2 each, take 8."""
    words = "--micro-batch-size 2 --global-batch-size 10 --decrease-batch-size-if-needed --eval-iters 0"
    assert run_loop(tmp_path, f"{words} --exit-interval 2")[0] == Progress(2, 20)
    progress, _, records = run_loop(tmp_path, words, world_size=2)
    assert progress == Progress(7, 60)
    assert [record.consumed_samples for record in records.steps] == [10, 20, 28, 36, 44, 52, 60]


def test_a_resumed_run_may_have_another_schedule(tmp_path: Path) -> None:
    """The remaining samples are divided again, and the run ends at the same sample."""
    run_loop(tmp_path, f"{SCHEDULE} --exit-interval 4")
    other = SCHEDULE.replace("--rampup-batch-size 4 4 20", "--global-batch-size 4")
    progress, _, records = run_loop(tmp_path, other)
    assert progress == Progress(14, 60)
    assert [record.consumed_samples for record in records.steps] == [4, 8, 12, *range(20, 64, 4)]
