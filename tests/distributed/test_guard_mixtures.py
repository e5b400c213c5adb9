"""The guard of mixtures: shared experts are watched and smoothed as the MLP of a dense layer is."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_guard import EVERY_SECOND_STEP, RECIPES, events, one_step, run_loop

from megafp8.checkpoint.progress import SMOOTHED
from megafp8.metrics.layer_statistics import INPUT_STATISTICS

MIXTURE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-layer-freq [0,1]"
SHARED = "--moe-shared-expert-intermediate-size 64"


@pytest.mark.parametrize("shared", ["", SHARED], ids=["routed-only", "shared"])
def test_what_is_watched(shared: str) -> None:
    values = one_step(f"{RECIPES['tensorwise']} {MIXTURE} --fp8-guard warn {shared}")
    watched = [f"layers.{layer}.linear_{kind}" for layer in (0, 1) for kind in ("qkv", "proj")]
    watched += [f"layers.0.linear_{kind}" for kind in ("fc1", "fc2")]
    watched += [f"layers.1.shared_experts.linear_{kind}" for kind in ("fc1", "fc2")] if shared else []
    inputs = {key: value for key, value in values.items() if key[0] in INPUT_STATISTICS}
    assert set(inputs) == {(statistic, f"{name}.input") for statistic in INPUT_STATISTICS for name in watched}
    assert min(inputs.values()) >= 0, "all were taken"
    assert values["SwiGLU alignment", "layers.0"] > 0
    assert (values["SwiGLU alignment", "layers.1"] > 0) is bool(shared)


def test_shared_expert_is_smoothed(tmp_path: Path) -> None:
    name = "layers.1.shared_experts.linear_fc2"
    flags = f"{RECIPES['tensorwise']} {MIXTURE} {SHARED} {EVERY_SECOND_STEP} smooth-swiglu --train-iters 6"
    ((progress, _),) = run_loop(tmp_path, flags, first_bad_steps={name: 3})
    assert [(linear.name, linear.form) for linear in progress.history.moved_linears] == [(name, SMOOTHED)]
    (smoothed,) = [event for event in events(tmp_path) if event[1] == "layer smoothed"]
    assert smoothed[0] == 4 and smoothed[2].startswith(f"{name} has a scale per channel from step 5 on: ")
