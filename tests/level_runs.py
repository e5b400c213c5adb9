"""Small runs in the levels of FP8-LM, and checkpoints in the middle of them."""

from __future__ import annotations

from pathlib import Path

from small_run import build_run, fingerprint, small_config, train, weights

from megafp8.checkpoint.directory import find_checkpoint
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config.schema import RunConfig
from megafp8.training.extensions.calibration import calibrate, needs_calibration
from megafp8.training.run import Run

LEVELS = ("O1", "O2", "O3")
LAYOUTS = {
    "dp1": (1, "--micro-batch-size 2"),
    "dp2": (2, "--micro-batch-size 2"),
    "dp4": (4, "--micro-batch-size 2"),
    "tp2-dp2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2"),
}
SAVED = 2


def config_of(level: str, layout: str, more: str = "") -> RunConfig:
    """A level in a layout."""
    world_size, flags = LAYOUTS[layout]
    return small_config("llama", f"--num-layers 2 {flags} --fp8-lm-level {level} {more}", world_size)


def calibrated(config: RunConfig) -> Run:
    """This rank's run before its first step."""
    run = build_run(config)
    if needs_calibration(run):
        calibrate(run, Progress())
    return run


def save_in_the_middle(config: RunConfig, folder: Path) -> tuple[list[float], str]:
    """Losses of four steps, of which the last two follow the checkpoint, and a hash of the weights at the end."""
    run = calibrated(config)
    losses = train(run, SAVED).losses
    save_checkpoint(folder, config, run.training_state, Progress(SAVED, SAVED * run.global_batch_size))
    losses += train(run, 2, SAVED + 1).losses
    return losses, fingerprint(weights(run))


def resume(config: RunConfig, folder: Path) -> tuple[list[float], str]:
    """Losses of the two steps after the checkpoint, and a hash of the weights at the end."""
    run = build_run(config)
    found = find_checkpoint(folder)
    assert found is not None
    load_checkpoint(found[1], config, run.training_state)
    return train(run, 2, SAVED + 1).losses, fingerprint(weights(run))
