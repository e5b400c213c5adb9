"""Attention options give the same training under every layout."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from small_run import PLAIN, Curve, curve_of, small_config

OPTIONS = {
    "offsets and windows": "--softmax-type learnable --window-size 6,0 --window-attn-skip-freq 2",
    "yarn in half of the layers": (
        "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8 "
        "--no-rope-freq 2"
    ),
    "capped": "--attention-logit-softcapping 3 --output-logit-softcapping 2",
}
LAYOUTS = {
    "tensor and pipeline": ("--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2", 4),
    "context": ("--context-parallel-size 2", 2),
}


def curve(options: str, layout: str, world_size: int) -> Curve:
    config = small_config("llama", f"{PLAIN} {options} {layout}", world_size)
    return run_ranks(world_size, lambda: curve_of(config, 3))[-1]


@pytest.mark.parametrize("name", OPTIONS)
def test_layouts(name: str) -> None:
    alone = curve(OPTIONS[name], "", 1)
    assert alone.losses != curve("", "", 1).losses
    for layout, world_size in LAYOUTS.values():
        split = curve(OPTIONS[name], layout, world_size)
        assert split.losses == pytest.approx(alone.losses, rel=1e-5)
        assert split.grad_norms == pytest.approx(alone.grad_norms, rel=1e-4)
