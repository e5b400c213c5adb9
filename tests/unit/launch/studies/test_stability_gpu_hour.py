"""The size `gpu-hour` of the stability suite: an hour of a GPU by measured speeds, and learning rates of its parts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megafp8.config.schema import RunConfig
from megafp8.launch.stability import CONTROLS, PAIRS, SWEEP, Suite, build_study, part_runs, unique_runs
from megafp8.launch.study import StudyRun

# ms of a step of 65,536 tokens of a larger model, 50.7M parameters, on an H200
# (benchmarks/results/quality_pairs.md). The recipe under test has layers of Transformer Engine but in controls.
TRANSFORMER_ENGINE_MS, EMULATED_FP8_MS, EMULATED_NVFP4_MS = 59, 225, 272
TOKENS = 65_536
START_S = 20  # until the first step, the capture of the graphs, and the end
FORWARD_FRACTION = 1 / 3  # of a step's time, in a validation


def seconds_of(config: RunConfig) -> float:
    training, precision = config.training, config.precision
    step_ms = TRANSFORMER_ENGINE_MS
    if precision.transformer_impl == "emulated":
        step_ms = EMULATED_NVFP4_MS if precision.fp4_format else EMULATED_FP8_MS
    tokens = training.global_batch_size * config.data.seq_length
    num_validations = math.ceil(training.train_iters / training.eval_interval)
    num_steps = training.train_iters + FORWARD_FRACTION * num_validations * training.eval_iters
    return num_steps * step_ms / 1000 * tokens / TOKENS


def runs_of(folder: Path, *parts: str, flags: tuple[str, ...] = (), **fields) -> list[StudyRun]:
    flags = ("--mock-data", "--tokenizer-type", "ByteLevelTokenizer", *flags)
    suite = Suite(folder=folder, size="gpu-hour", parts=parts, recipes=("tensorwise",), flags=flags, **fields)
    return unique_runs(part_runs(build_study(suite)))


def test_a_suite_of_one_recipe_takes_an_hour(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, PAIRS, SWEEP, CONTROLS)
    in_steps = sum(seconds_of(run.config) for run in runs)
    assert len(runs) == 74 and 1200 < in_steps < 1500, in_steps
    assert in_steps + START_S * len(runs) < 3600


def test_rates_of_parts(tmp_path: Path) -> None:
    """Those of small batches are lower, and the sweep goes on beyond BF16's largest stable rate, 4.8e-3."""

    def rates(*parts: str, **fields) -> list[tuple[float, float]]:
        optimizers = [run.config.optimizer for run in runs_of(tmp_path, *parts, **fields)]
        return sorted({(optimizer.lr, optimizer.min_lr) for optimizer in optimizers})

    assert rates(PAIRS) == [(6e-4, pytest.approx(6e-5))]
    assert rates(CONTROLS) == [(4e-4, 4e-5)]
    swept = [rate for rate, _ in rates(SWEEP)]
    assert swept[0] == 6e-4 and swept[-1] >= 0.999 * 4.8e-3 * 2**3
    assert rates(CONTROLS, flags=("--lr", "1e-3")) == [(1e-3, pytest.approx(1e-4))]


def test_flags_of_a_part_yield_to_given_ones_and_ranks_share_its_batch(tmp_path: Path) -> None:
    (config, *_) = (run.config for run in runs_of(tmp_path, CONTROLS, gpus=4))
    training = config.training
    assert (training.train_iters, training.global_batch_size, training.micro_batch_size) == (150, 16, 4)
    (config, *_) = (run.config for run in runs_of(tmp_path, CONTROLS, flags=("--train-iters", "300")))
    assert (config.training.train_iters, config.training.global_batch_size) == (300, 16)
