"""What runs where: every combination has an answer, and every refusal names an alternative."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Optional

import pytest
from device_targets import A100, B200, CPU, H200, RECIPES, WITHOUT_TE, backend_of, fp8, only_problem

from megafp8.config.layer_backends import EMULATED, TRANSFORMER_ENGINE
from megafp8.config.precision_map import build_recipe
from megafp8.config.schema import ModelConfig, PrecisionConfig, RunConfig
from megafp8.device import capability
from megafp8.device.capability import TARGETS, Target, capability_problems
from megafp8.recipes.base import Gemm, Operand


@pytest.mark.parametrize(
    ("target", "expected"), [(CPU, "emulated"), (H200, "transformer_engine"), (WITHOUT_TE, "emulated")]
)
def test_auto_selects_transformer_engine_where_it_runs(target: Target, expected: str) -> None:
    assert backend_of(RunConfig(), target).name == expected


@pytest.mark.parametrize("requested", ["transformer_engine", "emulated", "local"])
def test_a_requested_implementation_is_used(requested: str) -> None:
    assert backend_of(RunConfig(precision=PrecisionConfig(transformer_impl=requested)), CPU).name == requested


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"norm_placement": "sandwich"}, "--norm-placement sandwich"),
        ({"residual_multiplier": 0.5}, "--residual-multiplier 0.5"),
        ({"parallel_residual": True}, "--parallel-residual"),
        ({"qk_layernorm_across_heads": True}, "--qk-layernorm-across-heads"),
        ({"rotary_base_local": 500}, "--rotary-base-local 500"),
    ],
)
def test_options_of_the_model_that_transformer_engine_layers_lack(options: dict[str, Any], flag: str) -> None:
    """`auto` emulates, and says why. A request for Transformer Engine is refused."""
    config = RunConfig(model=ModelConfig(**options))
    assert backend_of(config, H200) is EMULATED and capability_problems(config, H200) == []
    (warning,) = capability.emulation_warnings(config.model, config.precision, H200)
    assert f"because of {flag}: the layers on Transformer Engine do not support it" in warning
    requested = replace(config, precision=PrecisionConfig(transformer_impl="transformer_engine"))
    assert only_problem(requested, H200).startswith(f"{flag}: the layers on Transformer Engine")


def test_high_precision_runs_everywhere() -> None:
    for target in (*TARGETS.values(), A100, WITHOUT_TE):
        assert capability_problems(RunConfig(), target) == []


def test_transformer_engine_needs_cuda_and_an_installation() -> None:
    config = RunConfig(precision=PrecisionConfig(transformer_impl="transformer_engine"))
    assert "has no CUDA device" in only_problem(config, CPU)
    assert "-e '.[te]'" in only_problem(config, WITHOUT_TE)
    assert capability_problems(config, H200) == []


@pytest.mark.parametrize(
    ("target", "native"),
    [
        (A100, ()),
        (Target("NVIDIA L40S", "cuda", (8, 9), "2.9"), ("tensorwise", "delayed")),
        (H200, ("tensorwise", "delayed", "blockwise")),
        (B200, RECIPES),
        (Target("NVIDIA GeForce RTX 5090", "cuda", (12, 0), "2.9"), ("tensorwise", "delayed", "blockwise")),
    ],
    ids=lambda value: value.name if isinstance(value, Target) else None,
)
def test_recipes_that_transformer_engine_runs(target: Target, native: tuple[str, ...]) -> None:
    assert (
        tuple(recipe for recipe in RECIPES if not capability_problems(fp8(recipe, emulation=False), target)) == native
    )


def test_nvfp4_is_emulated_on_newer_gpus_than_its_kernels_are_right_on() -> None:
    config = RunConfig(precision=PrecisionConfig(fp4_format="e2m1", fp4_recipe="nvfp4", transformer_impl="auto"))
    consumer = Target("NVIDIA GeForce RTX 5090", "cuda", (12, 0), "2.20")
    assert backend_of(config, B200) is TRANSFORMER_ENGINE
    assert backend_of(config, consumer) is EMULATED
    (warning,) = capability.emulation_warnings(config.model, config.precision, consumer)
    assert "below 12.0" in warning and "stochastic rounding gave gradients of zero" in warning


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"fp4_format": "e2m1", "fp4_recipe": "quartet2"}, "--fp4-recipe quartet2"),
        ({"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "fp8_tensorwise_margin": -3}, "--fp8-recipe tensorwise"),
        ({"fp4_format": "e2m1", "fp4_recipe": "nvfp4", "fp4_four_over_six": True}, None),
    ],
)
def test_casts_without_a_kernel_are_named_with_their_cost(options: dict[str, Any], flag: Optional[str]) -> None:
    config = RunConfig(precision=PrecisionConfig(**options, transformer_impl="emulated"))
    found = [] if flag is None else [f"{flag}: there is no kernel for its casts"]
    warnings = capability.emulation_warnings(config.model, config.precision, H200)
    assert [text[: len(found[0])] for text in warnings] == found
    assert capability.emulation_warnings(config.model, config.precision, CPU) == []


def test_an_unsupported_recipe_names_the_supported_ones() -> None:
    config = fp8("mxfp8", transformer_impl="transformer_engine")
    found = only_problem(config, H200)
    assert "--fp8-recipe mxfp8: needs compute capability 10.0 and below 12.0, but h200 has 9.0" in found
    native = "supported natively: --fp8-recipe tensorwise, delayed, blockwise"
    assert f"{native}; --transformer-impl emulated supports every recipe" in found
    found = only_problem(fp8("tensorwise", transformer_impl="transformer_engine"), A100)
    assert "no recipe is supported natively; --transformer-impl emulated" in found


@pytest.mark.parametrize("recipe", RECIPES)
def test_emulated_recipes_run_on_any_device(recipe: str) -> None:
    for target in (CPU, H200, A100, WITHOUT_TE):
        assert capability_problems(fp8(recipe, transformer_impl="emulated"), target) == []
        assert capability_problems(fp8(recipe), target) == []


def test_auto_emulates_unsupported_recipes() -> None:
    implementations = [backend_of(fp8("mxfp8"), target).name for target in (H200, B200, A100, CPU)]
    assert implementations == ["emulated", "transformer_engine", "emulated", "emulated"]


@pytest.mark.parametrize("target", [CPU, A100, H200, WITHOUT_TE], ids=lambda target: target.name)
def test_emulation_can_be_disabled(target: Target) -> None:
    assert capability_problems(RunConfig(precision=PrecisionConfig(emulation=False)), target) == []
    found = only_problem(fp8("mxfp8", emulation=False), target)
    assert "--fp8-recipe mxfp8" in found
    assert found.endswith("; remove --no-emulation")
    assert ("supported natively: --fp8-recipe tensorwise, delayed, blockwise" in found) == (target is H200)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_gathered_as_codes_where_there_is_one_copy_of_them(recipe: str) -> None:
    config = fp8(recipe, fp8_param_gather=True, transformer_impl="emulated")
    built = build_recipe(config.precision)
    has_one = built.rule(Operand.WEIGHT, Gemm.FPROP) == built.rule(Operand.WEIGHT, Gemm.DGRAD)
    assert has_one == (recipe in ("tensorwise", "delayed", "blockwise"))
    if has_one:
        assert capability_problems(config, CPU) == []
    else:
        assert "--fp8-recipe tensorwise, delayed, blockwise" in only_problem(config, CPU)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"fp8_power_2_scale": True}, "--fp8-power-2-scale"),
        ({"fp8_tensorwise_margin": -3}, "--fp8-tensorwise-margin -3"),
        ({"fp8_amax_reduction": "all"}, "--fp8-amax-reduction all"),
        ({"fp8_wgrad": False}, "--no-fp8-wgrad"),
    ],
)
def test_settings_of_the_emulation_need_emulated_layers(settings: dict[str, Any], flag: str) -> None:
    assert flag in only_problem(fp8("tensorwise", **settings), H200)
    assert capability_problems(fp8("tensorwise", **settings), CPU) == []


def test_newer_forms_of_nvfp4_need_emulated_layers() -> None:
    precision = PrecisionConfig(bf16=True, fp4_format="e2m1", fp4_four_over_six=True)
    found = only_problem(RunConfig(precision=precision), B200)
    assert "--fp4-four-over-six: Transformer Engine has it without Hadamard transform only" in found
    assert "--transformer-impl emulated" in found
    emulated = replace(precision, transformer_impl="emulated")
    assert capability_problems(RunConfig(precision=emulated), B200) == []
    quartet2 = PrecisionConfig(bf16=True, fp4_format="e2m1", fp4_recipe="quartet2")
    assert backend_of(RunConfig(precision=quartet2), B200) is EMULATED
    native = replace(quartet2, transformer_impl="transformer_engine")
    assert "--fp4-recipe quartet2" in only_problem(RunConfig(precision=native), B200)


def test_all_problems_are_reported_together() -> None:
    config = fp8("mxfp8", attention_backend="flash", fp8_param_gather=True, use_transformer_engine_op_fuser=True)
    assert len(capability_problems(config, CPU)) == 3


@pytest.mark.parametrize("gpu", ["rtx5090", "rtxpro6000", "gb10"])
@pytest.mark.parametrize(
    ("requested", "reason"),
    [
        ({"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}, "blocks of 32 in one of the three layouts of training only"),
        ({"fp4_format": "e2m1", "fp4_recipe": "nvfp4"}, "stochastic rounding gave gradients of zero"),
    ],
)
def test_compute_capability_12_names_what_is_native_there(gpu: str, requested: dict[str, str], reason: str) -> None:
    """As an error with --no-emulation, and else as a warning; per-tensor and 128-blocks run on Transformer Engine."""
    native = "supported natively: --fp8-recipe tensorwise, delayed, blockwise"
    config = RunConfig(precision=PrecisionConfig(**requested))
    assert capability_problems(config, TARGETS[gpu]) == []
    (warning,) = capability.emulation_warnings(config.model, config.precision, TARGETS[gpu])
    (problem,) = capability_problems(RunConfig(precision=PrecisionConfig(**requested, emulation=False)), TARGETS[gpu])
    for text in (warning, problem):
        assert reason in text and native in text and f"{gpu} has 12." in text
    for recipe in ("tensorwise", "delayed", "blockwise"):
        assert capability_problems(fp8(recipe, emulation=False), TARGETS[gpu]) == []


def test_every_target_device_has_the_fields_of_the_rules() -> None:
    for name, target in TARGETS.items():
        assert target.name == name
        assert (target.kind == "cuda") == (target.compute_capability is not None)
