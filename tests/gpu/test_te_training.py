"""Transformer Engine's layers on a GPU: fast settings against plain ones, FP8 weights, and resuming."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

import transformer_engine.pytorch  # noqa: F401 - loads the extension module that comes next
import transformer_engine_torch as tex
from gpu_runs import FP8_RECIPES, RECIPES, gpu_curve, gpu_run, unbroken_and_resumed
from small_run import Curve, SourceSamples, train, weights

from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import finish_param_gather, save_checkpoint
from megafp8.checkpoint.state_dict import chained_optimizers
from megafp8.optimizer.fused_adam import FusedAdamOptimizer
from megafp8.te import layers as te_layers
from megafp8.training.evaluation import build_batches, evaluation_mode
from megafp8.training.step import forward_backward

PLAIN = "--no-one-pass-optimizer --no-gradient-overwrite --no-split-rope-fusion"
FUSER = "--use-transformer-engine-op-fuser"
OURS, THEIRS = "--quantize-kernels triton", "--quantize-kernels te"
LOW_PRECISION = "--use-precision-aware-optimizer"
HEADS = "--num-attention-heads 2"  # of 128 channels, as attention in FP8 requires
FP8_ATTENTION = f"{HEADS} --fp8-dot-product-attention"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
STEPS = 12
COMPARED = 6  # losses; later ones diverge
curve = functools.partial(gpu_curve, num_steps=STEPS)


def gap(one: Curve, other: Curve) -> float:
    """Largest relative difference of the first losses."""
    return max(abs(a - b) / b for a, b in zip(one.losses[:COMPARED], other.losses[:COMPARED], strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_learns(recipe: str) -> None:
    losses = curve(RECIPES[recipe]).losses
    assert losses[-1] < losses[0] - 0.5, losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_fast_settings_change_one_summation_order(recipe: str) -> None:
    """The first step is equal, the norm except for its last bits. Later steps differ by rounding."""
    plain, fast = curve(f"{RECIPES[recipe]} {PLAIN}"), curve(RECIPES[recipe])
    print(f"\n{recipe}: gap {gap(fast, plain):.2e}, norms {plain.grad_norms[0]!r} {fast.grad_norms[0]!r}")
    assert fast.losses[0] == plain.losses[0]
    assert fast.grad_norms[0] == pytest.approx(plain.grad_norms[0], rel=1e-6)
    assert gap(fast, plain) < 2e-3


@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_operations_follow_separate_layers(recipe: str) -> None:
    fusion = "--no-swiglu-quantize-fusion" if recipe in ("delayed", "blockwise") else ""
    layers, fused = curve(RECIPES[recipe]), curve(f"{RECIPES[recipe]} {FUSER} {fusion}")
    print(f"\n{recipe}: gap {gap(fused, layers):.2e}, norms {layers.grad_norms[:3]} {fused.grad_norms[:3]}")
    assert fused.grad_norms[0] == pytest.approx(layers.grad_norms[0], rel=1e-3 if recipe == "bf16" else 2e-2)
    assert gap(fused, layers) < (2e-2 if recipe == "delayed" else 5e-3)


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_residual_gradients_added_by_the_norm_follow_separate_adds(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum is rounded once instead of twice. The forward pass is unchanged."""
    calls, kernel = [], tex.rmsnorm_bwd_add
    monkeypatch.setattr(tex, "rmsnorm_bwd_add", lambda *given: calls.append(given) or kernel(*given))
    fused = f"{RECIPES[recipe]} {FUSER}"
    apart = curve(fused)
    assert not calls
    added = curve(f"{fused} --residual-norm-fusion")
    print(f"\n{recipe}: gap {gap(added, apart):.2e}, norms {apart.grad_norms[:3]} {added.grad_norms[:3]}")
    assert calls and added.losses[0] == apart.losses[0]
    assert added.grad_norms[0] == pytest.approx(apart.grad_norms[0], rel=1e-3)
    assert gap(added, apart) < (2e-2 if recipe == "delayed" else 5e-3)


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_swiglu_in_one_pass_follows_fused_operations(recipe: str) -> None:
    """Codes differ where an exponential's last bit decides a rounding."""
    fused = f"{RECIPES[recipe]} {FUSER}"
    plain, fast = curve(f"{fused} --no-swiglu-quantize-fusion"), curve(fused)
    print(f"\n{recipe}: gap {gap(fast, plain):.2e}, norms {plain.grad_norms[:3]} {fast.grad_norms[:3]}")
    assert fast.losses[0] == pytest.approx(plain.losses[0], rel=1e-5)
    assert fast.grad_norms[0] == pytest.approx(plain.grad_norms[0], rel=1e-3)
    assert gap(fast, plain) < 5e-3


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_our_casts_train_like_transformer_engine(recipe: str) -> None:
    """Layers without fused operations have casts only: the same bytes, and so bitwise equal losses.

    Under tensorwise scaling, one of them uses the amax that the rotation recorded.
    """
    assert curve(f"{RECIPES[recipe]} {OURS}") == curve(f"{RECIPES[recipe]} {THEIRS}")


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_our_swiglu_follows_fused_operations(recipe: str) -> None:
    fused = f"{RECIPES[recipe]} {FUSER}"
    plain, ours = curve(f"{fused} {THEIRS} --no-swiglu-quantize-fusion"), curve(f"{fused} {OURS}")
    print(f"\n{recipe}: gap {gap(ours, plain):.2e}, norms {plain.grad_norms[:3]} {ours.grad_norms[:3]}")
    assert ours.losses[0] == pytest.approx(plain.losses[0], rel=1e-5)
    assert ours.grad_norms[0] == pytest.approx(plain.grad_norms[0], rel=1e-3)
    assert gap(ours, plain) < 5e-3


