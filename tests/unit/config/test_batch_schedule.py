"""Batch schedules: megatron-core's sizes at every sample, and exact arithmetic of steps and samples."""

from __future__ import annotations

import pytest

from megafp8.config import batch_schedule, flags, iterations, rules
from megafp8.config.batch_schedule import BatchSchedule, constant, ramp_up, step_schedule
from megafp8.config.lr_schedule import ScheduleSamples, schedule_samples
from megafp8.config.rules.setting_warnings import batch_schedule_warnings
from megafp8.config.schema import RunConfig
from megafp8.errors import ConfigError
from megafp8.mcore import cpu_patches

cpu_patches.install()

from megatron.core import num_microbatches_calculator as upstream

from megafp8.mcore.patches import is_installed

RAMPS = (((4, 4, 100), 16), ((16, 8, 3000), 64), ((1, 1, 7), 12), ((2, 2, 3), 20), ((8, 8, 1), 16), ((3, 3, 1000), 96))
STEPS = "0:8 1K:16 2.5k:32, 0.01M:1K"
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 255 --lr 1e-3 --mock-data "
    "--position-embedding-type rope --tokenizer-type NullTokenizer --micro-batch-size 2"
)


def config_of(words: str) -> RunConfig:
    return flags.parse(f"{SMALL} {words}".split()).config


@pytest.mark.skipif(not is_installed("<0.19"), reason="megatron-core 0.19 has no ramp-up")
@pytest.mark.parametrize("words, last", RAMPS)
def test_ramp_up_is_megatron_cores_at_every_sample(words: tuple[int, ...], last: int) -> None:
    schedule = ramp_up(words, last)
    calculator = upstream.RampupBatchsizeNumMicroBatchesCalculator(last, 1, 1, False, 1, *words)
    for samples in range(words[2] + 10):
        calculator.update(samples, consistency_check=True)
        assert schedule.batch_size_at(samples) == calculator.get_current_running_global_batch_size(), samples


@pytest.mark.skipif(not is_installed("<0.19"), reason="megatron-core 0.19 has no ramp-up")
def test_decreased_ramp_is_megatron_cores_at_every_sample() -> None:
    schedule = ramp_up((16, 8, 3000), 64).rounded_down(12)
    calculator = upstream.RampupBatchsizeNumMicroBatchesCalculator(64, 4, 3, True, 1, 16, 8, 3000)
    for samples in range(3010):
        calculator.update(samples, consistency_check=True)
        assert schedule.batch_size_at(samples) == calculator.get_current_running_global_batch_size(), samples
    assert schedule.last_batch_size == 60


@pytest.mark.skipif(is_installed("<0.19"), reason="megatron-core 0.16 has no step schedule")
def test_step_schedule_is_megatron_cores_at_every_sample() -> None:
    schedule = step_schedule(STEPS, 3)
    calculator = upstream.StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, STEPS, 3)
    assert [(phase.start_sample, phase.batch_size) for phase in schedule.phases] == calculator.schedule
    for samples in range(4000):
        calculator.update(samples, consistency_check=True)
        assert schedule.batch_size_at(samples) == calculator.get_current_running_global_batch_size(), samples


def test_step_schedule_in_tokens() -> None:
    """The phases that megatron-core 0.19 reads from the same text."""
    assert starts(step_schedule(STEPS, 3)) == [(0, 8), (333, 16), (833, 32), (3333, 1000)]
    assert starts(step_schedule("200B:768 0:384 400B:1152", 8192)) == [(0, 384), (24414062, 768), (48828125, 1152)]


def starts(schedule: BatchSchedule) -> list[tuple[int, int]]:
    return [(phase.start_sample, phase.batch_size) for phase in schedule.phases]


