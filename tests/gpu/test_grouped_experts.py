"""Experts in one launch per GEMM against Transformer Engine's linears: losses, graphs, resuming, checkpoints.

Those of the rowwise recipe are on emulated layers, and are compared with emulated linears.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import gap, gpu_curve, gpu_run, unbroken_and_resumed
from megatron.core.transformer.moe.moe_layer import MoELayer
from small_run import SourceSamples, train, weights

from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.models.grouped_moe import GroupedExperts
from megafp8.models.router import GatingInFP32
from megafp8.nonfinite.operands import NonfiniteOperands
from megafp8.training.evaluation import build_batches
from megafp8.training.run import Run
from megafp8.training.step import train_step

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 0.01 --moe-shared-expert-intermediate-size 128 --transformer-impl transformer_engine "
    "--moe-grouped-gemm"
)
RECIPES = {
    "bf16": "",
    "tensorwise": "--fp8-format e4m3 --fp8-recipe tensorwise",
    "delayed": "--fp8-format e4m3 --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max",
    "tensorwise hybrid": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed hybrid": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max",
}
GRAPH = "--cuda-graph-impl local --cuda-graph-warmup-steps 2"
STEPS = 4
# Relative difference of losses: two roundings of one training.
CLOSE = dict.fromkeys(RECIPES, 5e-3) | {"bf16": 1e-3}
ROWWISE = {
    "rowwise": "--fp8-format e4m3 --fp8-recipe rowwise",
    "rowwise hybrid": "--fp8-format hybrid --fp8-recipe rowwise",
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def flags_of(recipe: str, kernels: str = "triton", is_emulated: bool = False) -> str:
    chosen = f"{(RECIPES | ROWWISE)[recipe]} {EXPERTS} --moe-expert-kernels {kernels}"
    if is_emulated or recipe in ROWWISE:
        return f"{chosen.replace('transformer_engine', 'emulated')} --cuda-graph-impl none"
    return chosen


curve = functools.partial(gpu_curve, num_steps=STEPS)


@each_recipe
def test_they_train_as_those_of_transformer_engine(recipe: str) -> None:
    ours, theirs = curve(flags_of(recipe)), curve(flags_of(recipe, "te"))
    print(f"\n{recipe}: {ours.losses} {theirs.losses}, norms {ours.grad_norms} {theirs.grad_norms}")
    assert gap(ours, theirs) < CLOSE[recipe]
    assert ours.grad_norms[0] == pytest.approx(theirs.grad_norms[0], rel=2e-2)


@pytest.mark.parametrize("recipe", [*ROWWISE, "tensorwise hybrid", "delayed hybrid"])
def test_they_train_as_emulated_linears(recipe: str) -> None:
    ours, theirs = (curve(flags_of(recipe, kernels, is_emulated=True)) for kernels in ("triton", "te"))
    print(f"\n{recipe}: {ours.losses} {theirs.losses}, norms {ours.grad_norms} {theirs.grad_norms}")
    assert gap(ours, theirs) < CLOSE["tensorwise"]
    assert ours.grad_norms[0] == pytest.approx(theirs.grad_norms[0], rel=2e-2)


@each_recipe
def test_they_are_the_default(recipe: str) -> None:
    with gpu_run(flags_of(recipe).replace("--moe-expert-kernels triton", "")) as run:
        assert any(
            isinstance(module, GroupedExperts) for chunk in run.training_state.chunks for module in chunk.modules()
        )


@each_recipe
def test_a_cuda_graph_equals_launched_kernels(recipe: str) -> None:
    found = []
    for graph in ("", GRAPH):
        with gpu_run(f"{flags_of(recipe)} {graph}") as run:
            losses = train(run, 7).losses
            found.append((losses, weights(run)))
            assert run.graph.is_captured == bool(graph)
    (plain, plain_weights), (captured, captured_weights) = found
    assert captured == plain
    assert all(torch.equal(plain_weights[name], captured_weights[name]) for name in plain_weights)


@pytest.mark.parametrize(
    "recompute", ["selective --recompute-modules moe", "full --recompute-method uniform --recompute-num-layers 1"]
)
@each_recipe
def test_recomputation_changes_no_bit(recipe: str, recompute: str) -> None:
    plain, recomputed = (curve(f"{flags_of(recipe)} {extra}") for extra in ("", f"--recompute-granularity {recompute}"))
    assert recomputed == plain


@each_recipe
def test_experts_with_a_capacity_are_those_of_transformer_engine(recipe: str) -> None:
    capacity = "--moe-expert-capacity-factor 0.75"
    ours, theirs = (curve(f"{flags_of(recipe, kernels)} {capacity}") for kernels in ("triton", "te"))
    print(f"\n{recipe}: {ours.losses} {theirs.losses}")
    assert gap(ours, theirs) < CLOSE[recipe]
    assert ours.losses[0] != curve(flags_of(recipe)).losses[0]  # tokens were dropped


def waits_of_step(extra: str) -> Counter[str]:
    """The lines at which the host waits for the device in the fifth step, as far as torch's own calls do."""
    with gpu_run(extra) as run:
        train(run, 4)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                train(run, 1, first_step=5)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{each.filename}:{each.lineno}" for each in caught if "synchronizing CUDA" in str(each.message))