def test_attention_in_fp8_follows_bf16() -> None:
    plain, fp8 = curve(f"{RECIPES['delayed']} {HEADS}"), curve(f"{RECIPES['delayed']} {FP8_ATTENTION}")
    print(f"\ngap {gap(fp8, plain):.2e}, norms {plain.grad_norms[:3]} {fp8.grad_norms[:3]}")
    assert fp8.losses[0] != plain.losses[0]
    assert fp8.losses[0] == pytest.approx(plain.losses[0], rel=2e-3)
    assert gap(fp8, plain) < 2e-2


def test_fp8_attention_recomputation_is_bit_equal() -> None:
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert curve(f"{RECIPES['delayed']} {FP8_ATTENTION} {full}") == curve(f"{RECIPES['delayed']} {FP8_ATTENTION}")


def test_fp8_attention_kernel_runs() -> None:
    with gpu_run(f"{RECIPES['delayed']} {FP8_ATTENTION}") as run:
        train(run, 1)
        chosen = te_layers.selected_attention_backend()
        assert chosen is not None and chosen.endswith(", FP8)")
        scales = [scale for scale in te_layers.delayed_state(run.training_state.chunks[0]) if scale.numel() == 9]
        assert len(scales) == 2 and all((scale != 1).any() for scale in scales)


def test_fused_optimizer_updates_like_transformer_engine() -> None:
    """Without clipping the norm does not enter the update. FP32 roundings rarely change how a weight rounds to BF16."""
    found = []
    for extra in ("--clip-grad 0 --no-one-pass-optimizer", "--clip-grad 0"):
        with gpu_run(extra) as run:
            train(run, 1)
            found.append(weights(run))
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, rtol=2**-7, atol=1e-6, msg=name)
        assert (found[1][name] != weight).float().mean().item() < 1e-3, name


@pytest.mark.parametrize("fuser", ["", FUSER])
def test_overwriting_gradients_equals_adding_to_zero(fuser: str) -> None:
    found = []
    for extra in ("--no-gradient-overwrite", ""):
        with gpu_run(f"{fuser} {extra}") as run:
            train(run, 2)
            named = run.training_state.chunks[0].module.named_parameters()
            found.append({name: weight.main_grad.clone() for name, weight in named})
            assert run.num_microbatches == 2
    plain, overwritten = found
    assert not [name for name, gradient in plain.items() if not torch.equal(gradient, overwritten[name])]


# Fused operations quantize BF16 weights again in every microbatch, by scales that the previous one has changed. FP8
# weights keep their codes. So each step has one microbatch.
FUSED = f"{FUSER} --global-batch-size 4"


