"""A non-finite number on one rank: all ranks stop at the same step, and no weight has changed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from ranks import run_ranks
from small_run import FP8, PLAIN, VIRTUAL, build_run, fingerprint, small_config, train, weights
from torch import Tensor

from megafp8.config.schema import RunConfig
from megafp8.errors import NumericsError
from megafp8.nonfinite.gradients import GradientNormCheck
from megafp8.optimizer.fused_adam import FusedAdamOptimizer
from megafp8.training.run import Run
from megafp8.training.step_parts import build_bad_step_detector

BAD_STEP = 2
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
TENSOR = "--tensor-model-parallel-size 2"
PIPELINE = "--pipeline-model-parallel-size 2 --micro-batch-size 2"

Spoil = Callable[[Run], Run]


class WithNorm(FusedAdamOptimizer):
    """Returns the norm of reduced gradients as the fused optimizer does, whose kernels need a GPU."""

    def __init__(self, run: Run):
        super().__init__(run.training_state.optimizer, torch.device("cpu"))
        self.groups = [group for chunk in run.training_state.chunks for group in chunk.bucket_groups]

    def squared_norm(self) -> Tensor:
        buckets = [(bucket, group) for group in self.groups for bucket in group.buckets]
        shards = [
            bucket.grad_data.chunk(group.intra_distributed_optimizer_instance_size)[
                group.intra_distributed_optimizer_instance_rank
            ]
            for bucket, group in buckets
        ]
        return torch.stack([shard.float().square().sum().double() for shard in shards]).sum()


def checked_by_norm(run: Run, spoil: Spoil) -> Run:
    """Disable the check of gradients before the reduction, from now on."""
    training_state = dataclasses.replace(run.training_state, optimizer=WithNorm(run))
    has_replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    run.bad_steps.gradients = GradientNormCheck(run.training_state.chunks, torch.device("cpu"), has_replicas)
    return spoil(dataclasses.replace(run, training_state=training_state))


def spoil_gradient(run: Run, value: float) -> Run:
    """Multiply the gradient of the first norm weight in this rank's last layer by `value`, from now on."""
    layer = unwrap_model(run.training_state.chunks)[-1].decoder.layers[-1]
    layer.pre_mlp_layernorm.weight.register_hook(lambda gradient: gradient * value)
    return run


def spoil_loss(run: Run, value: float) -> Run:
    """Multiply this rank's losses by `value`, from now on."""

    def forward_step(batches: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> tuple[Tensor, Any]:
        output, loss = run.forward_step(batches, model)
        return output, lambda losses: loss(losses * value)

    spoiled = dataclasses.replace(run)
    vars(spoiled)["forward_step"] = forward_step  # in place of the cached one
    return spoiled


def spoil_attention(run: Run, value: float) -> Run:
    """Multiply this rank's gradient at the output of attention in its first layer by `value`, from now on."""
    attention = unwrap_model(run.training_state.chunks)[0].decoder.layers[0].self_attention
    attention.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * value, *gradients[1:]))
    return run


def unchanged(run: Run) -> Run:
    return run


def stop(config: RunConfig, spoil: Spoil, bad_rank: int, others: Spoil = unchanged) -> tuple[str, bool]:
    """The error's text on this rank, and whether its weights equal those before the bad step."""
    run = build_run(config)
    train(run, BAD_STEP - 1)
    before = fingerprint(weights(run))
    run = (spoil if dist.get_rank() == bad_rank else others)(run)
    with pytest.raises(NumericsError) as caught:
        train(run, 1, BAD_STEP)
    dist.barrier()  # no rank is left in a collective
    return str(caught.value), fingerprint(weights(run)) == before


LAYOUTS = [
    pytest.param(1, PLAIN, id="one"),
    pytest.param(2, PLAIN, id="dp2"),
    pytest.param(2, f"{PLAIN} {OVERLAP}", id="dp2-overlap"),
    pytest.param(2, f"--bf16 {OVERLAP}", id="dp2-overlap-bf16"),
    pytest.param(2, f"--bf16 --grad-reduce-in-bf16 {FP8}", id="dp2-bf16-gradients-fp8"),
    pytest.param(2, f"{PLAIN} {TENSOR} --sequence-parallel", id="tp2-sp"),
    pytest.param(2, f"{PLAIN} {PIPELINE}", id="pp2"),
    pytest.param(2, f"{PLAIN} {VIRTUAL}", id="pp2-virtual2"),
    pytest.param(2, f"{PLAIN} --context-parallel-size 2", id="cp2"),
]


