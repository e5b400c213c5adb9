"""The description that a run prints and records at its start."""

import os
from types import SimpleNamespace

import pytest
import torch

from megafp8.config.layer_backends import EMULATED, LAYER_BACKENDS
from megafp8.config.schema import DataConfig, ModelConfig, PrecisionConfig, RunConfig, TrainingConfig
from megafp8.training.run_record import describe_threads, mapped_recipes, matmul_dtype, recipe_lines


def lines_of(**precision: object) -> list[str]:
    config = RunConfig(model=ModelConfig(num_layers=4), precision=PrecisionConfig(bf16=True, **precision))
    return recipe_lines(config, EMULATED)


def test_the_resolved_recipe_has_a_line_for_each_gemm() -> None:
    assert lines_of(fp8_format="hybrid", fp8_recipe="mxfp8") == [
        "recipe of layers 0-3: fp8 hybrid mxfp8, emulated, on bf16",
        "  fprop  input e4m3 x weight e4m3 per 1x32, e8m0 scale",
        "  dgrad  grad_output e5m2 x weight e4m3 per 1x32, e8m0 scale",
        "  wgrad  grad_output e5m2 x input e4m3 per 1x32, e8m0 scale",
    ]


def test_the_resolved_recipe_has_saved_activations() -> None:
    line = "  saved activations (norm, activation): e4m3 per 1x16, e8m0 scale"
    saved = {"fp8_saved_activations": ("norm", "activation")}
    assert lines_of(**saved) == ["precision: bf16", line]
    assert lines_of(fp8_format="hybrid", fp8_recipe="mxfp8", **saved)[-1] == line
    assert lines_of() == []


def test_resolved_recipe_has_defaults_and_exceptions() -> None:
    assert all("delayed (most_recent of 1, margin 0)" in line for line in lines_of(fp8_format="hybrid")[1:])
    without_wgrad = lines_of(fp8_format="e4m3", fp8_recipe="tensorwise", fp8_wgrad=False)
    assert without_wgrad[0].startswith("recipe of layers 0-3:")
    assert without_wgrad[3] == "  wgrad  bf16 x bf16"


def test_layers_kept_high_are_in_the_table_and_the_record() -> None:
    requested = {"fp8_format": "e4m3", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True}
    lines = lines_of(**requested)
    assert lines[0] == "recipes: fp8 e4m3 tensorwise, emulated, on bf16"
    assert lines[3].split() == ["linear_qkv", "0,", "3", "bf16", "bf16", "bf16"]
    assert lines[4].split() == ["linear_qkv", "1-2", *["tensorwise", "e4m3"] * 3]
    found = mapped_recipes(
        RunConfig(model=ModelConfig(num_layers=4), precision=PrecisionConfig(bf16=True, **requested))
    )
    assert found["linear_fc2 of layers 0, 3"] == "high precision"
    assert found["linear_fc2 of layers 1-2"] == "tensorwise e4m3"


def test_fp8_weights_are_reported() -> None:
    usual, codes = (lines_of(fp8_format="hybrid", fp8_param_gather=gather) for gather in (False, True))
    assert codes == [*usual, "  weights are stored and gathered as codes and scales"]


def test_a_map_is_a_table() -> None:
    entries = ("*.linear_fc2=blockwise/e4m3", "layers.2-3.*:dgrad,wgrad=bf16", "output_layer=nvfp4")
    lines = lines_of(fp8_format="hybrid", fp8_recipe="tensorwise", precision_map=entries, fp8_schedule="bf16:9,fp8")
    assert lines == [
        "recipes: fp8 hybrid tensorwise with a precision map, steps bf16:9,fp8, emulated, on bf16",
        "  GEMM of       layers  fprop              dgrad              wgrad",
        "  ------------  ------  -----------------  -----------------  -----------------",
        "  linear_qkv    0-1     tensorwise hybrid  tensorwise hybrid  tensorwise hybrid",
        "  linear_qkv    2-3     tensorwise hybrid  bf16               bf16",
        "  linear_proj   0-1     tensorwise hybrid  tensorwise hybrid  tensorwise hybrid",
        "  linear_proj   2-3     tensorwise hybrid  bf16               bf16",
        "  linear_fc1    0-1     tensorwise hybrid  tensorwise hybrid  tensorwise hybrid",
        "  linear_fc1    2-3     tensorwise hybrid  bf16               bf16",
        "  linear_fc2    0-1     blockwise e4m3     blockwise e4m3     blockwise e4m3",
        "  linear_fc2    2-3     blockwise e4m3     bf16               bf16",
        "  output_layer  -       nvfp4              nvfp4              nvfp4",
    ]


def test_the_record_has_the_resolved_map() -> None:
    precision = PrecisionConfig(bf16=True, precision_map=("layers.1.*:fprop=mxfp8",))
    found = mapped_recipes(RunConfig(model=ModelConfig(num_layers=2), precision=precision))
    assert found["linear_fc1 of layers 1"] == "fprop mxfp8 e4m3, dgrad high precision, wgrad high precision"
    assert found["linear_fc1 of layers 0"] == found["output_layer"] == "high precision"
    assert mapped_recipes(RunConfig(model=ModelConfig(num_layers=2))) == {}


def test_high_precision_has_no_recipe() -> None:
    assert lines_of() == []


@pytest.mark.parametrize(
    ("precision", "implementation", "dtype"),
    [(PrecisionConfig(), "transformer_engine", "tf32"), (PrecisionConfig(), "emulated", "fp32"),
     (PrecisionConfig(bf16=True), "transformer_engine", "bf16"),
     (PrecisionConfig(bf16=True, fp8_format="hybrid"), "transformer_engine", "fp8"),
     (PrecisionConfig(bf16=True, fp8_format="hybrid"), "emulated", "bf16")],
)  # fmt: skip
def test_peak_of_the_mfu_is_that_of_the_products(precision: PrecisionConfig, implementation: str, dtype: str) -> None:
    assert matmul_dtype(precision, LAYER_BACKENDS[implementation]) == dtype


def test_fp8_attention_is_reported() -> None:
    usual, attention = (
        lines_of(fp8_format="hybrid", fp8_dot_product_attention=requested) for requested in (False, True)
    )
    assert attention[1:] == [*usual[1:], "  both attention GEMMs are also in FP8"]
    assert "delayed with attention, " in attention[0] and "attention" not in usual[0]


@pytest.mark.parametrize(
    ("threads", "num_threads", "kind", "hidden", "is_said"),
    [(1, None, "cpu", 2048, True), (4, None, "cpu", 2048, False), (1, None, "cpu", 128, False),
     (1, 1, "cpu", 2048, False), (1, None, "cuda", 2048, False)],
)  # fmt: skip
def test_too_few_threads_are_reported(
    threads: int, num_threads: int | None, kind: str, hidden: int, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    config = RunConfig(
        model=ModelConfig(hidden_size=hidden), data=DataConfig(seq_length=256),
        training=TrainingConfig(micro_batch_size=1, num_threads=num_threads),
    )  # fmt: skip
    said = describe_threads(SimpleNamespace(config=config, platform=SimpleNamespace(kind=kind)))
    assert ("--num-threads 4 would be faster" in said.get("threads", "")) == is_said
