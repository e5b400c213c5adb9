"""FP16 with Transformer Engine's layers: the loss scale is dynamic, and a constant one changes nothing in BF16."""

from __future__ import annotations

import pytest
import torch
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import RECIPES, gpu_run
from small_run import Curve, train, weights

from megafp8.optimizer.schedules import current_loss_scale


@pytest.mark.parametrize("optimizer", ["", "--overlap-grad-reduce --overlap-param-gather"])
def test_overflow_halves_the_loss_scale_and_keeps_the_weights(optimizer: str) -> None:
    with gpu_run(f"--initial-loss-scale 4294967296 --hysteresis 1 {optimizer}", precision="--fp16") as run:
        before = weights(run)
        assert train(run, 1).grad_norms == [None]
        assert current_loss_scale(run.training_state.optimizer) == 2.0**31
        for name, tensor in weights(run).items():
            assert torch.equal(tensor, before[name]), name
        curve = train(run, 30, first_step=2)
        assert curve.grad_norms[-1] is not None, "it has found a scale"
        assert curve.losses[-1] < curve.losses[0]


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise"])
def test_constant_power_of_two_loss_scale_is_bit_equal(recipe: str) -> None:
    def ends(extra: str) -> tuple[Curve, dict[str, torch.Tensor]]:
        with gpu_run(f"{RECIPES[recipe]} {extra} --no-one-pass-optimizer") as run:
            return train(run, 3), weights(run)

    (curve, plain), (scaled_curve, scaled) = ends(""), ends("--loss-scale 1024")
    assert scaled_curve == curve
    for name, tensor in plain.items():
        assert torch.equal(tensor, scaled[name]), name
