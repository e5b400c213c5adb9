"""The profile of a step on a GPU: kernels by part beside their floors, and ranges of Transformer Engine's layers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("transformer_engine")

from gpu_runs import GRAPH, gpu_run
from small_run import train, weights
from transformer_engine.pytorch.module import linear
from transformer_engine.pytorch.ops.basic import basic_linear

from megafp8.analysis.profile import GEMM_FP8, OPTIMIZER, OTHER, read_trace
from megafp8.training.extensions.profiler_ranges import named_ranges

FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"


def profiled(folder: Path, extra: str) -> Path:
    """The trace of the fourth step, which has ranges."""
    path = folder / "rank0.json"
    with gpu_run(extra) as run:
        train(run, 3)
        with torch.profiler.profile() as profile, named_ranges(run.training_state.chunks, run.timer):
            train(run, 1, first_step=4)
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))
    return path


def ranges_of(path: Path) -> Counter[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def test_kernels_are_in_parts_and_layers_have_ranges(tmp_path: Path) -> None:
    path = profiled(tmp_path, FP8)
    trace = read_trace(path)
    assert trace.has_kernels
    parts = {part: ms for part, ms, _ in trace.profile.rows()}
    assert {GEMM_FP8, OPTIMIZER} <= parts.keys() and parts.get(OTHER, 0.0) < 0.2 * sum(parts.values())
    names = ranges_of(path)
    calls = names["layers.0.linear_qkv fprop"]  # one a microbatch
    assert calls and names["layers.0.linear_qkv dgrad"] == names["layers.0.linear_qkv wgrad"] == calls
    assert names["layers.0.linear_qkv backward"]
    gemms = {gemm: kernels for gemm, _, kernels in trace.profile.gemm_rows()}
    num_linears = sum(count for name, count in names.items() if name.endswith(" wgrad"))
    for gemm in ("fprop", "dgrad", "wgrad"):  # a GEMM may take two kernels
        assert num_linears <= gemms[f"{GEMM_FP8} {gemm}"] <= 2 * num_linears, gemms
    assert names["layers.0.attention forward"] and names["optimizer"]


@pytest.mark.parametrize("extra", [FP8, f"{FP8} --use-transformer-engine-op-fuser"], ids=["linears", "fused MLP"])
def test_ranges_change_no_bit(extra: str) -> None:
    found = []
    for has_ranges in (False, True):
        with gpu_run(extra) as run:
            curves = [train(run, 2)]
            if has_ranges:
                with named_ranges(run.training_state.chunks, run.timer):
                    curves.append(train(run, 2, first_step=3))
            else:
                curves.append(train(run, 2, first_step=3))
            found.append((curves, weights(run)))
    (plain, plain_weights), (ranged, ranged_weights) = found
    assert ranged == plain
    assert not [name for name in plain_weights if not torch.equal(plain_weights[name], ranged_weights[name])]


def test_gemms_of_a_fused_mlp_have_ranges_until_the_context_ends(tmp_path: Path) -> None:
    plain = {module: module.general_gemm for module in (linear, basic_linear)}
    names = ranges_of(profiled(tmp_path, f"{FP8} --use-transformer-engine-op-fuser"))
    assert names["layers.0.mlp fprop"] == names["layers.0.mlp dgrad"] == names["layers.0.mlp wgrad"]
    assert names["layers.0.mlp wgrad"] == 2 * names["layers.0.linear_qkv wgrad"] > 0
    assert {module: module.general_gemm for module in plain} == plain


def test_a_replayed_graph_has_the_ranges_of_the_step_alone(tmp_path: Path) -> None:
    path = profiled(tmp_path, f"{FP8} {GRAPH}")
    names = ranges_of(path)
    assert names["forward-backward"] == 1 and not [name for name in names if name.startswith("layers.")]
    assert GEMM_FP8 in {part for part, _, _ in read_trace(path).profile.rows()}