@pytest.mark.parametrize("fuser", ["", FUSED])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_fp8_weights_follow_bf16_weights(recipe: str, fuser: str) -> None:
    extra = f"{RECIPES[recipe]} {fuser}".strip()
    plain = curve(extra)
    with gpu_run(f"{extra} --fp8-param-gather") as run:
        fp8 = train(run, STEPS)
        sizes = {buffer.param_data.dtype: buffer.param_data.numel() for buffer in run.training_state.chunks[0].buffers}
    print(
        f"\n{recipe} {fuser}: gap {gap(fp8, plain):.2e}; {plain.losses[0]!r} {fp8.losses[0]!r}, "
        f"{plain.grad_norms[0]!r} {fp8.grad_norms[0]!r}"
    )
    assert sizes[torch.uint8] > sizes[torch.bfloat16], sizes
    # The initial weights are the same, quantized once instead of in every forward pass.
    assert fp8.losses[0] == pytest.approx(plain.losses[0], rel=1e-4)
    assert fp8.grad_norms[0] == pytest.approx(plain.grad_norms[0], rel=2e-2)
    # Scales of delayed scaling are one step later for weights that are cast right after their update.
    assert gap(fp8, plain) < (2e-2 if recipe == "delayed" else 2e-3)


@pytest.mark.parametrize("masters", ["fp32", "fp16"])
def test_fp8_weights_with_masters_in_adam_follow_those_without(masters: str) -> None:
    weights = f"{RECIPES['delayed']} --fp8-param-gather"
    adams = curve(f"{weights} {LOW_PRECISION} --main-params-dtype {masters}")
    assert gap(adams, curve(weights)) < 2e-3  # an H100 had 3e-4 in both


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_rowwise_cast_of_shards_changes_no_weight(recipe: str) -> None:
    """The codes after an update are those of the complete weights cast together."""
    with gpu_run(f"{RECIPES[recipe]} --fp8-param-gather") as run:
        train(run, 2)
        for chunk in run.training_state.chunks:
            chunk.start_param_sync(force_sync=True)
            for name, weight in chunk.module.named_parameters():
                if hasattr(weight, "_quantizer"):
                    again = weight.main_param.view(weight.shape).bfloat16()
                    assert weight.main_param.numel() == weight.numel(), "one rank holds all of it"
                    quantizer = weight._quantizer.copy()
                    codes = quantizer(again).dequantize()
                    assert torch.equal(codes, weight.dequantize()), name


@pytest.mark.parametrize(
    ("recipe", "extra"),
    [
        ("delayed", ""),
        ("delayed", "--fp8-param-gather"),
        ("delayed", f"{FUSER} --fp8-param-gather"),
        ("tensorwise", "--fp8-param-gather"),
        ("blockwise", "--fp8-param-gather"),
        ("delayed", f"{OVERLAP} --fp8-param-gather"),
        ("blockwise", f"{OVERLAP} --fp8-param-gather"),
        ("delayed", FP8_ATTENTION),
        ("delayed", f"{LOW_PRECISION} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"),
        ("delayed", f"{LOW_PRECISION} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"),
        ("delayed", f"{LOW_PRECISION} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 --no-one-pass-optimizer"),
        ("tensorwise", f"{LOW_PRECISION} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 --fp8-param-gather"),
        ("tensorwise", f"{LOW_PRECISION} --main-params-dtype fp16"),
        ("delayed", f"{LOW_PRECISION} --fp8-param-gather"),
        ("delayed", f"{LOW_PRECISION} --main-params-dtype fp16 --fp8-param-gather"),
    ],
)
def test_resume_equals_the_unbroken_run(recipe: str, extra: str, tmp_path: Path) -> None:
    unbroken, resumed = unbroken_and_resumed(f"{RECIPES[recipe]} {extra}", 3, tmp_path)
    assert resumed.losses == unbroken.losses