@pytest.mark.parametrize("schedule", [ramp_up((4, 4, 100), 16), step_schedule("0:6 50:7 60:30", 1), constant(5)])
def test_steps_and_samples_agree_with_a_walk(schedule: BatchSchedule) -> None:
    boundaries = [0]
    while boundaries[-1] < 400:
        boundaries.append(boundaries[-1] + schedule.batch_size_at(boundaries[-1]))
    for start in (0, 1, 3, len(boundaries) // 2):
        for steps, end in enumerate(boundaries[start:]):
            assert schedule.advance(steps, boundaries[start]) == end
            assert schedule.num_steps(end, boundaries[start]) == steps
            assert schedule.num_steps(end + 1, boundaries[start]) == steps  # an incomplete batch does not count
    for step, sample in enumerate(boundaries):
        assert schedule.steps_until(sample) == step
    middle = (boundaries[3] + boundaries[4]) / 2
    assert schedule.steps_until(middle) == 3.5


def test_a_size_within_one_batch_of_the_size_before_has_no_step() -> None:
    schedule = step_schedule("0:10 12:20 15:40", 1)
    assert list(schedule.segments()) == [(0, 10, 2), (20, 40, None)]


@pytest.mark.parametrize(
    "words, text",
    [
        ("16 8", "needs three numbers"),
        ("16 8 0", "needs three numbers"),
        ("64 8 100", "not below the global batch of 64"),
        ("128 8 100", "not below the global batch of 64"),
        ("1 1 100", "at most 10 are supported"),
        ("16 9 100", "64 - 16 = 48 sequences are not a multiple of the increment 9"),
    ],
)
def test_wrong_ramps(words: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_schedule, "MAX_INCREMENTS", 10)
    with pytest.raises(ConfigError, match=text):
        ramp_up(tuple(map(int, words.split())), 64)


@pytest.mark.parametrize(
    "words, text",
    [
        ("", "the first threshold must be 0"),
        ("100:8", "the first threshold must be 0"),
        ("0:8 100", "'100' is not THRESHOLD:SIZE"),
        ("0:8 x:9", "'x:9' is not THRESHOLD:SIZE"),
        ("0:8 1e400:9", "'1e400:9' is not THRESHOLD:SIZE"),
        ("0:8 nan:9", "'nan:9' is not THRESHOLD:SIZE"),
        ("0:0", "the size at least 1"),
        ("0:8 1:16", "both start at sample 0"),
        ("0:16 1K:8", "decreases from 16 to 8"),
    ],
)
def test_wrong_step_schedules(words: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        step_schedule(words, 4)


def test_lengths_of_a_run_under_a_schedule() -> None:
    config = config_of("--global-batch-size 16 --rampup-batch-size 4 4 30 --train-samples 205 --eval-iters 3")
    assert not rules.setting_problems(config, 2)
    # Three batches of 4, one of 8 and one of 12 reach sample 32, and ten of 16 sample 192.
    assert starts(iterations.batch_schedule(config, 2)) == [(0, 4), (10, 8), (20, 12), (30, 16)]
    assert iterations.train_iters(config, 2) == 15
    assert iterations.trained_samples(config, 2) == 192
    assert iterations.train_samples(config, 2) == 205
    assert iterations.global_batch_size(config, 2) == 16
    assert iterations.dataset_samples(config, 2) == (205, 48, 48)


def test_evaluation_batch() -> None:
    config = config_of("--global-batch-size 16 --train-iters 5 --eval-global-batch-size 4 --eval-iters 3")
    assert iterations.dataset_samples(config, 2) == (80, 12, 12)


def test_interleaved_schedule_needs_its_multiple_in_every_phase_and_evaluation() -> None:
    pipeline = "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    ramp = "--global-batch-size 8 --rampup-batch-size 2 6 100 --train-samples 1000 --eval-global-batch-size 6"
    first, second = rules.setting_problems(config_of(f"{pipeline} {ramp}"), 2)
    assert "not 2 / (2 x 1) = 1: use a global batch of 4" in first
    assert "for the interleaved schedule = 2 x 1 x 2 = 4: use 8" in second


def test_decreased_batch() -> None:
    config = config_of("--global-batch-size 16 --train-samples 100 --decrease-batch-size-if-needed")
    assert not rules.setting_problems(config, 3)
    assert iterations.global_batch_size(config, 3) == 12
    assert iterations.num_microbatches(config, 3) == 2
    assert iterations.train_iters(config, 3) == 8
    assert iterations.global_batch_size(config, 2) == 16
    assert "has less than --micro-batch-size x data-parallel size = 18" in str(rules.setting_problems(config, 9))


def test_replacement_of_train_iters_has_the_same_steps() -> None:
    config = config_of("--global-batch-size 16 --rampup-batch-size 4 4 30 --train-iters 15")
    (problem,) = rules.setting_problems(config, 2)
    assert "use --train-samples 192 " in problem


def test_a_step_schedule_may_count_steps_as_megatron_lm_does() -> None:
    """The run has the given steps; in the schedules of learning rate and weight decay each counts as a last batch."""
    config = config_of("--step-batch-size-schedule 0:4,320:8,640:12 --train-iters 15 --lr-warmup-iters 2")
    assert not rules.setting_problems(config, 2)
    assert iterations.train_iters(config, 2) == 15
    assert iterations.trained_samples(config, 2) == 3 * 4 + 8 + 11 * 12
    assert schedule_samples(config, 2) == ScheduleSamples(2 * 12, 15 * 12, None, 15 * 12)
    (warning,) = batch_schedule_warnings(config, 2)
    assert "the run has 152 samples" in warning
    assert "count as 12 samples each" in warning


@pytest.mark.parametrize(
    "words",
    [
        "--global-batch-size 16 --rampup-batch-size 0 4 30",
        "--step-batch-size-schedule 0:0",
        "--step-batch-size-schedule 0:4,1T:99999999999999999999",
    ],
)
def test_a_wrong_schedule_is_one_problem(words: str) -> None:
    (problem,) = rules.setting_problems(config_of(f"{words} --train-samples 100"), 2)
    assert problem.startswith(("--rampup-batch-size 0 4 30: ", "--step-batch-size-schedule '0:"))
    assert "problem with the settings" not in problem
