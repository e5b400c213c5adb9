"""Checkpoints of --optimizer muon: every layout loads those of the others, also with and without shared state."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from small_run import build_run, small_config, train
from test_resharding import STEPS, load_all_checkpoints
from tolerances import LAYOUT_GRAD_NORM, LAYOUT_LOSS

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.fingerprint import fingerprint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config.schema import RunConfig

SMALL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 16 --lr-warmup-iters 0 "
    "--transformer-impl local --micro-batch-size 1 --global-batch-size 4 --optimizer muon "
    "--muon-fp32-matmul-prec highest"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-token-dispatcher-type alltoall"
TENSOR, PIPELINE = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
FP8_WEIGHTS = (
    "--bf16 --transformer-impl emulated --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather --seq-length 32"
)
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
    "fp8-weights": {
        "one": (1, f"{FP8_WEIGHTS} {LAYER_WISE}"),
        "dp2": (2, f"{FP8_WEIGHTS} {LAYER_WISE}"),
        "tp2": (2, f"{FP8_WEIGHTS} {LAYER_WISE} {TENSOR}"),
    },
    "mixture": {
        "one": (1, EXPERTS),
        "ep2": (2, f"{EXPERTS} {EP2}"),
        "ep2-dp2-layer-wise": (4, f"{EXPERTS} {EP2} {LAYER_WISE}"),
    },
}
# Of a mixture the parameter groups are saved in as many parts as there are kinds of data-parallel ranks.
PARTS = dict.fromkeys(LAYOUTS, ("weights", "optimizer")) | {"mixture": ("weights", "progress")}


def config_of(model: str, layout: str) -> RunConfig:
    world_size, flags = LAYOUTS[model][layout]
    return small_config("llama", f"{SMALL} {flags}", world_size)


def run_first(config: RunConfig, folder: Path) -> None:
    run = build_run(config)
    train(run, STEPS)
    save_checkpoint(folder, config, run.training_state, Progress(STEPS, STEPS * run.global_batch_size))


@pytest.mark.slow
@pytest.mark.parametrize("model", LAYOUTS)
def test_every_layout_loads_every_checkpoint(model: str, tmp_path: Path) -> None:
    folders = {layout: tmp_path / layout for layout in LAYOUTS[model]}
    for layout, folder in folders.items():
        run_ranks(LAYOUTS[model][layout][0], run_first, config_of(model, layout), folder)
    saved = {layout: fingerprint(checkpoint_path(folder, STEPS)) for layout, folder in folders.items()}
    for layout in LAYOUTS[model]:
        world_size = LAYOUTS[model][layout][0]
        again = tmp_path / "again" / layout
        passages = run_ranks(world_size, load_all_checkpoints, config_of(model, layout), folders, again)[0]
        own = passages[layout]
        for before, passage in passages.items():
            for part in PARTS[model]:
                assert passage.parts[part] == saved[before][part], (part, before, layout)
            if model not in ("bf16", "fp8-weights"):  # whose roundings of activations depend on the layout
                assert passage.losses == pytest.approx(own.losses, abs=LAYOUT_LOSS, rel=0), (before, layout)
                assert passage.grad_norms == pytest.approx(own.grad_norms, rel=LAYOUT_GRAD_NORM["llama"])
