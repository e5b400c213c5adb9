"""The size `gpu-hour` of the stability suite: an hour of a GPU by measured speeds, and learning rates of its parts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megafp8.config import flags
from megafp8.config.schema import RunConfig
from megafp8.launch.process_pool import PooledRun
from megafp8.launch.stability import (
    CONTROLS,
    PAIRS,
    SWEEP,
    Suite,
    build_study,
    part_runs,
    plan_controls,
    unique_runs,
)

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


def suite_of(folder: Path, *parts: str, flags: tuple[str, ...] = (), **fields) -> Suite:
    flags = ("--mock-data", "--tokenizer-type", "ByteLevelTokenizer", *flags)
    return Suite(folder=folder, size="gpu-hour", parts=parts, recipes=("tensorwise",), flags=flags, **fields)


def test_a_suite_of_one_recipe_takes_an_hour(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, PAIRS, SWEEP, CONTROLS)
    runs = unique_runs(part_runs(build_study(suite)))
    controls = plan_controls(suite, Path("pretrain_gpt.py"))
    in_steps = sum(seconds_of(run.config) for run in runs)
    in_steps += sum(seconds_of(config_of(run)) for run in controls.trunks)
    in_steps += sum(seconds_of(config_of(run)) * controls.length / last_step(run) for run in controls.forks)
    num_runs = len(runs) + len(controls.trunks) + len(controls.forks)
    assert (len(runs), num_runs) == (39, 79) and 1000 < in_steps < 1300, in_steps
    assert in_steps + START_S * num_runs < 3600


def config_of(run: PooledRun) -> RunConfig:
    return flags.parse_with_problems(run.command[run.command.index("pretrain_gpt.py") + 1 :])[0].config


def last_step(run: PooledRun) -> int:
    steps = config_of(run).training.train_iters
    assert steps is not None
    return steps


def test_rates_of_parts(tmp_path: Path) -> None:
    """Those of small batches are lower, and the sweep goes on beyond BF16's largest stable rate, 4.8e-3."""

    def rates(part: str, **fields) -> list[tuple[float, float]]:
        runs = unique_runs(part_runs(build_study(suite_of(tmp_path, part, **fields))))
        return sorted({(run.config.optimizer.lr, run.config.optimizer.min_lr) for run in runs})

    def rates_of_controls(**fields) -> tuple[float, float]:
        optimizer = suite_of(tmp_path, CONTROLS, **fields).part_settings[CONTROLS].config.optimizer
        return optimizer.lr, optimizer.min_lr

    assert rates(PAIRS) == [(6e-4, pytest.approx(6e-5))]
    assert rates_of_controls() == (4e-4, 4e-5)
    swept = [rate for rate, _ in rates(SWEEP)]
    assert swept[0] == 6e-4 and swept[-1] >= 0.999 * 4.8e-3 * 2**3
    assert rates_of_controls(flags=("--lr", "1e-3")) == (1e-3, pytest.approx(1e-4))


def test_flags_of_a_part_yield_to_given_ones_and_ranks_share_its_batch(tmp_path: Path) -> None:
    training = suite_of(tmp_path, CONTROLS, gpus=4).part_settings[CONTROLS].config.training
    assert (training.train_iters, training.global_batch_size, training.micro_batch_size) == (240, 16, 4)
    training = suite_of(tmp_path, CONTROLS, flags=("--train-iters", "300")).part_settings[CONTROLS].config.training
    assert (training.train_iters, training.global_batch_size) == (300, 16)
