"""`--fp8-guard smooth-swiglu` on Transformer Engine's layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import RECIPES, gpu_run
from small_run import train

from megafp8.checkpoint.progress import SMOOTHED, HighPrecisionFallback, Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.mcore.modules import named_linears
from megafp8.training.resume import resume
from megafp8.training.run import Run

NAME = "layers.0.linear_fc2"
CHANGED = (HighPrecisionFallback(NAME, 2, "reason", SMOOTHED),)
OUTLIER = 1e6  # in units of the other channels, which E4M3 then rounds to 0 under one scale


def plant_outlier(run: Run) -> list[float]:
    """One channel of the input is large, and its weights are zero: high precision does not see it.

    Returns:
        A list to which each forward pass adds the relative error of the output.
    """
    linear: Any = dict(named_linears(run.training_state.chunks[0].module))[NAME]
    factors = torch.ones(linear.weight.shape[1], device="cuda", dtype=torch.bfloat16)
    factors[0] = OUTLIER
    weight_and_bias, mask = linear._get_weight_and_bias_tensors, (factors == 1).to(torch.bfloat16)
    references, errors = list[torch.Tensor](), list[float]()

    def spoil(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        references.append(inputs[0].detach() @ (weight_and_bias()[0].detach() * mask).t())
        return inputs[0] * factors, *inputs[1:]

    def compare(_: Any, unused: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        reference = references.pop()
        errors.append(float((outputs[0] - reference).norm() / reference.norm()))

    linear.register_forward_pre_hook(spoil)
    linear.register_forward_hook(compare)
    linear._get_weight_and_bias_tensors = lambda: (weight_and_bias()[0] * mask, weight_and_bias()[1])
    linear.fuse_wgrad_accumulation = False
    for part in run.parts:
        part.linears_changed()
    return errors


def losses(flags: str, is_smoothed: bool) -> list[float]:
    """Of six steps; from the third on with scales per channel."""
    with gpu_run(f"{flags} --no-use-transformer-engine-op-fuser --cuda-graph-warmup-steps 1") as run:
        found = train(run, 2).losses
        if is_smoothed:
            run.change_linears(CHANGED)
        return [*found, *train(run, 4, 3).losses]


@pytest.mark.parametrize("graph", ["none", "local"])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_smoothing_changes_little_without_outliers(recipe: str, graph: str) -> None:
    plain, smoothed = (losses(f"{RECIPES[recipe]} --cuda-graph-impl {graph}", given) for given in (False, True))
    assert smoothed[:2] == plain[:2] and smoothed[2:] != plain[2:]
    assert smoothed == pytest.approx(plain, rel=5e-3)


def test_a_graph_of_a_smoothed_layer_equals_launched_kernels() -> None:
    graph, launched = (losses(f"{RECIPES['tensorwise']} --cuda-graph-impl {impl}", True) for impl in ("local", "none"))
    assert graph == launched


def test_smoothing_repairs_an_outlier_channel() -> None:
    """Tensorwise scaling leaves nothing of the other channels without it."""
    flags = f"{RECIPES['tensorwise']} --cuda-graph-impl none --no-use-transformer-engine-op-fuser"
    with gpu_run(flags) as run:
        errors = plant_outlier(run)
        train(run, 2)
        spoiled = errors[:]
        run.change_linears(CHANGED)
        losses = train(run, 2, 3).losses
    repaired = errors[len(spoiled) :]
    assert min(spoiled) > 0.9 and max(repaired) < 0.1, (spoiled, repaired)
    assert all(torch.isfinite(torch.tensor(losses)))


def test_fused_mlp_is_split_and_resumes_bitwise(tmp_path: Path) -> None:
    """With fused operations up to the change."""
    flags = f"{RECIPES['tensorwise']} --cuda-graph-impl none --use-transformer-engine-op-fuser --save {tmp_path}"
    with gpu_run(flags) as run:
        train(run, 2)
        run.change_linears(CHANGED)
        train(run, 1, 3)
        progress = Progress(3, 3 * run.global_batch_size)
        progress = dataclasses.replace(progress, history=progress.history.after_fallback(CHANGED))
        save_checkpoint(tmp_path, run.config, run.training_state, progress)
        unbroken = train(run, 2, 4).losses
    with gpu_run(f"{flags} --load {tmp_path}") as run:
        resume(run)
        assert train(run, 2, 4).losses == unbroken
