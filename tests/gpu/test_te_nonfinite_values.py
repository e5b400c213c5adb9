"""Non-finite values with Transformer Engine's layers: a skipped step changes nothing, and every bit is hashed."""

from __future__ import annotations

import pytest
import torch
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import RECIPES, gpu_run
from small_run import SourceSamples, weights

from megafp8.checkpoint.progress import (
    NOT_FINITE,
    SPIKE,
    Progress,
)
from megafp8.training.evaluation import build_batches
from megafp8.training.extensions.replica_check import (
    BitHash,
    check_replicas,
    replicas_of,
)
from megafp8.training.precision import delayed_scaling_tensors
from megafp8.training.run import Run
from megafp8.training.step import StepResult, progress_after_step, train_step

SPIKES = "--spike-policy skip --spike-window 8 --spike-min-steps 3"


def step(run: Run, progress: Progress) -> tuple[StepResult, Progress]:
    batch = run.global_batch_size
    first = progress.consumed_samples
    batches = build_batches(run, SourceSamples(run.config.data.seq_length), first, first + batch, num_workers=0)
    result = train_step(run, batches, progress)
    return result, progress_after_step(run, progress, result.bad_step, (result.loss, result.grad_norm or 0.0))


def state(run: Run) -> dict[str, torch.Tensor]:
    """Copies of weights and of delayed scaling's state."""
    remembered = [
        tensor for chunk in run.training_state.chunks for tensor in delayed_scaling_tensors(chunk, run.implementation)
    ]
    return weights(run) | {f"remembered {number}": tensor.clone() for number, tensor in enumerate(remembered)}


def multiply_gradient(run: Run, factor: float) -> torch.utils.hooks.RemovableHandle:
    norm = next(value for name, value in run.training_state.chunks[0].named_parameters() if "final_layernorm" in name)
    return norm.register_hook(lambda gradient: gradient * factor)


@pytest.mark.parametrize("recipe", [*RECIPES, "delayed attention"])
@pytest.mark.parametrize("factor", [float("nan"), 1e6])
def test_a_skipped_step_changes_nothing(recipe: str, factor: float) -> None:
    attention = "--num-attention-heads 2 --fp8-dot-product-attention" if "attention" in recipe else ""
    recipe = recipe.split()[0]
    with gpu_run(f"{RECIPES[recipe]} {attention} --max-skipped-steps 1 {SPIKES}") as run:
        progress = Progress()
        for _ in range(4):
            _, progress = step(run, progress)
        before = state(run)
        assert recipe != "delayed" or len(before) > len(weights(run))
        hook = multiply_gradient(run, factor)
        result, progress = step(run, progress)
        hook.remove()
        assert result.bad_step is not None
        assert result.bad_step.reason == (SPIKE if factor == factor else NOT_FINITE)
        for name, tensor in state(run).items():
            assert torch.equal(tensor, before[name]), name
        result, progress = step(run, progress)
        assert result.bad_step is None and result.loss == result.loss


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_hashed_on_the_device(recipe: str) -> None:
    gather = "" if recipe == "bf16" else "--fp8-param-gather"
    with gpu_run(f"{RECIPES[recipe]} {gather}") as run:
        step(run, Progress())
        check_replicas(run, 1)
        hasher = BitHash(run.platform.device)
        for copy in replicas_of(run):
            on_host = BitHash(torch.device("cpu")).of(copy.tensor.detach().cpu())
            assert hasher.of(copy.tensor).item() == on_host.item(), copy.name
