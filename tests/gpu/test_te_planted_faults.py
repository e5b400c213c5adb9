"""Planted faults in Transformer Engine's layers. Not run on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import RECIPES, gpu_run
from small_run import SourceSamples

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.layer_faults import Fault, LayerFault
from megafp8.checkpoint.progress import Progress
from megafp8.training.evaluation import build_batches
from megafp8.training.step import StepResult, progress_after_step, train_step

FLAGS = "--cuda-graph-impl none --max-skipped-steps 1 --no-use-transformer-engine-op-fuser"
"""A fused MLP calls no linear_fc2, into which an infinite value could be planted."""


def results(recipe: str, fault: str) -> list[StepResult]:
    """Two steps: the second has the fault."""
    found: list[StepResult] = []
    with gpu_run(f"{RECIPES[recipe]} {FLAGS}") as run:
        planted, progress = LayerFault(run, Fault(fault, first_step=2)), Progress()
        samples = SourceSamples(run.config.data.seq_length)
        for step in (1, 2):
            planted.start(step)
            first = progress.consumed_samples
            batches = build_batches(run, samples, first, first + run.global_batch_size, num_workers=0)
            result = train_step(run, batches, progress)
            planted.end_step()
            progress = progress_after_step(run, progress, result.bad_step, (result.loss, result.grad_norm or 0.0))
            found.append(result)
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_faults_change_their_step_only(recipe: str) -> None:
    spiked, infinite = results(recipe, "spike-batch"), results(recipe, "infinite-activation")
    assert spiked[0].loss == infinite[0].loss and spiked[1].loss != infinite[1].loss
    assert infinite[0].nonfinite_operands.num_non_finite == 0
    assert "layers.0.linear_fc2.input" in infinite[1].nonfinite_operands.non_finite_operands()


def test_attention_logits_are_inflated() -> None:
    """With --qk-layernorm they could not be."""
    with gpu_run(f"{RECIPES['tensorwise']} {FLAGS}") as run:
        planted, seen = LayerFault(run, Fault("inflated-qk", first_step=2, growth=32)), []
        (linear,) = planted.linears[:1]
        linear.register_forward_hook(lambda _, args, output: seen.append(output[0].detach().clone()))
        hidden = torch.randn(256, 1, run.config.model.hidden_size, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            for step in (1, 2):
                planted.start(step)
                linear(hidden)
    plain, inflated = seen
    assert inflated.abs().sum() > 2 * plain.abs().sum()
