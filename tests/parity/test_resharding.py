"""Layouts load each other's checkpoints: equal weights and moments, bitwise, and equal next steps.

Each layout saves after a few steps of its own. Then each one loads the checkpoints of others, saves them again, and
continues: the new checkpoint must have the same content (`fingerprint`), and the losses must be those of the saving
layout. An error that load and save make in opposite directions would keep the hashes and change the losses, the first
through the weights and the next ones through the moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks
from small_run import build_run, small_config, train
from tolerances import LAYOUT_GRAD_NORM, LAYOUT_LOSS

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.fingerprint import fingerprint
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config.schema import RunConfig

STEPS = 2
# One layer per stage is enough, and two heads; gated MLP (layouts split the tensor that holds both of its matrices).
SMALL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 16 --lr-warmup-iters 0 "
    "--transformer-impl local --micro-batch-size 1 --global-batch-size 4 --use-distributed-optimizer"
)
TENSOR, SEQUENCE = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"
PIPELINE, CONTEXT = "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
LAYOUTS = {
    "one": (1, ""),
    "dp2": (2, OVERLAP),
    "tp2": (2, TENSOR),
    "tp2-sp": (2, SEQUENCE),
    "pp2": (2, PIPELINE),
    "cp2": (2, CONTEXT),
    "dp4": (4, ""),
    "tp2-dp2": (4, f"{SEQUENCE} {OVERLAP}"),
    "tp2-pp2": (4, f"{SEQUENCE} {PIPELINE}"),
}
# Untied embeddings and a gated MLP always; tied ones and a plain MLP with --long.
STYLES = ("llama", pytest.param("gpt2", marks=pytest.mark.long))
PARTS = ("weights", "optimizer", "progress")


@dataclass(frozen=True)
class Passage:
    """From one layout to another: the checkpoint as it was saved again, and the steps after it."""

    parts: dict[str, str]
    losses: list[float]
    grad_norms: list[float]


def config_of(style: str, layout: str) -> RunConfig:
    world_size, flags = LAYOUTS[layout]
    return small_config(style, f"{SMALL} {flags}", world_size)


def sources_of(layout: str) -> list[str]:
    """The layouts whose checkpoints it loads: one rank, itself and two others, such that each is loaded by several."""
    names = list(LAYOUTS)
    index = names.index(layout)
    chosen = {"one", layout, *(names[(index + distance) % len(names)] for distance in (1, 4))}
    return [name for name in names if name in chosen]


def run_first(config: RunConfig, folder: Path) -> list[float]:
    """Train, save, and continue training."""
    run = build_run(config)
    train(run, STEPS)
    save_checkpoint(folder, config, run.training_state, Progress(STEPS, STEPS * run.global_batch_size))
    return train(run, STEPS, STEPS + 1).losses


def load_all_checkpoints(config: RunConfig, folders: dict[str, Path], again: Path) -> dict[str, Passage]:
    """One run loads the checkpoint of each layout, over the state of the previous one."""
    run, found = build_run(config), {}
    for layout, folder in folders.items():
        progress = load_checkpoint(checkpoint_path(folder, STEPS), config, run.training_state).progress
        save_checkpoint(again / layout, config, run.training_state, progress)
        parts = fingerprint(checkpoint_path(again / layout, STEPS)) if dist.get_rank() == 0 else {}
        curve = train(run, STEPS, progress.step + 1)
        found[layout] = Passage(parts, curve.losses, curve.grad_norms)
    return found


@pytest.fixture(scope="module", params=STYLES)
def style(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def saved(style: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each layout's run."""
    base = tmp_path_factory.mktemp("saved")
    for layout, (world_size, _) in LAYOUTS.items():
        run_ranks(world_size, run_first, config_of(style, layout), base / layout)
    return {layout: base / layout for layout in LAYOUTS}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_load_the_checkpoints_of_others(
    layout: str, style: str, saved: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Ordered pairs that end in this layout, including itself; all of them with --long."""
    config = config_of(style, layout)
    is_long = request.config.getoption("--long")
    folders = {name: folder for name, folder in saved.items() if is_long or name in sources_of(layout)}
    passages = run_ranks(LAYOUTS[layout][0], load_all_checkpoints, config, folders, tmp_path)[0]
    assert list(passages) == list(folders)
    for before, passage in passages.items():
        expected = fingerprint(checkpoint_path(saved[before], STEPS))
        assert {part: passage.parts[part] for part in PARTS} == {part: expected[part] for part in PARTS}, before
    own = passages[layout]
    for before, passage in passages.items():
        assert passage.losses == pytest.approx(own.losses, abs=LAYOUT_LOSS, rel=0), before
        assert passage.grad_norms == pytest.approx(own.grad_norms, rel=LAYOUT_GRAD_NORM[style]), before