@pytest.mark.parametrize(("world_size", "flags"), LAYOUTS)
def test_bad_gradient(world_size: int, flags: str) -> None:
    bad_rank = world_size - 1
    config = small_config("llama", flags, world_size)
    answers = run_ranks(world_size, stop, config, partial(spoil_gradient, value=float("nan")), bad_rank)
    texts, are_untouched = zip(*answers, strict=True)
    assert all(are_untouched)
    assert len(set(texts)) == 1, "every rank says the same"
    assert f"step {BAD_STEP}: " in texts[0]
    assert f"  rank {bad_rank}: first bad tensor: gradient of " in texts[0]
    assert "pre_mlp_layernorm.weight" in texts[0]
    assert "rank 0" not in texts[0] or world_size == 1, "only the rank that brought it up is named"


def norm_report(flags: str, spoil: Spoil, bad_rank: int, world_size: int = 2, others: Spoil = unchanged) -> str:
    """What all ranks report about a bad step that only the norm of reduced gradients reveals."""
    spoils = [partial(checked_by_norm, spoil=each) for each in (spoil, others)]
    config = small_config("llama", f"{flags} {OVERLAP}", world_size)
    texts, are_untouched = zip(*run_ranks(world_size, stop, config, spoils[0], bad_rank, spoils[1]), strict=True)
    assert all(are_untouched)
    assert len(set(texts)) == 1, "every rank says the same"
    return texts[0]


@pytest.mark.parametrize("bad_rank", [0, -1])
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(1, PLAIN, id="one"),
        pytest.param(2, PLAIN, id="dp2"),
        pytest.param(2, "--bf16", id="dp2-bf16"),
        pytest.param(2, f"{PLAIN} --context-parallel-size 2", id="cp2"),
        pytest.param(3, "--bf16 --global-batch-size 6 --micro-batch-size 2", id="dp3-bf16"),
    ],
)
def test_bad_gradient_is_named_after_the_reduction(world_size: int, flags: str, bad_rank: int) -> None:
    """For a small tensor in the shard of one rank, which may be the bad rank or another."""
    bad_rank %= world_size
    text = norm_report(flags, partial(spoil_gradient, value=float("nan")), bad_rank, world_size)
    assert f"  rank {bad_rank}: first bad tensor: gradient of " in text
    assert "pre_mlp_layernorm.weight" in text
    assert text.count("  rank ") == 1, "only the rank that brought it up is named"


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_first_of_many_bad_gradients_is_named_after_the_reduction(bad_rank: int) -> None:
    """The gradients of one rank are bad from the output of attention downwards."""
    text = norm_report(PLAIN, partial(spoil_attention, value=float("nan")), bad_rank)
    assert f"  rank {bad_rank}: first bad tensor: gradient of decoder.layers.0.self_attention.linear_proj" in text
    assert text.count("  rank ") == 1


def test_two_bad_ranks_are_named_after_the_reduction() -> None:
    spoil = partial(spoil_attention, value=float("nan"))
    text = norm_report(PLAIN, spoil, 0, others=spoil)
    first = "gradient of decoder.layers.0.self_attention.linear_proj"
    assert all(f"  rank {rank}: first bad tensor: {first}" in text for rank in (0, 1)), text


@pytest.mark.parametrize(
    ("world_size", "flags", "is_watched"),
    [
        pytest.param(1, "", False, id="one"),
        pytest.param(2, "", False, id="dp2"),
        pytest.param(2, "--context-parallel-size 2", False, id="cp2"),
        pytest.param(2, TENSOR, False, id="tp2"),
        pytest.param(4, TENSOR, True, id="dp2-tp2"),
        pytest.param(4, PIPELINE, True, id="dp2-pp2"),
    ],
)
def test_gradients_are_checked_before_the_reduction_where_the_norm_cannot_name_the_rank(
    world_size: int, flags: str, is_watched: bool
) -> None:
    """Tensor-parallel ranks and stages sum gradients of norms and tied embeddings after the reduction."""
    config = small_config("llama", f"{PLAIN} {OVERLAP} {flags}", world_size)

    def watched() -> bool:
        run = checked_by_norm(build_run(config), unchanged)
        detector = build_bad_step_detector(config, run.training_state, run.implementation, torch.device("cpu"))
        return type(detector.gradients) is not GradientNormCheck

    assert run_ranks(world_size, watched) == [is_watched] * world_size


def spoil_norm(run: Run) -> Run:
    """Let the norm of this rank's shards overflow, from now on. None of their gradients' norms overflows."""
    run.training_state.optimizer.squared_norm = lambda: torch.tensor(float("inf"), dtype=torch.float64)
    return run


