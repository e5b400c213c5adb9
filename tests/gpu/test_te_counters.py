"""Counters and guard of Transformer Engine's linears: an infinite activation is named before the update, and is left in
no amax history; the guard has all statistics; a linear that is moved computes in BF16.
Moving, and the counts of Transformer Engine's own casts, were not run on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import FP8_RECIPES, RECIPES, gpu_run
from small_run import SourceSamples, train, weights

from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import OPERAND, HighPrecisionFallback, Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.mcore.modules import named_linears
from megafp8.te import layers
from megafp8.training.evaluation import build_batches
from megafp8.training.extensions.guard import LayerStatistics
from megafp8.training.run import Run
from megafp8.training.step import StepResult, forward_backward, progress_after_step, train_step

SPOILED = "layers.1.linear_fc2"


FUSED = "--use-transformer-engine-op-fuser"
ALL = tuple(
    HighPrecisionFallback(f"layers.{layer}.{name}", 0, "test")
    for layer in (0, 1)
    for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
)


def linears(run: Run) -> dict[str, torch.nn.Module]:
    return dict(named_linears(run.training_state.chunks[0].module))


def step(run: Run, progress: Progress, is_eager: bool = False) -> tuple[StepResult, Progress]:
    first = progress.consumed_samples
    samples = SourceSamples(run.config.data.seq_length)
    batches = build_batches(run, samples, first, first + run.global_batch_size, num_workers=0)
    result = train_step(run, batches, progress, is_eager=is_eager)
    return result, progress_after_step(run, progress, result.bad_step, (result.loss, result.grad_norm or 0.0))


def make_infinite(run: Run) -> Any:
    """One value of the input of a linear, in every forward pass."""

    def spoil(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        spoiled = args[0].clone()
        spoiled.view(-1)[3] = torch.inf
        return (spoiled, *args[1:])

    return linears(run)[SPOILED].register_forward_pre_hook(spoil)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_an_infinite_activation_is_named_before_the_update(recipe: str, policy: str) -> None:
    flags = "--quantize-kernels triton --cuda-graph-impl none --max-skipped-steps 1"
    with gpu_run(f"{RECIPES[recipe]} {flags} --on-nonfinite-activation {policy}") as run:
        progress = Progress()
        for _ in range(3):
            result, progress = step(run, progress)
            assert result.nonfinite_operands.num_non_finite == 0
        before, handle = weights(run), make_infinite(run)
        result, progress = step(run, progress)
        handle.remove()
        nonfinite = result.nonfinite_operands
        assert f"{SPOILED}.input" in nonfinite.non_finite_operands(), nonfinite
        assert (result.bad_step is not None and result.bad_step.reason == OPERAND) == (policy == "skip")
        changed = [name for name, tensor in weights(run).items() if not torch.equal(tensor, before[name])]
        assert bool(changed) == (policy == "warn")
        if recipe == "delayed":
            assert f"{SPOILED}.input" in nonfinite.infinite_amaxes
            assert all(
                bool(torch.isfinite(tensor).all()) for tensor in layers.delayed_state(run.training_state.chunks[0])
            )
        result, progress = step(run, progress)
        assert result.nonfinite_operands.num_non_finite == 0 and result.bad_step is None


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_own_casts_are_seen(recipe: str) -> None:
    """Transformer Engine casts; a tensor of zeros, whose scale is 1 too, is no fault."""
    with gpu_run(f"{RECIPES[recipe]} --quantize-kernels te --cuda-graph-impl none") as run:
        progress = Progress()
        for _ in range(3):
            result, progress = step(run, progress)
            assert result.nonfinite_operands.num_non_finite == 0
        handle = make_infinite(run)
        result, progress = step(run, progress)
        handle.remove()
        assert f"{SPOILED}.input" in result.nonfinite_operands.non_finite_operands()


@pytest.mark.parametrize("is_fused", [True, False])
def test_the_guard_has_all_statistics(is_fused: bool) -> None:
    fuser = "--use-transformer-engine-op-fuser" if is_fused else "--no-use-transformer-engine-op-fuser"
    with gpu_run(f"{RECIPES['tensorwise']} --fp8-guard warn {fuser}") as run:
        samples = SourceSamples(run.config.data.seq_length)
        batches = build_batches(run, samples, 0, run.global_batch_size, num_workers=0)
        collector = LayerStatistics(run)
        with collector.start().attached():
            forward_backward(run, batches, run.num_microbatches, forward_only=False)
        assert not {name for (_, name), value in collector.take().items() if value < 0}


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_the_linear_is_moved_and_a_resumed_run_is_equal(recipe: str, tmp_path: Path) -> None:
    """The fault is in an eager step between two CUDA graphs."""
    flags = (
        f"{RECIPES[recipe]} --quantize-kernels triton --cuda-graph-impl local --cuda-graph-warmup-steps 2 "
        "--max-skipped-steps 1 --on-nonfinite-activation bf16"
    )
    with gpu_run(flags) as run:
        progress = Progress()
        for _ in range(4):
            _, progress = step(run, progress)
        assert run.graph.is_captured
        before, handle = weights(run), make_infinite(run)
        result, progress = step(run, progress, is_eager=True)
        handle.remove()
        assert result.bad_step is not None and SPOILED in [linear.name for linear in result.bad_step.fallbacks]
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(run).items())
        assert not run.graph.is_captured, "it has the kernels of before"
        fallbacks = progress.history.moved_linears
        path = save_checkpoint(tmp_path, run.config, run.training_state, progress)
        unbroken = train(run, 4, first_step=progress.step + 1)
        assert run.graph.is_captured
        names = {linear.name for linear in fallbacks}
        assert {name for name, linear in linears(run).items() if not linear.fp8} == names
        last = weights(run)
    with gpu_run(flags) as run:
        loaded = load_checkpoint(path, run.config, run.training_state)
        assert loaded.progress.history.moved_linears == fallbacks
        run.change_linears(fallbacks)
        assert train(run, 4, first_step=loaded.progress.step + 1) == unbroken
        assert all(torch.equal(tensor, last[name]) for name, tensor in weights(run).items())


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_model_that_is_moved_computes_as_bf16(recipe: str) -> None:
    """From a fused MLP, whose linears are called from then on."""
    with gpu_run(RECIPES["bf16"]) as run:
        plain = train(run, 3)
    with gpu_run(f"{RECIPES[recipe]} {FUSED}") as run:
        run.change_linears(ALL)
        assert train(run, 3).losses == pytest.approx(plain.losses, rel=1e-5)
    with gpu_run(f"{RECIPES[recipe]} {FUSED}") as run:  # one layer, later
        train(run, 2)
        run.change_linears(ALL[4:])
        assert train(run, 2, first_step=3).losses == pytest.approx([plain.losses[2]] * 2, rel=0.2)
        assert [linear.fp8 for linear in linears(run).values()][4:] == [False] * 4
