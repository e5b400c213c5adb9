"""`--fp8-lm-level`: runs in each level on CPU ranks, their state, and checkpoints between layouts and levels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from level_runs import LAYOUTS, LEVELS, SAVED, calibrated, config_of, resume, save_in_the_middle
from ranks import run_ranks
from small_run import Curve, fingerprint, small_config, step_results, train, weights
from tolerances import FP8_LM_LOSS, FP8_LM_NORM

from megafp8.checkpoint.state_dict import chained_optimizers
from megafp8.config.schema import RunConfig
from megafp8.optimizer.emulated_state import rounded_master, rounded_moment
from megafp8.quantization.fp8_parameter import quantized_parameters
from megafp8.training.extensions.replica_check import check_replicas
from megafp8.training.step_parts import Fp8Gradients

STEPS = 3
BF16 = "--bf16 --use-distributed-optimizer"


def trained(config: RunConfig) -> Curve:
    run = calibrated(config)
    curve = train(run, STEPS)
    check_replicas(run, STEPS)
    return curve


@pytest.mark.parametrize("layout", LAYOUTS)
def test_levels_follow_bf16(layout: str) -> None:
    """Each level computes other numbers than the one before, and all stay near BF16.

    Norms too: clipping and Adam make losses equal although all gradients are wrong by a factor.
    """
    world_size, flags = LAYOUTS[layout]
    plain = run_ranks(world_size, trained, small_config("llama", f"--num-layers 2 {flags} {BF16}", world_size))[0]
    losses = [plain.losses]
    for level in LEVELS:
        curves = run_ranks(world_size, trained, config_of(level, layout))
        assert all(curve == curves[0] for curve in curves)
        losses.append(curves[0].losses)
        assert max(abs(a - b) for a, b in zip(losses[-1], plain.losses, strict=True)) < FP8_LM_LOSS
        assert curves[0].grad_norms == pytest.approx(plain.grad_norms, rel=FP8_LM_NORM)
    assert len({tuple(each) for each in losses}) == 4


def state_is_in_its_formats(config: RunConfig) -> bool:
    """Whether rounding changes nothing: moments and masters are codes times scales. FP8 weights exist with O3."""
    run = calibrated(config)
    train(run, 2)
    assert bool(quantized_parameters(run.training_state.chunks)) == config.precision.fp8_param_gather
    (part,) = chained_optimizers(run.training_state.optimizer)
    masters = [master for group in part.shard_fp32_from_float16_groups for master in group]
    is_rounded = [torch.equal(master, rounded_master(master)) for master in masters]
    assert all(is_rounded) == (config.optimizer.main_params_dtype == "fp16")
    moments = {"exp_avg": config.optimizer.exp_avg_dtype, "exp_avg_sq": config.optimizer.exp_avg_sq_dtype}
    states = list(part.optimizer.state.values())
    assert states and any(state["exp_avg"].any() for state in states)
    return all(
        torch.equal(state[name], rounded_moment(state[name], dtype))
        for state in states
        for name, dtype in moments.items()
    )


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_state_is_codes_times_scales(level: str) -> None:
    assert run_ranks(2, state_is_in_its_formats, config_of(level, "dp2")) == [True, True]


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_resumes_bitwise_and_in_other_layouts(level: str, tmp_path: Path) -> None:
    """In its own layout bitwise; in another one, and without a level, up to other scales."""
    unbroken = run_ranks(2, save_in_the_middle, config_of(level, "dp2"), tmp_path)
    again = run_ranks(2, resume, config_of(level, "dp2"), tmp_path)
    for (losses, final), (resumed, resumed_final) in zip(unbroken, again, strict=True):
        assert losses[SAVED:] == resumed and final == resumed_final
    for layout in ("dp4", "tp2-dp2"):
        resumed, _ = run_ranks(4, resume, config_of(level, layout), tmp_path)[0]
        assert max(abs(a - b) for a, b in zip(resumed, unbroken[0][0][SAVED:], strict=True)) < FP8_LM_LOSS
    state = "--use-distributed-optimizer" if level != "O1" else ""
    plain = small_config("llama", f"--num-layers 2 --micro-batch-size 2 --bf16 {state}", 2)
    resumed, _ = run_ranks(2, resume, plain, tmp_path)[0]
    assert max(abs(a - b) for a, b in zip(resumed, unbroken[0][0][SAVED:], strict=True)) < FP8_LM_LOSS


def unreduced(config: RunConfig) -> tuple[list[float], set[float], str]:
    """Losses of a run without FP8 gradients, their unused factors, and a hash of the weights at the end."""
    run = calibrated(config)
    assert not any(isinstance(part, Fp8Gradients) for part in run.parts)
    results = step_results(run, STEPS)
    factors = {each.metrics.get("grad_scale_factor", 1.0) for each in results}
    assert not any(each.changed_progress for each in results)
    assert all("grad_reduce_bytes" not in each.metrics for each in results)
    return [each.loss for each in results], factors, fingerprint(weights(run))


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_one_rank_has_the_level_without_the_reduction(level: str) -> None:
    """The run is the one with the reduction turned off to the bit; nothing else of the level goes with it."""
    ((losses, factors, final),) = run_ranks(1, unreduced, config_of(level, "dp1"))
    assert factors == {1.0}
    expected = config_of(level, "dp1", "--no-grad-reduce-in-fp8")
    assert run_ranks(1, unreduced, expected) == [(losses, factors, final)]


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_one_rank_resumes_bitwise_and_with_more_ranks(level: str, tmp_path: Path) -> None:
    for layout, other in (("dp1", "dp2"), ("dp2", "dp1")):
        ranks, more = LAYOUTS[layout][0], LAYOUTS[other][0]
        losses, final = run_ranks(ranks, save_in_the_middle, config_of(level, layout), tmp_path / layout)[0]
        resumed = run_ranks(ranks, resume, config_of(level, layout), tmp_path / layout)[0]
        assert resumed == (losses[SAVED:], final)
        moved, _ = run_ranks(more, resume, config_of(level, other), tmp_path / layout)[0]
        assert max(abs(a - b) for a, b in zip(moved, losses[SAVED:], strict=True)) < FP8_LM_LOSS


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_levels_continue_each_others_checkpoints(level: str, tmp_path: Path) -> None:
    """O1 with the distributed optimizer, which the others have."""
    configs = {each: config_of(each, "dp2", "--use-distributed-optimizer") for each in LEVELS}
    losses, final = run_ranks(2, save_in_the_middle, configs[level], tmp_path)[0]
    resumed = {each: run_ranks(2, resume, config, tmp_path)[0] for each, config in configs.items()}
    assert resumed[level] == (losses[SAVED:], final)
    for others, _ in resumed.values():
        assert max(abs(a - b) for a, b in zip(others, losses[SAVED:], strict=True)) < FP8_LM_LOSS
    assert len({final for _, final in resumed.values()}) == len(LEVELS)