@pytest.mark.parametrize(("before", "after"), [("", FUSER), (FUSER, "")])
def test_fused_operations_and_linears_resume_each_others_scales(before: str, after: str, tmp_path: Path) -> None:
    with gpu_run(f"{RECIPES['delayed']} {before}") as run:
        train(run, 3)
        path = save_checkpoint(tmp_path, run.config, run.training_state, Progress(3, 3 * run.global_batch_size))
        saved = [tensor.clone() for tensor in te_layers.delayed_state(run.training_state.chunks[0])]
        unbroken = train(run, 1, first_step=4)
    with gpu_run(f"{RECIPES['delayed']} {after}") as run:
        load_checkpoint(path, run.config, run.training_state)
        loaded = [tensor.clone() for tensor in te_layers.delayed_state(run.training_state.chunks[0])]
        resumed = train(run, 1, first_step=4)
        now = te_layers.delayed_state(run.training_state.chunks[0])
    assert len(saved) == len(loaded) == len(now) > 0
    assert all(torch.equal(a, b) for a, b in zip(saved, loaded, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(loaded, now, strict=True))
    # With scales of 1 the difference would be larger. This is the distance of fused operations from linears.
    assert resumed.losses[0] == pytest.approx(unbroken.losses[0], rel=2e-4)


def test_validation_does_not_change_delayed_scaling() -> None:
    """Validation reads samples of no training step. Transformer Engine records their amaxes."""
    with gpu_run(RECIPES["delayed"]) as run:
        train(run, 2)
        state = te_layers.delayed_state(run.training_state.chunks[0])
        before, size = [tensor.clone() for tensor in state], run.global_batch_size
        with evaluation_mode(run):
            batches = build_batches(run, SourceSamples(run.config.data.seq_length), 2 * size, 3 * size, num_workers=0)
            forward_backward(run, batches, run.num_microbatches, forward_only=True)
            entered = [tensor.clone() for tensor in state]
    assert not all(torch.equal(*pair) for pair in zip(entered, before, strict=True))
    assert all(torch.equal(*pair) for pair in zip(state, before, strict=True))


@pytest.mark.parametrize("is_evaluated", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_weights_gathered_early_have_their_transposes(recipe: str, is_evaluated: bool) -> None:
    """As before a checkpoint or in a validation: the next backward pass reads the transposes."""
    with gpu_run(f"{RECIPES[recipe]} {OVERLAP} --fp8-param-gather") as run:
        train(run, 2)
        if is_evaluated:
            with evaluation_mode(run):
                pass
        else:
            finish_param_gather(run.config.parallel, run.training_state)
        weights_in_fp8 = [
            weight for weight in run.training_state.chunks[0].parameters() if hasattr(weight, "_quantizer")
        ]
        assert weights_in_fp8
        for weight in weights_in_fp8:
            assert not weight._transpose_invalid
            assert torch.equal(weight._transpose, weight._data.t())


def with_states(states: str) -> str:
    exp_avg, exp_avg_sq = states.split()
    return f"{LOW_PRECISION} --exp-avg-dtype {exp_avg} --exp-avg-sq-dtype {exp_avg_sq}"


@pytest.mark.parametrize("states", ["fp8 fp16", "fp16 fp16", "fp8 bf16"])
def test_scaled_moments_equal_transformer_engine(states: str) -> None:
    """After one step all but a few values are the same, and those are one code apart. Losses stay close."""
    found = []
    for extra in ("--no-one-pass-optimizer", ""):
        with gpu_run(f"--clip-grad 0 {with_states(states)} {extra}") as run:
            assert isinstance(run.training_state.optimizer, FusedAdamOptimizer) == (not extra)
            train(run, 1)
            parts = [part.optimizer for part in chained_optimizers(run.training_state.optimizer)]
            shards = [(part, shard) for part in parts for group in part.param_groups for shard in group["params"]]
            names = ("exp_avg", "exp_avg_sq")
            found.append([part.get_unscaled_state(shard, name).clone() for part, shard in shards for name in names])
    step = {"fp8": 2**-3, "fp16": 2**-10, "bf16": 2**-7}
    for index, (theirs, ours) in enumerate(zip(*found, strict=True)):
        apart = (ours - theirs).abs()
        largest = torch.maximum(ours.abs(), theirs.abs())
        # Below the normal numbers the steps have constant length: for FP8 2^-9 of 448.
        bound = step[states.split()[index % 2]] * largest + 2**-17 * largest.max()
        assert (apart <= bound).all()
        assert (apart > 2**-18 * largest).float().mean() < 2e-3


@pytest.mark.parametrize("states", ["fp8 fp16", "fp16 fp16"])
def test_scaled_moments_follow_transformer_engines(states: str) -> None:
    ours, theirs = curve(with_states(states)), curve(f"{with_states(states)} --no-one-pass-optimizer")
    print(f"\n{states}: gap {gap(ours, theirs):.2e}")
    assert ours.losses[0] == theirs.losses[0]
    assert gap(ours, theirs) < 5e-3


@pytest.mark.parametrize("states", ["bf16 bf16", "fp8 fp16", "fp16 fp16", "fp32 fp32"])
def test_low_precision_states_learn(states: str) -> None:
    low, full = curve(with_states(states)), curve("")
    print(f"\n{states}: gap {gap(low, full):.2e}")
    assert gap(low, full) < 2e-2
