"""The moving average of the weights on a GPU: its formula, and validations that change nothing."""

from __future__ import annotations

import pytest
import torch
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import GRAPH, RECIPES, gpu_run
from small_run import Curve, SourceSamples, train, weights
from torch import Tensor

from megafp8.checkpoint.optimizer_state import join_master_weight
from megafp8.metrics.records import VALID, VALID_EMA
from megafp8.optimizer.weight_ema import MeanShard
from megafp8.training.evaluation import evaluate

EMA = "--ema-decay 0.5 --ema-interval 1"
LOW_STATE = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
RUNS = {
    "one pass": f"{RECIPES['bf16']} --use-distributed-optimizer",
    "remainders": f"{RECIPES['bf16']} --use-distributed-optimizer {LOW_STATE}",
    "plain": f"{RECIPES['bf16']} --no-use-distributed-optimizer",
    "muon": f"{RECIPES['bf16']} --optimizer muon",
    "FP8 weights": f"{RECIPES['tensorwise']} --use-distributed-optimizer --fp8-param-gather",
    "Muon's FP8 weights": f"{RECIPES['tensorwise']} --optimizer muon --fp8-param-gather",
    "graph": f"{RECIPES['tensorwise']} {GRAPH}",
}


def master_of(shard: MeanShard) -> Tensor:
    """Its weights in FP64."""
    master, rounded = shard.master()
    return (master if rounded is None else join_master_weight(rounded, master)).double()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("flags", RUNS.values(), ids=RUNS)
def test_the_mean_is_the_formula(flags: str, dtype: str) -> None:
    with gpu_run(f"{flags} {EMA} --ema-dtype {dtype}") as run:
        shards = run.training_state.weight_ema.shards
        means = [torch.zeros_like(shard.mean, dtype=torch.float64) for shard in shards]
        for step in range(1, 7):
            train(run, 1, step)
            for mean, shard in zip(means, shards, strict=True):
                mean += max(0.5, 1 / step) * (master_of(shard) - mean)
        for mean, shard in zip(means, shards, strict=True):
            # Of the roundings of an update later ones leave half: less than 2 of BF16's spacings, or 3 of FP32's.
            spacing = 2.0 ** (-23 if dtype == "fp32" else -7)
            assert ((shard.mean - mean).abs() <= 3 * spacing * mean.abs().clamp_min(1e-2)).all()


@pytest.mark.parametrize("flags", RUNS.values(), ids=RUNS)
def test_validating_the_mean_changes_nothing(flags: str) -> None:
    def steps(is_validated: bool) -> tuple[Curve, float, dict[str, Tensor]]:
        with gpu_run(f"{flags} {EMA}") as run:
            train(run, 4)
            samples = SourceSamples(run.config.data.seq_length)
            loss = evaluate(run, VALID, samples, 4, 0).loss
            if is_validated:
                assert evaluate(run, VALID_EMA, samples, 4, 0).loss != loss
            return train(run, 3, 5), evaluate(run, VALID, samples, 7, 0).loss, weights(run)

    (curve, loss, plain), (again, same_loss, restored) = steps(False), steps(True)
    assert curve == again and loss == same_loss
    assert not [name for name, weight in plain.items() if not torch.equal(weight, restored[name])]
