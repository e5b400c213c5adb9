"""Multi-latent attention and multi-token prediction with Transformer Engine's layers, against the emulated layers."""

from __future__ import annotations

from pathlib import Path

import pytest
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import RECIPES, gap_to_emulated, unbroken_and_resumed

LATENT = (
    "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 "
    "--v-head-dim 64"
)
MODELS = {
    "latent": LATENT,
    "latent, plain queries": LATENT.replace("--q-lora-rank 64 ", ""),
    "latent, normed": f"{LATENT} --qk-layernorm",
    "multi-token": "--mtp-num-layers 1",
    "both": f"{LATENT} --mtp-num-layers 1",
}
STEPS = 4
CLOSE = {"bf16": 2e-3, "tensorwise": 5e-3, "delayed": 1e-2, "blockwise": 5e-3}  # relative; two kernels of attention


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_with_emulated_layers(name: str, recipe: str) -> None:
    flags = f"{RECIPES[recipe]} {MODELS[name]}"
    assert gap_to_emulated(flags, STEPS) < CLOSE[recipe]


def test_both_resume_to_the_bit(tmp_path: Path) -> None:
    unbroken, resumed = unbroken_and_resumed(f"{RECIPES['delayed']} {MODELS['both']}", STEPS, tmp_path)
    assert unbroken == resumed
