"""Delayed scaling starts with calibrated scales: from the first batch, in any layout, once, without other effects."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from small_run import FOUR_LAYERS, VIRTUAL, build_run, fingerprint, small_config, weights
from test_checkpoint import DROPOUT, OVERLAP, TENSOR
from test_loop import curves, run_loop
from test_quantizer_state import DELAYED, RECOMPUTE, quantizer_states
from torch import Tensor

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.state_dict import rng_state
from megafp8.config.schema import RunConfig
from megafp8.training.evaluation import build_batches
from megafp8.training.extensions.calibration import calibrate, needs_calibration
from megafp8.training.run import Run
from megafp8.training.step import clear_gradients, forward_backward

TE_START = "--fp8-delayed-start te"
TENSORWISE = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --micro-batch-size 2"


@dataclass(frozen=True)
class Calibrated:
    """What a rank has after a calibration, and whether everything except the scales is unchanged."""

    scales: dict[str, Tensor]
    is_unchanged: bool
    was_needed: bool
    is_needed: bool


def all_but_scales(run: Run) -> tuple[str, dict[str, str]]:
    """Weights and generators of this rank."""
    state = rng_state()
    generators = {"cpu": state["cpu"], **state["tracker"]}
    return fingerprint(weights(run)), {name: fingerprint({name: bits}) for name, bits in generators.items()}


def calibrated(config: RunConfig) -> Calibrated:
    run = build_run(config)
    before, was_needed = all_but_scales(run), needs_calibration(run)
    calibrate(run, Progress())
    states = quantizer_states(run)
    scales = {name: state for name, state in states.items() if name.endswith("quant_scale")}
    return Calibrated(scales, all_but_scales(run) == before, was_needed, needs_calibration(run))


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(1, DROPOUT, id="dropout"),
        pytest.param(1, f"{DROPOUT} {RECOMPUTE}", id="recompute"),
        pytest.param(1, "--init-method-std 1e-4", id="weights-that-scale-1-rounds-to-zero"),
        pytest.param(2, f"{TENSOR} {DROPOUT}", id="tp2-sp"),
        pytest.param(2, OVERLAP, id="dp2-overlap"),
        pytest.param(2, f"{VIRTUAL} {DROPOUT}", id="pp2-virtual2"),
    ],
)
def test_calibration_sets_every_scale_and_nothing_else(world_size: int, flags: str) -> None:
    config = small_config("llama", f"{DELAYED} {flags} --lr-warmup-iters 0", world_size)
    ranks = run_ranks(world_size, calibrated, config)
    for rank in ranks:
        assert rank.was_needed and not rank.is_needed
        assert rank.is_unchanged
        assert all((scale != 1).all() for scale in rank.scales.values())
    num_linears = sum(len(rank.scales) for rank in ranks)
    assert num_linears == (4 * 4 if "pipeline" in flags else 2 * 4 * world_size)
    if "pipeline" not in flags:
        assert all(torch.equal(scale, ranks[-1].scales[name]) for name, scale in ranks[0].scales.items())


def test_pipeline_stages_calibrate_to_the_scales_of_one_rank() -> None:
    """Microbatches are the same and in the same order under every schedule."""
    whole = run_ranks(1, calibrated, small_config("llama", f"{DELAYED} {FOUR_LAYERS}"))[0].scales
    stages = run_ranks(2, calibrated, small_config("llama", f"{DELAYED} {VIRTUAL}", 2))
    in_parts = [torch.stack(list(rank.scales.values())) for rank in stages]
    by_layer = torch.stack(list(whole.values())).view(2, 2, 4, 3)  # chunk, stage, linear, operand
    for stage, scales in enumerate(in_parts):
        assert torch.equal(scales.view(2, 4, 3), by_layer[:, stage])


def first_gradient(config: RunConfig) -> Tensor:
    run = build_run(config)
    if needs_calibration(run):
        calibrate(run, Progress())
    clear_gradients(run)
    batches = build_batches(run, run.datasets[0], 0, run.global_batch_size, num_workers=0)
    forward_backward(run, batches, run.num_microbatches, forward_only=False)
    return torch.cat([parameter.main_grad.flatten() for parameter in run.training_state.chunks[0].parameters()])


def test_first_gradient_error_matches_current_scaling() -> None:
    """One microbatch: from the second one on, Transformer Engine's start also has scales."""
    shape = "--hidden-size 128 --init-method-std 0.006 --micro-batch-size 8"
    exact = run_ranks(1, first_gradient, small_config("llama", f"--bf16 {shape}"))[0]

    def error(flags: str) -> float:
        gradient = run_ranks(1, first_gradient, small_config("llama", f"{flags} {shape}"))[0]
        return float((gradient - exact).norm() / exact.norm())

    tensorwise = error(TENSORWISE)
    assert error(DELAYED) < 1.1 * tensorwise
    assert error(f"{DELAYED} {TE_START}") > 2 * tensorwise


def calibrations(folder: Path) -> list[int]:
    """The steps after which a run was calibrated."""
    return [event.step for event in load_run(folder).events if event.name == "calibrated"]


def test_a_resumed_run_is_not_calibrated_again(tmp_path: Path) -> None:
    flags = f"{DELAYED} {DROPOUT}"
    run_loop(tmp_path / "unbroken", flags, 1)
    run_loop(tmp_path / "parts", f"{flags} --exit-interval 4", 1)
    run_loop(tmp_path / "parts", flags, 1)
    assert calibrations(tmp_path / "unbroken") == calibrations(tmp_path / "parts") == [0]
    assert curves(load_run(tmp_path / "parts")) == curves(load_run(tmp_path / "unbroken"))


def test_resuming_with_delayed_scaling_calibrates_at_the_resumed_step(tmp_path: Path) -> None:
    run_loop(tmp_path, "--bf16 --micro-batch-size 2 --exit-interval 4", 1)
    run_loop(tmp_path, f"{DELAYED} --override-precision", 1)
    assert calibrations(tmp_path) == [4]


@pytest.mark.parametrize("flags", [f"{DELAYED} {TE_START}", TENSORWISE], ids=["te", "tensorwise"])
def test_other_recipes_are_not_calibrated(flags: str, tmp_path: Path) -> None:
    run_loop(tmp_path, f"{flags} --train-iters 2", 1)
    assert calibrations(tmp_path) == []
