"""Checkpoints of --optimizer muon: every layout loads those of the others, also with and without shared state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks
from small_run import build_run, small_config, train
from tolerances import LAYOUT_GRAD_NORM, LAYOUT_LOSS

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.checkpoint.standalone import fingerprint
from megafp8.config.schema import RunConfig

STEPS = 2
SMALL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 16 --lr-warmup-iters 0 "
    "--transformer-impl local --micro-batch-size 1 --global-batch-size 4 --optimizer muon "
    "--muon-fp32-matmul-prec highest"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-token-dispatcher-type alltoall"
TENSOR, PIPELINE = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
LAYER_WISE, EP2 = "--use-distributed-optimizer", "--expert-model-parallel-size 2"
# Model -> layout -> ranks and flags.
LAYOUTS = {
    "fp32": {
        "one": (1, ""),
        "dp2-layer-wise": (2, LAYER_WISE),
        "tp2": (2, TENSOR),
        "pp2-dp2-layer-wise": (4, f"{PIPELINE} {LAYER_WISE}"),
    },
    "bf16": {"one": (1, "--bf16"), "dp4-layer-wise": (4, f"--bf16 {LAYER_WISE}"), "tp2": (2, f"--bf16 {TENSOR}")},
    "mixture": {
        "one": (1, EXPERTS),
        "ep2": (2, f"{EXPERTS} {EP2}"),
        "ep2-dp2-layer-wise": (4, f"{EXPERTS} {EP2} {LAYER_WISE}"),
    },
}
# Of a mixture the parameter groups are saved in as many parts as there are kinds of data-parallel ranks.
PARTS = {"fp32": ("weights", "optimizer"), "bf16": ("weights", "optimizer"), "mixture": ("weights", "progress")}


@dataclass(frozen=True)
class Passage:
    """A checkpoint as another layout saved it again, and the steps after it."""

    parts: dict[str, str]
    losses: list[float]
    grad_norms: list[float]


def config_of(model: str, layout: str) -> RunConfig:
    world_size, flags = LAYOUTS[model][layout]
    return small_config("llama", f"{SMALL} {flags}", world_size)


def run_first(config: RunConfig, folder: Path) -> None:
    run = build_run(config)
    train(run, STEPS)
    save_checkpoint(folder, config, run.trainee, Progress(STEPS, STEPS * run.global_batch_size))


def load_all(config: RunConfig, folders: dict[str, Path], again: Path) -> dict[str, Passage]:
    """One run loads the checkpoint of each layout, over the state of the previous one."""
    run, found = build_run(config), {}
    for layout, folder in folders.items():
        progress = load_checkpoint(checkpoint_path(folder, STEPS), config, run.trainee).progress
        save_checkpoint(again / layout, config, run.trainee, progress)
        parts = fingerprint(checkpoint_path(again / layout, STEPS)) if dist.get_rank() == 0 else {}
        curve = train(run, STEPS, progress.step + 1)
        found[layout] = Passage(parts, curve.losses, curve.grad_norms)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", LAYOUTS)
def test_every_layout_loads_every_checkpoint(model: str, tmp_path: Path) -> None:
    folders = {layout: tmp_path / layout for layout in LAYOUTS[model]}
    for layout, folder in folders.items():
        run_ranks(LAYOUTS[model][layout][0], run_first, config_of(model, layout), folder)
    saved = {layout: fingerprint(checkpoint_path(folder, STEPS)) for layout, folder in folders.items()}
    for layout in LAYOUTS[model]:
        world_size = LAYOUTS[model][layout][0]
        passages = run_ranks(world_size, load_all, config_of(model, layout), folders, tmp_path / "again" / layout)[0]
        own = passages[layout]
        for before, passage in passages.items():
            for part in PARTS[model]:
                assert passage.parts[part] == saved[before][part], (part, before, layout)
            if model != "bf16":  # whose roundings of activations depend on the layout
                assert passage.losses == pytest.approx(own.losses, abs=LAYOUT_LOSS, rel=0), (before, layout)
                assert passage.grad_norms == pytest.approx(own.grad_norms, rel=LAYOUT_GRAD_NORM["llama"])
