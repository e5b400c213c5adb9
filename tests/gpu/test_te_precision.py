"""Precision maps and schedules with Transformer Engine's layers on a GPU."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import RECIPES, check_graph_equals_launched_kernels, gpu_run
from small_run import Curve, statistics_record_of, train, weights
from transformer_engine.common import recipe as te_recipe

from megafp8.checkpoint.directory import find_checkpoint
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config.precision_map import GemmChoice, LinearChoice
from megafp8.te import layers as te_layers
from megafp8.te.recipes import build_te_recipe
from megafp8.training.extensions.calibration import calibrate, needs_calibration
from megafp8.training.extensions.precision_schedule import changes_at

TENSORWISE, BLOCKWISE, DELAYED = RECIPES["tensorwise"], RECIPES["blockwise"], RECIPES["delayed"]
LAYERS = "--no-use-transformer-engine-op-fuser"  # runs with a mapped MLP or a schedule do not use them in any case
STEPS = 6


@functools.cache
def curve(extra: str, num_steps: int = STEPS) -> Curve:
    with gpu_run(f"{extra} {LAYERS}") as run:
        return train(run, num_steps)


def test_recipes_run_with_transformer_engine() -> None:
    tensor, block = GemmChoice("tensorwise", "hybrid"), GemmChoice("blockwise", "e4m3")
    assert build_te_recipe(LinearChoice()) is None
    plain = build_te_recipe(LinearChoice(block, block, block))
    assert isinstance(plain, te_recipe.Float8BlockScaling) and plain.fp8_format is te_recipe.Format.E4M3
    assert plain.backward_override is None
    forward_only = build_te_recipe(LinearChoice(tensor))
    assert isinstance(forward_only, te_recipe.Float8CurrentScaling)
    assert forward_only.backward_override == "high_precision"


@pytest.mark.parametrize(
    ("mapped", "plain"),
    [
        ("--precision layers.*=tensorwise/hybrid", TENSORWISE),  # on BF16: codes of weights must be updated
        ("--precision layers.*=blockwise/e4m3", BLOCKWISE),
        (f"{TENSORWISE} --precision layers.*=bf16", ""),
        (f"{TENSORWISE} --precision layers.*=blockwise/e4m3", BLOCKWISE),
        (f"{TENSORWISE} --precision layers.0.*=bf16 layers.1.*=bf16", f"{TENSORWISE} --precision *=bf16"),
    ],
)
def test_a_map_of_all_linears_equals_the_recipe(mapped: str, plain: str) -> None:
    assert curve(mapped).losses == curve(plain).losses


def test_first_and_last_layers_flag_equals_a_map() -> None:
    """Four layers, so that some middle layers exist."""
    both = "--num-layers 4"
    flag = curve(f"{both} {TENSORWISE} --first-last-layers-bf16")
    mapped = curve(f"{both} {TENSORWISE} --precision layers.0.*=bf16 layers.3.*=bf16")
    assert flag.losses == mapped.losses


MAP = "--precision *.linear_fc2=blockwise/e4m3 layers.1.*:dgrad,wgrad=bf16 output_layer=tensorwise"


@pytest.mark.parametrize("entries", [MAP, "--precision *:dgrad,wgrad=bf16", "--precision output_layer=tensorwise"])
def test_a_map_follows_its_emulation(entries: str) -> None:
    ours = curve(f"{TENSORWISE} {entries}")
    theirs = curve(f"{TENSORWISE} {entries} --transformer-impl emulated")
    gap = max(abs(a - b) / b for a, b in zip(ours.losses, theirs.losses, strict=True))
    print(f"\n{entries}: gap {gap:.2e}, norms {ours.grad_norms[:3]} {theirs.grad_norms[:3]}")
    assert gap < 5e-3
    assert ours.grad_norms[0] == pytest.approx(theirs.grad_norms[0], rel=2e-2)
    assert ours.losses != curve(TENSORWISE).losses


@pytest.mark.parametrize("layers", [LAYERS, "--use-transformer-engine-op-fuser"])
def test_an_output_layer_of_another_recipe_keeps_delayed_scales(layers: str) -> None:
    """In the first step, the layers' forward pass equals that without it, and so do its amaxes, recorded once."""
    histories = []
    for entries in ("", "--precision output_layer=tensorwise"):
        with gpu_run(f"{DELAYED} {entries} {layers}") as run:
            train(run, 1)
            states = [
                linear.fp8_meta for chunk in run.training_state.chunks for linear in te_layers.fusing_linears(chunk)
            ]
            states = [state for state in states if hasattr(state["scaling_fwd"], "amax_history")]
            histories.append(
                [[state[f"scaling_{way}"].amax_history.clone() for state in states] for way in ("fwd", "bwd")]
            )
    (forward, backward), (mapped_forward, mapped_backward) = histories
    assert len(forward) == len(mapped_forward) > 0
    assert all(torch.equal(a, b) for a, b in zip(forward, mapped_forward, strict=True))
    assert all(torch.equal(a > 0, b > 0) for a, b in zip(backward, mapped_backward, strict=True))


def test_only_the_forward_pass_is_quantized() -> None:
    """The first loss is FP8's; the first gradient differs."""
    mapped = f"{TENSORWISE} --precision layers.*:dgrad,wgrad=bf16"
    fprop, fp8, bf16 = (curve(extra) for extra in (mapped, TENSORWISE, ""))
    assert fprop.losses[0] == fp8.losses[0] != bf16.losses[0]
    assert fprop.grad_norms[0] != fp8.grad_norms[0]


