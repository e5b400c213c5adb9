"""`--fp8-guard smooth-swiglu` on Transformer Engine's layers. NOT RUN on a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
if importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available():
    pytest.skip("needs Transformer Engine and a GPU", allow_module_level=True)

from gpu_runs import RECIPES, gpu_run
from small_run import train

from megafp8.checkpoint.progress import SMOOTHED, MovedLinear, Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.mcore.modules import named_linears
from megafp8.training.resume import resume
from megafp8.training.run import Run

NAME = "layers.0.linear_fc2"
CHANGED = (MovedLinear(NAME, 2, "reason", SMOOTHED),)
OUTLIER = 3e4


def spoil(run: Run) -> None:
    """One channel of the input is large, and its weights are zero: high precision does not see it."""
    linear: Any = dict(named_linears(run.trainee.chunks[0].module))[NAME]
    factors = torch.ones(linear.weight.shape[1], device="cuda", dtype=torch.bfloat16)
    factors[0] = OUTLIER
    linear.register_forward_pre_hook(lambda _, inputs: (inputs[0] * factors, *inputs[1:]))
    weight_and_bias, mask = linear._get_weight_and_bias_tensors, (factors == 1).to(torch.bfloat16)
    linear._get_weight_and_bias_tensors = lambda: (weight_and_bias()[0] * mask, weight_and_bias()[1])
    linear.fuse_wgrad_accumulation = False
    if run.wgrad_overwrite is not None:
        run.wgrad_overwrite.choose_weights()


def losses(flags: str, is_smoothed: bool, is_spoiled: bool = False) -> list[float]:
    """Of six steps; from the third on with scales per channel."""
    with gpu_run(f"{flags} --no-use-transformer-engine-op-fuser --cuda-graph-warmup-steps 1") as run:
        if is_spoiled:
            spoil(run)
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
    """Tensorwise scaling gives the other channels few codes without it."""
    flags = f"{RECIPES['tensorwise']} --cuda-graph-impl none"
    clean = losses("--cuda-graph-impl none", is_smoothed=False)
    spoiled, repaired = (losses(flags, given, is_spoiled=True) for given in (False, True))
    gaps = [sum(abs(a - b) for a, b in zip(each[2:], clean[2:], strict=True)) for each in (spoiled, repaired)]
    assert gaps[1] < 0.5 * gaps[0], (clean, spoiled, repaired)


def test_fused_mlp_is_split_and_resumes_bitwise(tmp_path: Path) -> None:
    """With fused operations up to the change."""
    flags = f"{RECIPES['tensorwise']} --cuda-graph-impl none --use-transformer-engine-op-fuser --save {tmp_path}"
    with gpu_run(flags) as run:
        train(run, 2)
        run.change_linears(CHANGED)
        train(run, 1, 3)
        progress = Progress(3, 3 * run.global_batch_size)
        progress = dataclasses.replace(progress, history=progress.history.after_move(CHANGED))
        save_checkpoint(tmp_path, run.config, run.trainee, progress)
        unbroken = train(run, 2, 4).losses
    with gpu_run(f"{flags} --load {tmp_path}") as run:
        resume(run)
        assert train(run, 2, 4).losses == unbroken
