"""Mixtures of experts on a GPU: Transformer Engine's grouped linears against its linears and the emulated ones."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import RECIPES, gap, gpu_curve, gpu_run, unbroken_and_resumed
from small_run import train

from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 0.01 --transformer-impl transformer_engine"
)
GROUPED = f"{EXPERTS} --moe-grouped-gemm"
EMULATED = EXPERTS.replace("transformer_engine", "emulated")
STEPS = 4
CLOSE = 5e-3  # relative difference of losses: two roundings of one training, as in test_te_training.py
curve = functools.partial(gpu_curve, num_steps=STEPS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_experts_train_as_emulated_ones(recipe: str) -> None:
    assert gap(curve(f"{RECIPES[recipe]} {GROUPED}"), curve(f"{RECIPES[recipe]} {EMULATED}")) < CLOSE


def test_grouped_experts_train_as_single_ones() -> None:
    assert gap(curve(GROUPED), curve(EXPERTS)) < CLOSE


def test_grouped_experts_resume(tmp_path: Path) -> None:
    unbroken, resumed = unbroken_and_resumed(GROUPED, STEPS, tmp_path)
    assert unbroken == resumed


def test_emulated_experts_load_a_checkpoint_of_grouped_ones(tmp_path: Path) -> None:
    with gpu_run(GROUPED) as run:
        train(run, STEPS)
        path = save_checkpoint(tmp_path, run.config, run.training_state, Progress(STEPS, STEPS * run.global_batch_size))
        expected = train(run, 1, first_step=STEPS + 1)
    with gpu_run(EMULATED) as run:
        load_checkpoint(path, run.config, run.training_state)
        assert gap(train(run, 1, first_step=STEPS + 1), expected) < CLOSE