@pytest.mark.parametrize("graph", ["", GRAPH])
@each_recipe
def test_the_host_waits_only_where_a_dense_model_lets_it(recipe: str, graph: str) -> None:
    """Both read loss and checks of a step. Transformer Engine's experts read the numbers of their tokens, too."""
    dense = waits_of_step(f"{RECIPES[recipe]} --transformer-impl transformer_engine {graph}")
    assert dense
    assert not waits_of_step(f"{flags_of(recipe)} {graph}") - dense
    if not graph:
        assert waits_of_step(flags_of(recipe, "te")) - dense


@pytest.mark.parametrize(
    "routing",
    [
        "--moe-router-load-balancing-type seq_aux_loss",
        "--moe-router-load-balancing-type global_aux_loss --moe-z-loss-coeff 1e-3",
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-pre-softmax",
        "--moe-layer-freq 2",
        "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-layernorm",
    ],
)
def test_a_graph_has_every_routing(routing: str) -> None:
    text = f"{flags_of('tensorwise')} {routing} --cuda-graph-warmup-steps 2"
    launched, captured = (curve(f"{text} --cuda-graph-impl {kind}") for kind in ("none", "local"))
    assert captured == launched


@pytest.mark.parametrize("kernels", ["triton", "te"])
@pytest.mark.parametrize("recipe", [*RECIPES, "rowwise"])
def test_a_run_resumes_to_the_bit(recipe: str, kernels: str, tmp_path: Path) -> None:
    unbroken, resumed = unbroken_and_resumed(flags_of(recipe, kernels), STEPS, tmp_path)
    assert unbroken == resumed


def test_delayed_scales_are_those_of_transformer_engine() -> None:
    """The experts of the first layer: amaxes of weights and tokens to the bit, others up to roundings."""
    found = []
    for kernels in ("triton", "te"):
        with gpu_run(flags_of("delayed", kernels)) as run:
            train(run, 1)
            modules = [module for chunk in run.training_state.chunks for module in chunk.modules()]
            experts = next(module.experts for module in modules if isinstance(module, MoELayer))
            if kernels == "triton":
                scales = [state.quant_scale.clone() for state in experts.quantizer_state.values()]
            else:
                scales = [scales_of_grouped_linear(linear) for linear in (experts.linear_fc1, experts.linear_fc2)]
            found.append(scales)
    for number, (ours, theirs) in enumerate(zip(*found, strict=True), start=1):
        print(f"\nlinear_fc{number}, input, weight, grad_output of each expert:\n{ours}\n{theirs}")
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0)
        exact = [0, 1] if number == 1 else [1]
        assert torch.equal(ours[exact], theirs[exact])


