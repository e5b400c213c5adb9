"""Experts in one launch per GEMM against Transformer Engine's linears: losses, graphs, resuming, checkpoints."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
if importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available():
    pytest.skip("needs Transformer Engine and a GPU", allow_module_level=True)

from gpu_runs import gpu_run, unbroken_and_resumed
from small_run import Curve, train, weights

from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.models.grouped_moe import GroupedExperts

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 0.01 --moe-shared-expert-intermediate-size 128 --transformer-impl transformer_engine "
    "--moe-grouped-gemm"
)
RECIPES = {"bf16": "", "tensorwise": "--fp8-format e4m3 --fp8-recipe tensorwise"}
STEPS = 4
CLOSE = {"bf16": 1e-3, "tensorwise": 5e-3}  # relative difference of losses: two roundings of one training
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def flags_of(recipe: str, kernels: str = "triton") -> str:
    return f"{RECIPES[recipe]} {EXPERTS} --moe-expert-kernels {kernels}"


@functools.cache
def curve(extra: str) -> Curve:
    with gpu_run(extra) as run:
        return train(run, STEPS)


def gap(one: Curve, other: Curve) -> float:
    """Largest relative difference of the losses."""
    return max(abs(a - b) / b for a, b in zip(one.losses, other.losses, strict=True))


@each_recipe
def test_they_train_as_those_of_transformer_engine(recipe: str) -> None:
    ours, theirs = curve(flags_of(recipe)), curve(flags_of(recipe, "te"))
    print(f"\n{recipe}: {ours.losses} {theirs.losses}, norms {ours.grad_norms} {theirs.grad_norms}")
    assert gap(ours, theirs) < CLOSE[recipe]
    assert ours.grad_norms[0] == pytest.approx(theirs.grad_norms[0], rel=2e-2)


def test_they_are_the_default() -> None:
    with gpu_run(flags_of("bf16").replace("--moe-expert-kernels triton", "")) as run:
        assert any(isinstance(module, GroupedExperts) for chunk in run.trainee.chunks for module in chunk.modules())


@each_recipe
def test_a_cuda_graph_equals_launched_kernels(recipe: str) -> None:
    found = []
    for graph in ("", "--cuda-graph-impl local --cuda-graph-warmup-steps 2"):
        with gpu_run(f"{flags_of(recipe)} {graph}") as run:
            losses = train(run, 7).losses
            found.append((losses, weights(run)))
            assert (run.graph is not None and run.graph.graph is not None) == bool(graph)
    (plain, plain_weights), (captured, captured_weights) = found
    assert captured == plain
    assert all(torch.equal(plain_weights[name], captured_weights[name]) for name in plain_weights)


@each_recipe
def test_a_run_resumes_to_the_bit(recipe: str, tmp_path: Path) -> None:
    unbroken, resumed = unbroken_and_resumed(flags_of(recipe), STEPS, tmp_path)
    assert unbroken == resumed


@pytest.mark.parametrize(("before", "after"), [("triton", "te"), ("te", "triton")])
def test_checkpoints_are_interchangeable(before: str, after: str, tmp_path: Path) -> None:
    with gpu_run(flags_of("bf16", before)) as run:
        train(run, STEPS)
        path = save_checkpoint(tmp_path, run.config, run.trainee, Progress(STEPS, STEPS * run.global_batch_size))
        unbroken = train(run, STEPS, first_step=STEPS + 1)
    with gpu_run(flags_of("bf16", after)) as run:
        load_checkpoint(path, run.config, run.trainee)
        assert gap(train(run, STEPS, first_step=STEPS + 1), unbroken) < CLOSE["bf16"]