def test_statistics_have_each_linears_recipe() -> None:
    with gpu_run(f"{TENSORWISE} {MAP} --fp8-log-interval 1") as run:
        found = statistics_record_of(run)
    assert found is not None and found.recipes["layers.0.linear_fc2"] == "blockwise"
    assert found.recipes["layers.1.linear_fc1"] == "tensorwise/high/high"
    assert "layers.0.linear_fc2.input.column" in found.tensors and "output_layer.input" in found.tensors
    assert "layers.1.linear_fc1.grad_output" not in found.tensors


# ---- the schedule -------------------------------------------------------------------------------------------------


def steps(extra: str, num_steps: int, first: int = 1, load: Path | None = None, save: Path | None = None) -> list:
    """Losses, and the final weights, with calibration at the loop's place."""
    losses: list[float] = []
    with gpu_run(f"{extra} {LAYERS}") as run:
        if load is not None:
            load_checkpoint(load, run.config, run.training_state)
        for step in range(first, first + num_steps):
            progress = Progress(step - 1, (step - 1) * run.global_batch_size)
            if changes_at(run.config.precision, step) and needs_calibration(run, step):
                calibrate(run, progress)
            losses += train(run, 1, first_step=step).losses
        if save is not None:
            last = first + num_steps - 1
            save_checkpoint(save, run.config, run.training_state, Progress(last, last * run.global_batch_size))
        return [losses, {name: tensor.cpu() for name, tensor in weights(run).items()}]


@pytest.mark.parametrize("entries", ["", "--precision *.linear_fc2=blockwise/e4m3 output_layer=tensorwise"])
def test_precision_schedule_entries_start_at_their_steps(entries: str) -> None:
    fp8 = f"{TENSORWISE} {entries}"
    # In high precision the output layer of a map is Transformer Engine's linear, whose GEMMs may round other sums.
    high, low = curve(f"{fp8} --fp8-schedule bf16:99,fp8" if entries else ""), curve(fp8)
    assert high.losses == pytest.approx(curve("").losses, rel=1e-4)
    first = steps(f"{fp8} --fp8-schedule bf16:2,fp8:4,bf16", STEPS)[0]
    second = steps(f"{fp8} --fp8-schedule fp8:2,bf16", STEPS)[0]
    assert first[:2] == high.losses[:2] and first[2] != high.losses[2]
    assert second[:2] == low.losses[:2] and second[2] != low.losses[2]


@pytest.mark.parametrize(
    "entry", ["layers.1.*=bf16", "*.linear_fc2=blockwise/e4m3", "*:dgrad,wgrad=bf16", "*.linear_fc1=bf16"]
)
def test_a_phase_computes_as_a_run_with_its_map(entry: str, tmp_path: Path) -> None:
    """From the same checkpoint."""
    plain = f"{TENSORWISE} --cuda-graph-impl none"
    whole = steps(f"{plain} --fp8-schedule fp8:2,fp8[{entry}]:4,fp8", 5)
    first = steps(plain, 2, save=tmp_path / "two")
    phase = steps(f"{plain} --precision {entry}", 2, 3, find_checkpoint(tmp_path / "two")[1], tmp_path / "four")
    last = steps(plain, 1, 5, find_checkpoint(tmp_path / "four")[1])
    assert whole[0] == first[0] + phase[0] + last[0]
    assert all(torch.equal(weight, last[1][name]) for name, weight in whole[1].items())


@pytest.mark.parametrize("schedule", ["fp8:3,bf16", "fp8:3,fp8[layers.1.*=bf16]"])
@pytest.mark.parametrize(
    "recipe",
    [TENSORWISE, DELAYED, f"{DELAYED} --transformer-impl emulated"],
    ids=["tensorwise", "delayed", "emulated"],
)
def test_a_graph_is_captured_again_at_a_phase(recipe: str, schedule: str) -> None:
    check_graph_equals_launched_kernels(f"{recipe} {LAYERS} --fp8-schedule {schedule}")


@pytest.mark.parametrize("layers", [LAYERS, "--use-transformer-engine-op-fuser"])
def test_delayed_scales_survive_high_precision(layers: str) -> None:
    with gpu_run(f"{DELAYED} {layers} --fp8-schedule fp8:3,bf16:5,fp8") as run:
        train(run, 3)
        before = [tensor.clone() for chunk in run.training_state.chunks for tensor in te_layers.delayed_state(chunk)]
        train(run, 2, first_step=4)
        after = [tensor for chunk in run.training_state.chunks for tensor in te_layers.delayed_state(chunk)]
        assert len(before) == len(after) > 0
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        train(run, 1, first_step=6)
        now = [tensor for chunk in run.training_state.chunks for tensor in te_layers.delayed_state(chunk)]
        assert not all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_resume_within_each_schedule_entry_is_bit_equal(at: int, recipe: str, tmp_path: Path) -> None:
    flags = f"{RECIPES[recipe]} --fp8-schedule bf16:2,fp8:4,bf16:6,fp8"
    unbroken = steps(flags, 8)
    before = steps(flags, at, save=tmp_path)
    after = steps(flags, 8 - at, first=at + 1, load=find_checkpoint(tmp_path)[1])
    assert before[0] + after[0] == unbroken[0]
    for name, weight in unbroken[1].items():
        assert torch.equal(weight, after[1][name]), name