def scales_of_grouped_linear(linear: Any) -> torch.Tensor:
    """Transformer Engine's scales of the input, weight and output gradient of each expert, FP32 [3, E]."""
    rows = []
    for direction, operand in (("fwd", "input"), ("fwd", "weight"), ("bwd", "grad_output")):
        scales, stride = linear.fp8_meta[f"scaling_{direction}"].scale, linear._num_fp8_tensors_per_gemm[direction]
        rows.append(scales[linear._offsets[operand] :: stride][: linear.num_gemms].clone())
    return torch.stack(rows)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_infinite_tokens_are_counted_and_leave_the_history(recipe: str) -> None:
    """One value of the tokens of the first layer, in every forward pass of a step."""

    def spoil(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        spoiled = args[0].clone()
        spoiled.view(-1)[3] = torch.inf
        return (spoiled, *args[1:])

    with gpu_run(flags_of(recipe)) as run:
        train(run, 2)
        experts = first_experts(run)
        handle = experts.register_forward_pre_hook(spoil)
        nonfinite = nonfinite_operands_of_step(run, 3)
        handle.remove()
        print(f"\n{nonfinite}")
        assert nonfinite.num_non_finite
        names = nonfinite.infinite_amaxes if recipe == "delayed" else tuple(nonfinite.non_finite_operands())
        assert all(name.startswith("layers.0.experts.") for name in names), nonfinite
        assert 2 <= len(names) <= 4, "a token has two experts, and a step two microbatches"
        assert all(name.endswith(".linear_fc1.input") for name in names), nonfinite
        if recipe == "delayed":
            assert torch.isfinite(experts.quantizer_state["linear_fc1"].amax_history).all()
        assert not nonfinite_operands_of_step(run, 4).num_non_finite


@pytest.mark.parametrize("graph", ["", GRAPH])
def test_an_infinite_weight_is_counted_in_the_step_that_reads_it(graph: str) -> None:
    with gpu_run(f"{flags_of('tensorwise')} {graph}") as run:
        train(run, 5)
        first_experts(run).linear_fc2.data[1, 0, 0] = torch.inf
        found = [tuple(nonfinite_operands_of_step(run, step).non_finite_operands()) for step in (6, 7)]
        assert found == [("layers.0.experts.1.linear_fc2.weight",), ()], "the update writes a finite weight"


def first_experts(run: Run) -> GroupedExperts:
    modules = (module for chunk in run.training_state.chunks for module in chunk.modules())
    return next(module for module in modules if isinstance(module, GroupedExperts))


def nonfinite_operands_of_step(run: Run, step: int) -> NonfiniteOperands:
    samples, batch = SourceSamples(run.config.data.seq_length), run.global_batch_size
    batches = build_batches(run, samples, (step - 1) * batch, step * batch, num_workers=0)
    return train_step(run, batches, Progress(step - 1, (step - 1) * batch)).nonfinite_operands


@pytest.mark.parametrize(("before", "after"), [("triton", "te"), ("te", "triton")])
def test_checkpoints_are_interchangeable(before: str, after: str, tmp_path: Path) -> None:
    with gpu_run(flags_of("bf16", before)) as run:
        train(run, STEPS)
        path = save_checkpoint(tmp_path, run.config, run.training_state, Progress(STEPS, STEPS * run.global_batch_size))
        unbroken = train(run, STEPS, first_step=STEPS + 1)
    with gpu_run(flags_of("bf16", after)) as run:
        load_checkpoint(path, run.config, run.training_state)
        assert gap(train(run, STEPS, first_step=STEPS + 1), unbroken) < CLOSE["bf16"]


def test_logits_of_the_router_and_their_gradients_are_those_of_fp32() -> None:
    torch.manual_seed(0)
    tokens = torch.randn(4096, 2, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(128, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(4096, 2, 128, device="cuda")
    logits = GatingInFP32.apply(tokens, weight)
    found = torch.autograd.grad(logits, (tokens, weight), grad)
    exact = tokens.double() @ weight.double().t()
    wanted = torch.autograd.grad(exact, (tokens, weight), grad.double())
    assert logits.dtype == torch.float32 and (logits - exact).norm() < 1e-6 * exact.norm()
    for ours, theirs in zip(found, wanted, strict=True):
        # Rounded once, to BF16: other sums round only few numbers to another neighbour.
        assert (ours != theirs.bfloat16()).float().mean() < 1e-2
