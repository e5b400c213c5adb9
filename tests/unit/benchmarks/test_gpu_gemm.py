"""The GEMM table from given times, without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import gpu_gemm
from benchmarks.gpu_gemm import Cast, model_of
from megafp8.config.precision_map import OUTPUT_LAYER
from megafp8.device.gpus import GPUS
from megafp8.errors import ConfigError
from megafp8.planning.planned_run import LinearGemm

FLAGS = (
    "--model-preset llama3-8b --seq-length 4096 --micro-batch-size 2 --global-batch-size 4 "
    "--tensor-model-parallel-size 4 --sequence-parallel"
)
H200 = GPUS["h200"]
MODEL = model_of("8b", FLAGS.split(), H200)
RECIPES = ("bf16", "tensorwise")


def times(bf16_us: float = 200.0, fp8_us: float = 100.0) -> gpu_gemm.Times:
    """Every GEMM takes the same time, an input 10 us, a gradient 20, a weight 30."""
    found = {}
    for recipe, work in MODEL.candidates(RECIPES):
        if isinstance(work, Cast):
            found[recipe, work] = {"input": 10.0, "grad_output": 20.0, "weight": 30.0}[work.operand]
        else:
            found[recipe, work] = bf16_us if recipe == "bf16" else fp8_us
    return found


def test_gemm_shapes_are_those_of_a_rank() -> None:
    assert MODEL.products("linear_qkv") == [
        LinearGemm("linear_qkv", "fprop", 8192, 6144 // 4, 4096),
        LinearGemm("linear_qkv", "dgrad", 8192, 4096, 6144 // 4),
        LinearGemm("linear_qkv", "wgrad", 6144 // 4, 4096, 8192),
    ]
    assert {product.n for product in MODEL.products(OUTPUT_LAYER)} == {128_512 // 4, 4096}
    assert (MODEL.layers, MODEL.microbatches) == (32, 2)


def test_a_rank_quantizes_its_part_of_the_tokens() -> None:
    qkv, proj, fc1, fc2 = (MODEL.casts(linear) for linear in MODEL.linears)
    assert qkv["input"] == Cast("input", 2048, 4096) and qkv["grad_output"] == Cast("grad_output", 8192, 1536)
    assert fc2["input"] == Cast("input", 8192, 14_336 // 4) and fc2["grad_output"] == Cast("grad_output", 2048, 4096)
    assert proj["weight"] == Cast("weight", 4096, 1024) and fc1["weight"] == Cast("weight", 2 * 14_336 // 4, 4096)


def test_the_weight_is_quantized_once_a_step() -> None:
    rows = {(row.linear, row.recipe): row for row in gpu_gemm.rows_of(MODEL, times(), RECIPES)}
    row = rows["linear_fc1", "tensorwise"]
    assert row.casts_us == 10 + 20 + 30 / 2
    assert row.gemm_speed == 2 and row.speed == pytest.approx(600 / 345)
    assert row.tflops["fprop"] == pytest.approx(2 * 8192 * 4096 * (2 * 14_336 // 4) / 100e-6 / 1e12)
    assert rows["linear_fc1", "bf16"].casts_us == 0 and rows["linear_fc1", "bf16"].speed == 1


def test_the_step_has_all_layers_and_one_output_layer() -> None:
    found = times()
    totals = gpu_gemm.step_totals(MODEL, found, gpu_gemm.rows_of(MODEL, found, RECIPES), "tensorwise")
    assert totals["layers_gemm_ms"] == pytest.approx(32 * 2 * 12 * 0.1)
    assert totals["layers_casts_ms"] == pytest.approx(32 * 2 * 4 * 0.045)
    assert totals["output_layer_ms"] == pytest.approx(2 * 3 * 0.2)
    bf16_ms, fp8_ms = 32 * 2 * 12 * 0.2, 32 * 2 * (12 * 0.1 + 4 * 0.045)
    assert totals["layers_speed"] == pytest.approx(bf16_ms / fp8_ms)
    assert totals["step_gemm_speed"] == pytest.approx((bf16_ms + 1.2) / (fp8_ms + 1.2))


def test_gemm_times_respect_flops_and_bytes() -> None:
    square, thin = LinearGemm("x", "fprop", 8192, 8192, 8192), LinearGemm("x", "wgrad", 4096, 4096, 16)
    assert gpu_gemm.floor_us(H200, "tensorwise", square) == pytest.approx(2 * 8192**3 / 1978.9e12 * 1e6, rel=1e-3)
    assert gpu_gemm.floor_us(H200, "bf16", thin) == pytest.approx((2 * 16 * 8192 + 4 * 4096**2) / 4.8e12 * 1e6)


def test_the_tables_name_every_linear() -> None:
    text, _ = gpu_gemm.report(MODEL, times(), RECIPES)
    assert all(text.count(f"| {linear.name} ") == 2 for linear in MODEL.linears)


@pytest.mark.parametrize("shape", ["A", "B", "C", "D"])
def test_every_shape_is_a_model(shape: str) -> None:
    model = model_of(shape, gpu_gemm.SHAPES[shape].split(), H200)
    assert len(model.candidates(gpu_gemm.NATIVE)) > 3 * 4 * 3
    assert model.run.padded_vocab == 50_304


def test_missing_measurements_are_reported() -> None:
    with pytest.raises(ConfigError, match="(?s)--seq-length.*--micro-batch-size"):
        model_of("x", ["--model-preset", "llama3-8b"], H200)
