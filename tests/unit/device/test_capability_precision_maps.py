"""Which precision maps Transformer Engine's layers run; the others are refused or emulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from device_targets import CPU, H200, backend_of, only_problem

from megafp8.config.layer_backends import EMULATED, TRANSFORMER_ENGINE
from megafp8.config.schema import ModelConfig, PrecisionConfig, RunConfig
from megafp8.device import capability
from megafp8.device.capability import capability_problems


def mapped(*entries: str, tied: bool = False, **precision: Any) -> RunConfig:
    base = {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
    model = ModelConfig(num_layers=4, share_embeddings_and_output_weights=tied)
    return RunConfig(model=model, precision=PrecisionConfig(**(base | precision), precision_map=entries))


@pytest.mark.parametrize(
    "entries",
    [
        ("*.linear_fc2=blockwise/e4m3",),
        ("layers.2-3.*:dgrad,wgrad=bf16", "layers.0.*=bf16"),
        ("*.linear_fc2=blockwise/e4m3", "*.linear_fc2:dgrad=bf16", "*.linear_fc2:wgrad=bf16"),
        ("output_layer=tensorwise",),
        ("*.linear_qkv=blockwise/e4m3", "output_layer=tensorwise"),
    ],
)
def test_transformer_engine_runs_maps_of_its_recipes(entries: tuple[str, ...]) -> None:
    assert capability_problems(mapped(fp8_schedule=f"fp8:9,fp8[{';'.join(entries[:2])}]"), H200) == []
    assert capability_problems(mapped(*entries), H200) == []
    assert backend_of(mapped(*entries), H200) is TRANSFORMER_ENGINE
    assert capability_problems(mapped(*entries, fp8_format=None, fp8_recipe="delayed"), H200) == []


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_a_stateless_output_layer_works_with_every_recipe(recipe: str) -> None:
    config = mapped("output_layer=tensorwise", fp8_recipe=recipe, use_transformer_engine_op_fuser=True)
    assert capability_problems(config, H200) == [] and backend_of(config, H200) is TRANSFORMER_ENGINE


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (mapped("*.linear_fc2=mxfp8/e4m3"), "--precision *.linear_fc2=mxfp8/e4m3: needs compute capability 10.0"),
        (mapped("*.linear_fc2:wgrad=bf16"), "layers.0.linear_fc2 fprop tensorwise hybrid, dgrad tensorwise hybrid, w"),
        (
            mapped("*.linear_fc2:dgrad,wgrad=blockwise"),
            "one recipe for all three GEMMs, or one for fprop and high precision for the backward",
        ),
        (mapped("layers.0.*=bf16", fp8_recipe="delayed"), "reduces the amaxes of all layers together"),
        (mapped("output_layer=delayed", fp8_recipe="delayed"), "does not save the amax history of an output layer"),
        (mapped("output_layer=delayed"), "does not save the amax history of an output layer"),
        (mapped("output_layer=tensorwise", fp8_recipe="delayed", tied=True), "--untie-embeddings-and-output-weights"),
        (mapped(fp8_recipe="delayed", first_last_layers_bf16=True), "--first-last-layers-bf16 with delayed scaling"),
        (mapped("output_layer=tensorwise", tied=True), "--untie-embeddings-and-output-weights"),
        (mapped("layers.0.*=bf16", fp8_param_gather=True), "the precision map gives layers.0.linear_qkv"),
        (mapped("layers.0.*=bf16", use_transformer_engine_op_fuser=True), "fused operations support one recipe"),
        (mapped("*.linear_fc1=tensorwise/e5m2"), "Transformer Engine does not support E5M2"),
        (
            mapped(fp8_format="e4m3", fp8_recipe="blockwise", fp8_schedule="fp8:9,fp8[layers.0.*=tensorwise/e5m2]"),
            "Transformer Engine does not support E5M2",
        ),
        (
            mapped(fp8_schedule="fp8:9,fp8[layers.0.*=tensorwise/e4m3]"),
            "--fp8-schedule fp8[layers.0.*=tensorwise/e4m3] gives layers.0.linear_qkv tensorwise e4m3: Transformer "
            "Engine does not change the format",
        ),
        (
            mapped(fp8_schedule="fp8:9,fp8[layers.3.*=bf16]", fp8_recipe="delayed"),
            "--fp8-schedule fp8[layers.3.*=bf16] gives layers.3.linear_qkv high precision: ",
        ),
        (
            mapped(fp8_schedule="fp8:9,fp8[*:fprop=bf16]"),
            "--fp8-schedule fp8[*:fprop=bf16] gives layers.0.linear_qkv fprop high precision, dgrad tensorwise hybrid",
        ),
    ],
)
def test_maps_unsupported_by_transformer_engine_are_refused_or_emulated(config: RunConfig, words: str) -> None:
    requested = replace(config, precision=replace(config.precision, transformer_impl="transformer_engine"))
    assert words in only_problem(requested, H200)
    emulated = replace(config, precision=replace(config.precision, use_transformer_engine_op_fuser=False))
    # As without a map, a format is never a reason to emulate.
    assert backend_of(config, H200) is (TRANSFORMER_ENGINE if "E5M2" in words else EMULATED)
    assert (
        capability_problems(replace(emulated, precision=replace(emulated.precision, transformer_impl="emulated")), CPU)
        == []
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (mapped("output_layer=tensorwise", tied=True), "the precision map gives output_layer tensorwise hybrid"),
        (mapped(fp8_recipe="delayed", first_last_layers_bf16=True), "--first-last-layers-bf16 with delayed scaling"),
        (mapped(fp8_recipe="mxfp8"), "--fp8-recipe mxfp8: needs compute capability 10.0"),
    ],
)
def test_warning_of_auto_emulation_has_the_reason(config: RunConfig, words: str) -> None:
    (warning,) = capability.emulation_warnings(config.model, config.precision, H200)
    assert warning.startswith(f"all layers are emulated because of {words}")
    assert warning.endswith("; to get an error instead: --no-emulation")
    emulated = replace(config, precision=replace(config.precision, transformer_impl="emulated"))
    strict = replace(config, precision=replace(config.precision, emulation=False))
    without_warning = [
        (emulated, H200),
        (strict, H200),
        (config, CPU),
        (config, replace(H200, transformer_engine=None)),
    ]
    for each, target in without_warning:
        assert capability.emulation_warnings(each.model, each.precision, target) == []


def test_layers_of_transformer_engine_need_no_warning() -> None:
    config = mapped("*.linear_fc2=blockwise/e4m3")
    assert capability.emulation_warnings(config.model, config.precision, H200) == []


def test_weights_of_block_recipes_are_not_kept_as_codes() -> None:
    config = mapped("*.linear_fc2=mxfp8", fp8_param_gather=True, transformer_impl="emulated")
    assert "--precision *.linear_fc2=mxfp8 stores two copies" in only_problem(config, CPU)
