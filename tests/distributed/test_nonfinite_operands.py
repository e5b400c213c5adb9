"""A non-finite activation that quantization hides: all ranks name it in the same step, and do what the flag says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from ranks import run_ranks
from small_run import SourceSamples, build_run, fingerprint, small_config, weights
from torch import Tensor

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.progress import NOT_FINITE, OPERAND, HighPrecisionFallback, Progress
from megafp8.config.schema import RunConfig
from megafp8.errors import NumericsError
from megafp8.mcore.modules import named_attentions
from megafp8.metrics.records import OperandCounts
from megafp8.models.layer_runtime import emulated_linears_by_name
from megafp8.quantization.delayed_scaling import DelayedState
from megafp8.training import pretrain
from megafp8.training.evaluation import build_batches
from megafp8.training.run import Run
from megafp8.training.step import StepResult, progress_after_step, train_step

BAD_STEP, STEPS, BATCH = 3, 5, 8
BAD = "layers.1.linear_fc2"
TENSORWISE = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
DELAYED = (
    "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 64 --fp8-amax-compute-algo max "
    "--fp8-delayed-start te"
)
RECIPES = {
    "tensorwise": TENSORWISE,
    "delayed": DELAYED,
    "blockwise": "--bf16 --fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8": "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--bf16 --fp4-format e2m1",
    "quartet2": (
        "--bf16 --fp4-format e2m1 --fp4-recipe quartet2 --hidden-size 128 --kv-channels 128 --ffn-hidden-size 384"
    ),
}
HIDING = ("tensorwise", "delayed", "blockwise")  # an infinity; the others let it reach the loss
SHOWING = tuple(name for name in RECIPES if name not in HIDING)
BF16 = "--on-nonfinite-activation bf16 --max-skipped-steps 1"
LOG_INTERVAL = 2
LOOP = (
    "--train-iters 6 --lr-warmup-iters 1 --eval-iters 0 --no-progress-bar --save-interval 100 "
    f"--log-interval {LOG_INTERVAL}"
)
LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2 --micro-batch-size 2",
    "dp2": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}


def poison(run: Run, bad_rank: int, value: float) -> None:
    """One element of the input of `BAD` is not finite in the first microbatch of the bad step, on one rank."""
    linears = dict(emulated_linears_by_name(run.training_state.chunks))
    if BAD not in linears or dist.get_rank() != bad_rank:
        return
    num_passes = [0]

    def spoil(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        num_passes[0] += 1
        if num_passes[0] != (BAD_STEP - 1) * run.num_microbatches + 1:
            return inputs
        spoiled = inputs[0].clone()
        spoiled.view(-1)[0] = value
        return (spoiled, *inputs[1:])

    linears[BAD].register_forward_pre_hook(spoil)


@dataclass(frozen=True)
class Seen:
    """Some steps on one rank: results, hash of weights before each step, progress at the end, error."""

    results: list[StepResult]
    weights: list[str]
    progress: Progress
    error: str = ""
    has_infinite_amax: bool = False
    quant_scales: tuple[float, ...] = ()
    fallbacks: tuple[str, ...] = ()


def train(config: RunConfig, bad_rank: int, value: float) -> Seen:
    run, progress, error = build_run(config), Progress(), ""
    poison(run, bad_rank, value)
    results: list[StepResult] = []
    hashes: list[str] = []
    batches = build_batches(run, SourceSamples(config.data.seq_length), 0, STEPS * BATCH, num_workers=0)
    for _ in range(STEPS):
        hashes.append(fingerprint(weights(run)))
        try:
            result = train_step(run, batches, progress)
        except NumericsError as raised:
            error = str(raised)
            break
        values = None if result.is_skipped else (result.loss, result.grad_norm or 0.0)
        progress = progress_after_step(run, progress, result.bad_step, values)
        results.append(result)
    hashes.append(fingerprint(weights(run)))
    states = [m for c in unwrap_model(run.training_state.chunks) for m in c.modules() if isinstance(m, DelayedState)]
    linears = dict(emulated_linears_by_name(run.training_state.chunks))
    return Seen(
        results, hashes, progress, error,
        any(bool(state.infinite_amaxes.any()) for state in states),
        tuple(linears[BAD].quantizer_state.quant_scale.tolist()) if states and BAD in linears else (),
        tuple(name for name, linear in linears.items() if linear.is_fallback),
    )  # fmt: skip


@pytest.mark.parametrize("recipe", [RECIPES[name] for name in HIDING], ids=HIDING)
def test_hidden_infinity_is_named_and_changes_nothing_else(recipe: str) -> None:
    (seen,) = run_ranks(1, train, small_config("llama", f"{recipe} --seq-length 64"), 0, torch.inf)
    assert not seen.error and len(seen.results) == STEPS
    for step, result in enumerate(seen.results, start=1):
        found = result.nonfinite_operands.non_finite_operands()
        assert ("layers.1.linear_fc2.input" in found) == (step == BAD_STEP), (step, found)
    nonfinite = seen.results[BAD_STEP - 1].nonfinite_operands
    assert "layers.1.linear_fc2.input (fprop, wgrad): 1 non-finite" in nonfinite.describe()
    assert not seen.results[BAD_STEP - 1].is_skipped, "the default only records"


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_error_about_the_loss_names_the_operand(recipe: str) -> None:
    (seen,) = run_ranks(1, train, small_config("llama", f"{RECIPES[recipe]} --seq-length 64"), 0, torch.inf)
    assert f"step {BAD_STEP}: loss or gradients are not finite" in seen.error
    assert "operands of quantized linears: layers.1.linear_fc2.input (fprop, wgrad): 1 non-finite" in seen.error


def train_showing(recipe: str, flags: str, world_size: int = 1) -> list[Seen]:
    """Steps under a recipe with which the infinity also makes the loss NaN."""
    config = small_config("llama", f"{RECIPES[recipe]} --seq-length 64 {flags}", world_size)
    answers = run_ranks(world_size, train, config, world_size - 1, torch.inf)
    assert len({seen.error for seen in answers}) == 1
    return answers


@pytest.mark.parametrize("recipe", SHOWING)
def test_stop_holds_where_the_loss_is_bad_too(recipe: str) -> None:
    seen = train_showing(recipe, "--on-nonfinite-activation stop --max-skipped-steps 2")[0]
    assert f"step {BAD_STEP}: operands of quantized linears are not finite (samples 16-23): {BAD}.input" in seen.error
    assert "loss or gradients are not finite either:\n  rank 0: loss is" in seen.error
    assert seen.weights[BAD_STEP - 1] == seen.weights[BAD_STEP]


@pytest.mark.parametrize("recipe", SHOWING)
def test_first_linear_moves_where_the_loss_is_bad_too(recipe: str) -> None:
    stages = train_showing(recipe, f"{LAYOUTS['pp2']} {BF16}", 2)
    assert not stages[0].error
    for seen in stages:
        assert seen.progress.history.moved_linears == (HighPrecisionFallback(BAD, BAD_STEP, OPERAND),), (
            "not what follows from it"
        )
        assert [skipped.reason for skipped in seen.progress.history.skipped] == [OPERAND]
        assert [result.is_skipped for result in seen.results] == [step == BAD_STEP for step in range(1, STEPS + 1)]
    assert [seen.fallbacks for seen in stages] == [(), (BAD,)]


def test_bad_loss_alone_moves_and_stops_nothing() -> None:
    def spoil_loss(flags: str) -> tuple[str, Progress]:
        run = build_run(small_config("llama", f"{TENSORWISE} --max-skipped-steps 1 {flags}"))
        layer = unwrap_model(run.training_state.chunks)[0].output_layer
        layer.register_forward_hook(lambda module, args, output: (output[0] * torch.nan, *output[1:]))
        batches = build_batches(run, SourceSamples(run.config.data.seq_length), 0, BATCH, num_workers=0)
        result = train_step(run, batches, Progress())
        assert result.bad_step is not None
        return result.bad_step.reason, progress_after_step(run, Progress(), result.bad_step, None)

    for policy in ("stop", "bf16"):
        ((reason, progress),) = run_ranks(1, spoil_loss, f"--on-nonfinite-activation {policy}")
        assert reason == NOT_FINITE and not progress.history.moved_linears, "output gradients follow from the loss"


def test_nan_under_nvfp4_is_named() -> None:
    (seen,) = run_ranks(1, train, small_config("llama", f"{RECIPES['nvfp4']} --seq-length 64"), 0, torch.nan)
    assert torch.isfinite(torch.tensor(seen.results[BAD_STEP - 1].loss)), "FP4 has no NaN: the loss cannot show it"
    assert "layers.1.linear_fc2.input (fprop, wgrad): 1" in seen.results[BAD_STEP - 1].nonfinite_operands.describe()


def test_infinite_amax_is_cleared_from_the_window() -> None:
    (seen,) = run_ranks(1, train, small_config("llama", DELAYED), 0, torch.inf)
    assert seen.results[BAD_STEP - 1].nonfinite_operands.infinite_amaxes == (f"{BAD}.input",)
    assert not seen.has_infinite_amax
    (clean,) = run_ranks(1, train, small_config("llama", DELAYED), 1, torch.inf)
    assert seen.quant_scales[0] == pytest.approx(clean.quant_scales[0], rel=0.2), "made from later amaxes again"


def test_most_recent_amax_needs_no_clearing() -> None:
    recipe = DELAYED.replace("--fp8-amax-compute-algo max", "--fp8-amax-compute-algo most_recent")
    (seen,) = run_ranks(1, train, small_config("llama", recipe), 0, torch.inf)
    assert seen.results[BAD_STEP - 1].nonfinite_operands.infinite_amaxes == ()
    assert f"{BAD}.input" in seen.results[BAD_STEP - 1].nonfinite_operands.non_finite_operands()
    (clean,) = run_ranks(1, train, small_config("llama", recipe), 1, torch.inf)
    assert seen.quant_scales[0] == pytest.approx(clean.quant_scales[0], rel=0.2), "made from the next amaxes"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_all_ranks_stop_before_the_update(layout: str) -> None:
    config = small_config("llama", f"{TENSORWISE} {layout} --on-nonfinite-activation stop", 2)
    answers = run_ranks(2, train, config, 1, torch.inf)
    assert len({seen.error for seen in answers}) == 1
    assert f"step {BAD_STEP}: operands of quantized linears are not finite" in answers[0].error
    assert "layers.1.linear_fc2.input (fprop, wgrad)" in answers[0].error
    for seen in answers:
        assert seen.weights[BAD_STEP - 1] == seen.weights[BAD_STEP], "no weight has changed"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_all_ranks_skip_the_update(layout: str) -> None:
    config = small_config("llama", f"{DELAYED} {layout} --on-nonfinite-activation skip --max-skipped-steps 1", 2)
    answers = run_ranks(2, train, config, 1, torch.inf)
    for seen in answers:
        assert [result.is_skipped for result in seen.results] == [step == BAD_STEP for step in range(1, STEPS + 1)]
        assert seen.weights[BAD_STEP - 1] == seen.weights[BAD_STEP] != seen.weights[BAD_STEP + 1]
        assert [skipped.reason for skipped in seen.progress.history.skipped] == [OPERAND]
        assert not seen.has_infinite_amax


@pytest.mark.parametrize("recipe", [TENSORWISE, DELAYED], ids=["tensorwise", "delayed"])
def test_linear_moves_to_high_precision(recipe: str) -> None:
    config = small_config("llama", f"{recipe} {LAYOUTS['pp2']} {BF16}", 2)
    answers = run_ranks(2, train, config, 1, torch.inf)
    fallbacks = (HighPrecisionFallback(BAD, BAD_STEP, OPERAND),)
    assert [seen.progress.history.moved_linears for seen in answers] == [fallbacks, fallbacks], (
        "also on the other stage"
    )
    assert [seen.fallbacks for seen in answers] == [(), (BAD,)]
    assert [result.is_skipped for result in answers[0].results] == [step == BAD_STEP for step in range(1, STEPS + 1)]


def run_loop(folder: Path, flags: str) -> tuple[Progress, str]:
    """The training loop under `bf16`, with the bad activation, until the flags end it; resumed where it can be."""
    config = small_config("llama", f"{DELAYED} {BF16} {LOOP} --save {folder} --load {folder} {flags}")

    def start() -> tuple[Progress, str]:
        run = build_run(config)
        if not list(folder.glob("iter_*")):
            poison(run, 0, torch.inf)
        return pretrain.train(run), fingerprint(weights(run))

    return run_ranks(1, start)[0]


def test_moved_linear_is_recorded_and_resumed(tmp_path: Path) -> None:
    progress, straight = run_loop(tmp_path / "straight", "")
    run_loop(tmp_path / "resumed", "--exit-interval 4")
    resumed_progress, resumed = run_loop(tmp_path / "resumed", "")
    assert progress.history.moved_linears == (HighPrecisionFallback(BAD, BAD_STEP, OPERAND),)
    assert (progress, straight) == (resumed_progress, resumed), "to the bit"
    run = load_run(tmp_path / "straight")
    counted = {step.step: step.num_non_finite_operands for step in run.steps if step.num_non_finite_operands}
    assert counted == {BAD_STEP: 2}
    (bad,) = [step for step in run.steps if step.step == BAD_STEP]
    non_finite = {name: counts for name, counts in bad.operand_counts.items() if counts.non_finite}
    assert non_finite == {
        f"{BAD}.input.{gemm}": OperandCounts(non_finite=1, saturated=0) for gemm in ("fprop", "wgrad")
    }
    named = {step.step for step in run.steps if step.operand_counts}
    saturated = {step.step for step in run.steps if step.num_saturated_operands}
    assert named == {BAD_STEP} | {step for step in saturated if step % LOG_INTERVAL == 0} != saturated | {BAD_STEP}
    details = {event.name: event.detail for event in run.events}
    assert details["non-finite operands"].startswith(f"{BAD}.input (fprop, wgrad): 1 non-finite")
    assert details["amax history cleared"].startswith(f"{BAD}.input: ")
    assert details["linear moved"].startswith(f"{BAD} is in high precision from step {BAD_STEP + 1} on")


def test_output_gradient_is_named() -> None:
    def infinite_gradient() -> str:
        run = build_run(small_config("llama", TENSORWISE))
        layer = unwrap_model(run.training_state.chunks)[0].decoder.layers[1]

        def spoil(module: torch.nn.Module, gradients: tuple[Tensor, ...]) -> tuple[Any, ...]:
            spoiled = gradients[0].clone()
            spoiled.view(-1)[0] = torch.inf
            return (spoiled, *gradients[1:])

        layer.mlp.linear_fc1.register_full_backward_pre_hook(spoil)
        batches = build_batches(run, SourceSamples(run.config.data.seq_length), 0, BATCH, num_workers=0)
        return train_step(run, batches, Progress()).nonfinite_operands.describe()

    (text,) = run_ranks(1, infinite_gradient)
    assert text.startswith("layers.1.linear_fc1.grad_output (dgrad, wgrad): 2 non-finite"), text


def test_attention_is_numbered_over_all_stages() -> None:
    config = small_config("llama", f"{DELAYED} --pipeline-model-parallel-size 2 --micro-batch-size 2", 2)

    def names() -> list[str]:
        chunks = unwrap_model(build_run(config).training_state.chunks)
        return [name for chunk in chunks for name, _ in named_attentions(chunk)]

    assert run_ranks(2, names) == [["layers.0.attention"], ["layers.1.attention"]]
