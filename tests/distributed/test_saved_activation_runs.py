"""`--fp8-saved-activations` in training: near the run without it, in every layout, resumed bitwise, recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from small_run import FP8, PLAIN, Curve, build_run, curve_of, fingerprint, small_config, train, weights
from tolerances import SAVED_ACTIVATION_LOSS

from megafp8.checkpoint.compatibility import check_number_formats
from megafp8.checkpoint.directory import find_checkpoint
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config.schema import RunConfig
from megafp8.errors import CheckpointError

STEPS = 6
BOTH = "--fp8-saved-activations norm activation"
BASE = "--bf16 --num-layers 2"
LAYOUTS = {
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2 --micro-batch-size 2"),
    "fsdp2": (2, "--use-torch-fsdp2 --no-gradient-accumulation-fusion --micro-batch-size 2"),
}


def distance(one: Curve, other: Curve) -> float:
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


@pytest.mark.parametrize("linears", [FP8, PLAIN], ids=["fp8", "bf16"])
def test_losses_stay_near_those_without(linears: str) -> None:
    plain, packed = (
        run_ranks(1, curve_of, small_config("llama", f"{BASE} {linears} {flags}"), STEPS)[0] for flags in ("", BOTH)
    )
    assert plain.losses[0] == packed.losses[0]
    assert 0 < distance(plain, packed) < SAVED_ACTIVATION_LOSS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_follow_one_rank(layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    one = run_ranks(1, curve_of, small_config("llama", f"{BASE} {FP8} {BOTH}"), STEPS)[0]
    curves = run_ranks(world_size, curve_of, small_config("llama", f"{BASE} {FP8} {BOTH} {flags}", world_size), STEPS)
    assert all(curve == curves[0] for curve in curves)
    assert distance(one, curves[0]) < SAVED_ACTIVATION_LOSS


def save_in_the_middle(config: RunConfig, folder: Path) -> tuple[list[float], str]:
    """Losses of the steps after a checkpoint, and the weights at the end."""
    run = build_run(config)
    train(run, 3)
    save_checkpoint(folder, config, run.training_state, Progress(3, 3 * run.global_batch_size))
    return train(run, 3, 4).losses, fingerprint(weights(run))


def resume(config: RunConfig, folder: Path) -> tuple[list[float], str]:
    run = build_run(config)
    load_checkpoint(find_checkpoint(folder)[1], config, run.training_state)
    return train(run, 3, 4).losses, fingerprint(weights(run))


def test_a_run_resumes_bitwise_and_not_with_other_activations(tmp_path: Path) -> None:
    world_size, flags = LAYOUTS["tp2-sp"]
    config, plain = (small_config("llama", f"{BASE} {FP8} {flags} {more}", world_size) for more in (BOTH, ""))
    assert run_ranks(world_size, save_in_the_middle, config, tmp_path) == run_ranks(
        world_size, resume, config, tmp_path
    )
    saved = find_checkpoint(tmp_path)[1]
    with pytest.raises(CheckpointError, match="fp8_saved_activations"):
        check_number_formats(saved, plain.model, plain.precision, plain.checkpoint)
    turned = small_config("llama", f"{BASE} {FP8} {flags} --fp8-saved-activations activation norm", world_size)
    assert not check_number_formats(saved, turned.model, turned.precision, turned.checkpoint)