def test_overflowing_norms_are_named_after_the_reduction() -> None:
    """For a single tensor, or only for the sum over a complete shard."""
    text = norm_report(PLAIN, partial(spoil_gradient, value=1e25), 1)
    assert "  rank 1: first bad tensor: gradient of " in text and "  rank 0" not in text
    text = norm_report(PLAIN, spoil_norm, 1)
    assert "  rank 1: first bad tensor: none individually; " in text and "  rank 0" not in text


@pytest.mark.parametrize(
    ("world_size", "flags", "value"),
    [
        *(pytest.param(*layout.values, math.nan, id=f"{layout.id}-nan") for layout in LAYOUTS[1:3] + LAYOUTS[5:]),
        pytest.param(2, PLAIN, math.inf, id="dp2-inf"),
        pytest.param(2, f"{PLAIN} {PIPELINE}", math.inf, id="pp2-inf"),
    ],
)
def test_bad_loss(world_size: int, flags: str, value: float) -> None:
    bad_rank = world_size - 1
    config = small_config("gpt2", flags, world_size)
    answers = run_ranks(world_size, stop, config, partial(spoil_loss, value=value), bad_rank)
    texts, are_untouched = zip(*answers, strict=True)
    assert all(are_untouched)
    assert len(set(texts)) == 1
    assert f"step {BAD_STEP}: " in texts[0]
    if "tensor" not in flags:
        assert f"  rank {bad_rank}: loss is not finite; " in texts[0]


@pytest.mark.parametrize("flags", [PLAIN, f"{PLAIN} {OVERLAP}"])
def test_gradient_norm_overflow_stops_the_run(flags: str) -> None:
    """Every element is finite, but clipping would multiply all of them by zero."""
    config = small_config("llama", flags, 2)
    answers = run_ranks(2, stop, config, partial(spoil_gradient, value=1e25), 1)
    assert all(is_untouched for _, is_untouched in answers)
    assert "  rank 1: first bad tensor: " in answers[0][0]


def test_large_gradients_are_clipped() -> None:
    def step() -> float:
        return train(spoil_gradient(build_run(small_config("llama", PLAIN)), 1e6), 1).grad_norms[0]

    assert run_ranks(1, step)[0] > 1e3


def test_the_check_can_be_disabled() -> None:
    """The step is then made, and its record reports the norm."""
    config = small_config("llama", f"{PLAIN} --no-check-for-nan-in-loss-and-grad")

    def step() -> tuple[float, float]:
        run = build_run(config)
        assert type(run.bad_steps.gradients) is GradientNormCheck
        curve = train(spoil_loss(spoil_gradient(run, float("nan")), float("nan")), 1)
        return curve.losses[0], curve.grad_norms[0]

    loss, norm = run_ranks(1, step)[0]
    assert loss != loss
    assert norm != norm


def test_loss_scale_overflow_skips_the_step() -> None:
    """FP16 finds its loss scale by trial: the weights stay, the scale is halved, training continues."""
    config = small_config("gpt2", "--fp16 --initial-loss-scale 4294967296 --hysteresis 1")

    def step() -> tuple[bool, float, float]:
        run = build_run(config)
        before, scale = fingerprint(weights(run)), float(run.training_state.optimizer.get_loss_scale())
        curve = train(run, 1)
        assert curve.losses[0] == pytest.approx(5.5, abs=0.3)
        lowered = float(run.training_state.optimizer.get_loss_scale())
        return fingerprint(weights(run)) == before, scale, lowered

    assert run_ranks(1, step) == [(True, 2.0**32, 2.0**31)]


def test_a_skipped_step_restores_the_biases_of_the_experts() -> None:
    """megatron-core changes them with the reduction of the gradients."""
    experts = (
        "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall --max-skipped-steps 1"
    )
    config = small_config("llama", f"{PLAIN} {experts}")

    def steps() -> tuple[list[float], list[float], list[float]]:
        run = build_run(config)
        router = unwrap_model(run.training_state.chunks)[0].decoder.layers[0].mlp.router
        train(run, 1)
        before = router.expert_bias.tolist()
        train(spoil_loss(run, float("nan")), 1, 2)
        return before, router.expert_bias.tolist(), router.local_tokens_per_expert.tolist()

    before, after, tokens = run_ranks(1, steps)[0]
    assert any(before) and before == after and not any(tokens)


def test_nonfinite_record_is_cleared_after_each_step() -> None:
    """The record of non-finite values covers one step only."""

    def steps() -> float:
        run = build_run(small_config("llama", PLAIN))
        with pytest.raises(NumericsError):
            train(spoil_loss(run, float("nan")), 1)
        return train(run, 1).losses[0]

    assert run_ranks(1, steps)[0] < 6
