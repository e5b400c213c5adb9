"""Norm placement, parallel residual, multipliers and norms across heads: every layout trains the same model."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from small_run import PLAIN, VIRTUAL, curve_of, layers_of, small_config
from test_layouts import (
    CONTEXT,
    NUM_STEPS,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    assert_follows,
    assert_ranks_hold_the_same,
    train_rank,
)
from tolerances import LAYOUT_GRAD_NORM

OUTPUT_NORMS = "--norm-placement post --qk-layernorm-across-heads"
PARALLEL = "--parallel-residual --logits-scaling 2"
SANDWICH = (
    "--norm-placement sandwich --apply-layernorm-1p --window-size 7,0 --window-attn-skip-freq 2 "
    "--rotary-base-local 500 --softmax-scale 0.2 --embedding-multiplier 8 --residual-multiplier 0.5"
)
MUP = "--use-mup --mup-base-hidden-size 32 --mup-base-head-dim 8 --mup-embedding-mult 4"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SPLIT = f"{TENSOR} {SEQUENCE}"


@pytest.mark.parametrize(
    ("options", "world_size", "layout"),
    [
        pytest.param(OUTPUT_NORMS, 2, SPLIT, id="output-norms-tp2-sp"),
        pytest.param(OUTPUT_NORMS, 2, VIRTUAL, id="output-norms-pp2-virtual2"),
        pytest.param(PARALLEL, 2, SPLIT, id="parallel-tp2-sp"),
        pytest.param(PARALLEL, 1, FULL_RECOMPUTE, id="parallel-recompute-full"),
        pytest.param(SANDWICH, 2, f"{SPLIT} {FULL_RECOMPUTE}", id="sandwich-tp2-sp-recompute-full"),
        pytest.param(SANDWICH, 2, CONTEXT, id="sandwich-cp2"),
        pytest.param(MUP, 4, f"{SPLIT} {PIPELINE}", id="mup-tp2-sp-pp2"),
    ],
)
def test_options_of_the_model_in_a_layout(options: str, world_size: int, layout: str) -> None:
    reference = run_ranks(1, curve_of, small_config("llama", f"{PLAIN} {options} {layers_of(layout)}"), NUM_STEPS)[0]
    plain = run_ranks(1, curve_of, small_config("llama", f"{PLAIN} {layers_of(layout)}"), 1)[0]
    assert abs(reference.losses[0] - plain.losses[0]) > 1e-4, "the options change nothing"
    reports = run_ranks(world_size, train_rank, small_config("llama", f"{PLAIN} {options} {layout}", world_size))
    assert all(report.curve == reports[0].curve for report in reports)
    assert_follows(reports[0].curve, reference, LAYOUT_GRAD_NORM["llama"])
    assert_ranks_hold_the_same(reports)
