"""`--fp8-saved-activations` with Transformer Engine's layers and fused operations on a GPU."""

from __future__ import annotations

import functools

import pytest
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import RECIPES, gpu_curve
from tolerances import FP8_LM_LOSS

BOTH = "--fp8-saved-activations norm activation"
FUSED, LAYERS = "--use-transformer-engine-op-fuser", "--no-use-transformer-engine-op-fuser"
STEPS = 6
curve = functools.partial(gpu_curve, num_steps=STEPS)


@pytest.mark.parametrize("modules", [FUSED, LAYERS])
@pytest.mark.parametrize("recipe", ["", RECIPES["delayed"], RECIPES["tensorwise"]])
def test_losses_stay_near_those_without(recipe: str, modules: str) -> None:
    """The first forward pass is the same to the bit."""
    plain, packed = (curve(f"{recipe} {modules} --cuda-graph-impl none {flags}").losses for flags in ("", BOTH))
    assert plain[0] == packed[0]
    assert 0 < max(abs(a - b) for a, b in zip(plain, packed, strict=True)) < FP8_LM_LOSS


@pytest.mark.parametrize("modules", [FUSED, LAYERS])
def test_a_cuda_graph_packs_the_same(modules: str) -> None:
    eager, graph = (
        curve(f"{RECIPES['delayed']} {modules} {BOTH} --cuda-graph-impl {how}")
        for how in ("none", "local --cuda-graph-warmup-steps 2")
    )
    assert eager == graph
