"""The report of a profile: floors of a known configuration, and which trace and run it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plans import FP8, PIPELINE, run_of
from traces import STEPS, event, write

from megafp8.analysis.profile import GEMM_BF16, GEMM_FP8
from megafp8.analysis.profile_floors import step_floors
from megafp8.analysis.profile_report import report_profile
from megafp8.cli import report
from megafp8.config import model_shapes, settings
from megafp8.metrics.records import RunRecord, to_json
from megafp8.planning.planned_run import PlannedRun
from megafp8.planning.step_time import step_time

LAYERS, HIDDEN, FFN, VOCAB, TOKENS = 32, 4096, 14336, 128_256, 8192
MICROBATCHES = 8  # 64 sequences on 8 GPUs
BF16_FLOPS, FP8_FLOPS, BYTES_PER_S = 989.4e12, 1978.9e12, 4.8e12
LAYER_WEIGHTS = HIDDEN * (HIDDEN + 2 * 1024) + HIDDEN * HIDDEN + 3 * HIDDEN * FFN
RECOMPUTE = {
    "training.recompute_granularity": "full", "training.recompute_method": "uniform", "training.recompute_num_layers": 1
}  # fmt: skip


def test_floors_are_flops_and_bytes_at_the_peak() -> None:
    floors = step_floors(run_of(), 0)
    flops = 6 * TOKENS * (LAYERS * LAYER_WEIGHTS + HIDDEN * VOCAB)
    assert floors[GEMM_BF16] == pytest.approx(MICROBATCHES * flops / BF16_FLOPS)
    assert GEMM_FP8 not in floors and "quantize" not in floors
    # Causal: half of the keys. Two GEMMs forward, five backward; the model counts twice the forward ones.
    attention = 3 * 2 * 2 * HIDDEN * TOKENS * TOKENS / 2
    assert floors["attention"] == pytest.approx(MICROBATCHES * LAYERS * attention / BF16_FLOPS)
    # Two norms: read and write; backward two reads and a write. 2 bytes each.
    norm_bytes = 2 * TOKENS * HIDDEN * 2 * (2 + 3)
    assert floors["norm"] == pytest.approx(MICROBATCHES * LAYERS * norm_bytes / BYTES_PER_S)
    assert floors["embedding"] == pytest.approx(MICROBATCHES * 2 * 2 * 2 * TOKENS * HIDDEN / BYTES_PER_S)
    assert floors["loss"] == pytest.approx(MICROBATCHES * 8 * TOKENS * VOCAB / BYTES_PER_S)
    # Gradients in FP32 and weights in BF16, 7/8 of them from other ranks, over NVLink.
    parameters = model_shapes.count_parameters(run_of().config.model, VOCAB).total
    assert floors["communication"] == pytest.approx(6 * parameters * 7 / 8 / 450e9, rel=0.01)


def test_quantized_linears_have_a_floor_of_their_own() -> None:
    floors = step_floors(run_of(FP8), 0)
    assert floors[GEMM_FP8] == pytest.approx(MICROBATCHES * 6 * TOKENS * LAYERS * LAYER_WEIGHTS / FP8_FLOPS)
    assert floors[GEMM_BF16] == pytest.approx(MICROBATCHES * 6 * TOKENS * HIDDEN * VOCAB / BF16_FLOPS)
    assert floors["quantize"] > 0
    high_wgrad = step_floors(run_of(FP8 | {"precision.fp8_wgrad": False}), 0)
    assert high_wgrad[GEMM_FP8] == pytest.approx(floors[GEMM_FP8] * 2 / 3)
    first_last = step_floors(run_of(FP8 | {"precision.first_last_layers_bf16": True}), 0)
    assert first_last[GEMM_FP8] == pytest.approx(floors[GEMM_FP8] * 30 / 32)


def test_recomputation_repeats_the_forward_pass() -> None:
    plain, again = step_floors(run_of(FP8), 0), step_floors(run_of(FP8 | RECOMPUTE), 0)
    assert again[GEMM_FP8] == pytest.approx(plain[GEMM_FP8] * 4 / 3)
    assert again["attention"] == pytest.approx(plain["attention"] * 9 / 7)
    assert again["norm"] == pytest.approx(plain["norm"] * (2 + 3 + 2) / (2 + 3))
    assert again[GEMM_BF16] == plain[GEMM_BF16]


def test_a_stage_has_its_own_parts() -> None:
    first, last = (step_floors(run_of(PIPELINE), stage) for stage in (0, 3))
    assert "loss" not in first and "embedding" not in last and "communication" not in last
    assert first["attention"] == pytest.approx(last["attention"])
    assert last[GEMM_BF16] > first[GEMM_BF16]


@pytest.mark.parametrize("changes", [{}, FP8, FP8 | RECOMPUTE])
def test_floors_are_below_the_predicted_step(changes: dict[str, Any]) -> None:
    run = run_of(changes)
    floors, step = step_floors(run, 0), step_time(run)
    assert 0.4 < sum(floors.values()) / step.seconds < 1


def run_folder(folder: Path, planned: PlannedRun, **changes: Any) -> Path:
    """A run's records and its trace: in a step of 2 ms a GEMM, a gap and a reduction that half of an update hides."""
    config = planned.config
    values: dict[str, Any] = {
        "config_hash": settings.stable_hash(config), "config": settings.to_dict(config), "world_size": 8, "layout": {},
        "recipe": "bf16", "device_name": "NVIDIA H200", "mfu_dtype": "bf16",
        "num_parameters": model_shapes.count_parameters(config.model, planned.padded_vocab).total,
    }  # fmt: skip
    (folder / "profile").mkdir(parents=True)
    (folder / "records.jsonl").write_text(to_json(RunRecord(**values | changes)) + "\n")
    nccl, gemm = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTN"
    wgrad = event("layers.0.linear_fc1 wgrad", 3000, 1000, "gpu_user_annotation")
    kernels = [wgrad, event(gemm, 3000, 1000), event(nccl, 4200, 800), event("adam_kernel", 4600, 400)]
    write(folder / "profile/rank0.json", *STEPS, *kernels)
    return folder


def test_parts_are_beside_their_floors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, planned = run_folder(tmp_path / "run", run_of()), run_of()
    assert report.main(["profile", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["source"], data["steps"]) == ("GPU kernels", 2)
    assert (data["span_ms"], data["busy_ms"], data["idle_ms"]) == pytest.approx((1.0, 0.9, 0.1))
    assert data["exposed_communication_ms"] == pytest.approx(0.2)
    parts = {row.pop("part"): row for row in data["parts"]}
    floors = step_floors(planned, 0)
    assert parts[GEMM_BF16] == pytest.approx(
        {"ms": 0.5, "share_fraction": 0.5, "kernels": 0.5, "floor_ms": 1e3 * floors[GEMM_BF16]}
    )
    assert parts["loss"] == {"ms": 0.0, "share_fraction": 0.0, "kernels": 0.0, "floor_ms": 1e3 * floors["loss"]}
    assert data["gemms"] == [{"gemm": "GEMM BF16 wgrad", "ms": 0.5, "kernels": 0.5}]
    assert [(gap["until"][:4], gap["ms"]) for gap in data["gaps"]] == [("nccl", 0.1)]
    assert report.main(["profile", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "kernels of the GPU; times per step of 2" in text and "at the peak of H200" in text
    assert f"{1e3 * floors[GEMM_BF16]:.3f}" in text
    assert "\nGEMM BF16 wgrad  0.500      0.5\n" in text
    assert "span 1.000 ms, busy 0.900, idle 0.100 (10.0%), only communication 0.200" in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"device_name": "AMD EPYC"}, "none, since the planner does not know AMD EPYC"),
        ({"config": {"model": {"new_setting": 1}}}, "none, since this version does not read"),
        ({"num_parameters": None}, "none, since the records have no number of parameters"),
    ],
)
def test_why_there_are_no_floors(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    found = report_profile(run_folder(tmp_path / "run", run_of(), **changes))
    assert found.floors.text.startswith(text) and not found.floors.seconds


def test_emulated_gemms_have_no_floors(tmp_path: Path) -> None:
    found = report_profile(run_folder(tmp_path / "run", run_of(FP8)))
    assert found.floors.text == "none, since FP8 and FP4 are emulated"
    native = report_profile(run_folder(tmp_path / "native", run_of(FP8), mfu_dtype="fp8"))
    assert native.floors.seconds == step_floors(run_of(FP8), 0)


def test_the_trace_of_the_lowest_rank_is_read_and_a_lone_one_has_no_floors(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", run_of())
    traces = folder / "profile"
    (traces / "rank0.json").rename(traces / "rank10.json")
    (traces / "rank2.json").write_bytes((traces / "rank10.json").read_bytes())
    assert report_profile(folder).path == traces / "rank2.json"
    assert report_profile(traces / "rank10.json").floors.seconds
    alone = tmp_path / "alone.json"
    (traces / "rank10.json").rename(alone)
    assert report_profile(alone).floors.text == "none, since the trace is in no run's folder"


def test_wrong_traces_have_the_status_of_damaged_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = tmp_path / "trace.json"
    damaged.write_text("{")
    for path, text in ((damaged, "trace.json: not JSON"), (tmp_path, "train with --profile"), (tmp_path / "no", "no")):
        assert report.main(["profile", str(path)]) == 66
        assert text in capsys.readouterr().err
