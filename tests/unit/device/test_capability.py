"""What runs where: every combination has an answer, and every refusal names an alternative."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import pytest

from megafp8.config.precision_map import build_recipe
from megafp8.config.schema import LoggingConfig, ModelConfig, ParallelConfig, PrecisionConfig, RunConfig
from megafp8.config.settings import with_values
from megafp8.device import capability
from megafp8.device.capability import TARGETS, Target, capability_problems, resolve_implementation
from megafp8.device.local_environment import offloading_problems, package_problems
from megafp8.recipes.base import Gemm, Operand

CPU, H200, B200 = TARGETS["cpu"], TARGETS["h200"], TARGETS["b200"]
A100 = Target("NVIDIA A100", "cuda", (8, 0), "2.9")
WITHOUT_TE = Target("NVIDIA H200", "cuda", (9, 0), None)
RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")


def fp8(recipe: str, **others: Any) -> RunConfig:
    return RunConfig(precision=PrecisionConfig(fp8_format="hybrid", fp8_recipe=recipe, **others))


def only_problem(config: RunConfig, target: Target) -> str:
    found = capability_problems(config, target)
    assert len(found) == 1, found
    return found[0]


def test_a_missing_package_is_reported_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = package_problems(LoggingConfig(wandb_project="mine"))
    assert problem.startswith("--wandb-project mine: the package wandb is not installed")
    assert package_problems(LoggingConfig()) == []


def test_offloading_needs_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVTE_CPU_OFFLOAD_V1", raising=False)
    config = with_values(RunConfig(), {"training.fine_grained_activation_offloading": True})
    assert "NVTE_CPU_OFFLOAD_V1=1" in offloading_problems(config)[0]
    assert offloading_problems(RunConfig()) == []
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    assert offloading_problems(config) == []


@pytest.mark.parametrize(
    ("target", "settings", "reason"),
    [
        (CPU, {}, "cpu has no CUDA device"),
        (H200, {"precision.transformer_impl": "local"}, "--transformer-impl local"),
        (H200, {"precision.transformer_impl": "emulated"}, None),
        (H200, {}, None),
        (WITHOUT_TE, {"precision.fp8_amax_reduction": "all"}, "--fp8-amax-reduction all: experts in one launch"),
        (WITHOUT_TE, {"training.fp8_guard": "smooth-swiglu"}, "--fp8-guard smooth-swiglu: experts in one launch"),
    ],
)
def test_experts_in_one_launch_need_a_gpu(target: Target, settings: dict[str, Any], reason: str | None) -> None:
    config = with_values(RunConfig(), {"parallel.moe_expert_kernels": "triton"} | settings)
    if reason is None:
        assert not capability_problems(config, target)
    else:
        assert "--moe-expert-kernels triton" in only_problem(config, target)
        assert reason in only_problem(config, target)


# ---- implementations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "expected"), [(CPU, "emulated"), (H200, "transformer_engine"), (WITHOUT_TE, "emulated")]
)
def test_auto_selects_transformer_engine_where_it_runs(target: Target, expected: str) -> None:
    assert resolve_implementation(RunConfig(), target) == expected


@pytest.mark.parametrize("asked", ["transformer_engine", "emulated", "local"])
def test_a_requested_implementation_is_used(asked: str) -> None:
    assert resolve_implementation(RunConfig(precision=PrecisionConfig(transformer_impl=asked)), CPU) == asked


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
    assert resolve_implementation(config, H200) == "emulated" and capability_problems(config, H200) == []
    (notice,) = capability.emulation_notices(config, H200)
    assert f"because of {flag}: the layers on Transformer Engine do not support it" in notice
    requested = replace(config, precision=PrecisionConfig(transformer_impl="transformer_engine"))
    assert only_problem(requested, H200).startswith(f"{flag}: the layers on Transformer Engine")


def test_high_precision_runs_everywhere() -> None:
    for target in (*TARGETS.values(), A100, WITHOUT_TE):
        assert capability_problems(RunConfig(), target) == []


def test_transformer_engine_needs_cuda_and_an_installation() -> None:
    config = RunConfig(precision=PrecisionConfig(transformer_impl="transformer_engine"))
    assert "has no CUDA device" in only_problem(config, CPU)
    assert "pip install 'megafp8[te]'" in only_problem(config, WITHOUT_TE)
    assert capability_problems(config, H200) == []


# ---- recipes --------------------------------------------------------------------------------------------------------


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


def test_an_unsupported_recipe_names_the_supported_ones() -> None:
    config = fp8("mxfp8", transformer_impl="transformer_engine")
    found = only_problem(config, H200)
    assert "--fp8-recipe mxfp8: needs compute capability 10.0 and below 12.0, but h200 has 9.0" in found
    assert (
        "supported natively: tensorwise, delayed, blockwise; --transformer-impl emulated supports every recipe" in found
    )
    found = only_problem(fp8("tensorwise", transformer_impl="transformer_engine"), A100)
    assert "no recipe is supported natively; --transformer-impl emulated" in found


@pytest.mark.parametrize("recipe", RECIPES)
def test_emulated_recipes_run_on_any_device(recipe: str) -> None:
    for target in (CPU, H200, A100, WITHOUT_TE):
        assert capability_problems(fp8(recipe, transformer_impl="emulated"), target) == []
        assert capability_problems(fp8(recipe), target) == []


def test_auto_emulates_unsupported_recipes() -> None:
    implementations = [resolve_implementation(fp8("mxfp8"), target) for target in (H200, B200, A100, CPU)]
    assert implementations == ["emulated", "transformer_engine", "emulated", "emulated"]


@pytest.mark.parametrize("target", [CPU, A100, H200, WITHOUT_TE], ids=lambda target: target.name)
def test_emulation_can_be_disabled(target: Target) -> None:
    assert capability_problems(RunConfig(precision=PrecisionConfig(emulation=False)), target) == []
    found = only_problem(fp8("mxfp8", emulation=False), target)
    assert "--fp8-recipe mxfp8" in found
    assert found.endswith("; remove --no-emulation")
    assert ("supported natively: tensorwise, delayed, blockwise" in found) == (target is H200)


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
    assert resolve_implementation(RunConfig(precision=quartet2), B200) == "emulated"
    native = replace(quartet2, transformer_impl="transformer_engine")
    assert "--fp4-recipe quartet2" in only_problem(RunConfig(precision=native), B200)


# ---- options of Transformer Engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "settings", "flag"),
    [
        ("precision", {"use_transformer_engine_op_fuser": True}, "--use-transformer-engine-op-fuser"),
        ("precision", {"split_rope_fusion": True}, "--split-rope-fusion"),
        ("precision", {"swiglu_quantize_fusion": True}, "--swiglu-quantize-fusion"),
        ("precision", {"residual_norm_fusion": True}, "--residual-norm-fusion"),
        ("precision", {"quantize_kernels": "triton"}, "--quantize-kernels triton"),
        ("precision", {"quantize_kernels": "te"}, "--quantize-kernels te"),
        ("precision", {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}, "fusion-impl te"),
        ("training", {"fine_grained_activation_offloading": True}, "--fine-grained-activation-offloading"),
    ],
)
def test_options_that_only_transformer_engine_has(section: str, settings: dict[str, Any], flag: str) -> None:
    config = RunConfig()
    config = replace(config, **{section: replace(getattr(config, section), **settings)})
    assert capability_problems(config, H200) == []
    assert flag in only_problem(config, CPU)


def test_low_precision_state_is_transformer_engines_on_a_gpu_and_emulated_on_a_cpu() -> None:
    config = RunConfig()
    config = replace(config, optimizer=replace(config.optimizer, use_precision_aware_optimizer=True))
    assert capability_problems(config, H200) == capability_problems(config, CPU) == []
    emulated = replace(config, precision=replace(config.precision, transformer_impl="emulated"))
    assert "--use-precision-aware-optimizer" in only_problem(emulated, H200)
    halves = replace(config.optimizer, main_params_dtype="fp16")
    weights = {"bf16": True, "fp8_format": "hybrid", "fp8_param_gather": True}
    for recipe, is_known in (("delayed", True), ("tensorwise", False)):
        precision = replace(config.precision, **weights, fp8_recipe=recipe)
        run = replace(config, optimizer=halves, precision=precision)
        assert capability_problems(run, CPU) == []
        if is_known:
            assert capability_problems(run, H200) == []
        else:
            assert "--main-params-dtype fp16 with --fp8-param-gather" in only_problem(run, H200)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [("tensorwise", None), ("delayed", "scales from an amax history"), ("blockwise", "scales of blocks")],
)
def test_fsdp_gathers_codes_with_one_current_scale_of_transformer_engines_layers(
    recipe: str, reason: Optional[str]
) -> None:
    config = RunConfig()
    parallel = replace(config.parallel, use_torch_fsdp2=True)
    weights = {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": recipe, "fp8_param_gather": True}
    run = replace(config, parallel=parallel, precision=replace(config.precision, **weights))
    assert capability_problems(run, CPU) == []
    if reason is None:
        assert capability_problems(run, H200) == []
        return
    text = only_problem(run, H200)
    assert f"--fp8-param-gather with --use-torch-fsdp2 and --fp8-recipe {recipe}: " in text and reason in text
    assert "--fp8-recipe tensorwise or --transformer-impl emulated" in text


def test_windows_and_offsets_limit_context_parallel_communication() -> None:
    window, offsets = {"window_size": "127,0"}, {"softmax_type": "learnable"}
    for model, kind, is_known in ((window, "allgather", True), (window, "p2p", False), (offsets, "allgather", False)):
        config = RunConfig(
            model=ModelConfig(**model), parallel=ParallelConfig(context_parallel_size=2, cp_comm_type=kind)
        )
        problems = capability_problems(config, H200)
        assert bool(problems) is not is_known and all("--cp-comm-type" in problem for problem in problems)
        assert capability_problems(config, CPU) == []  # its layers gather keys and values


def test_transformer_engines_loss_works_with_emulated_layers() -> None:
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    assert capability_problems(fp8("mxfp8", **fused), H200) == []  # which emulates it
    without = replace(H200, transformer_engine=None)
    assert "fusion-impl te" in only_problem(fp8("mxfp8", **fused), without)


def test_attention_and_collectives_that_need_a_gpu() -> None:
    flash = RunConfig(precision=PrecisionConfig(attention_backend="flash"))
    assert capability_problems(flash, H200) == []
    assert "the emulated layers support auto, sdpa, unfused" in only_problem(flash, CPU)
    nccl = replace(RunConfig(), parallel=replace(RunConfig().parallel, distributed_backend="nccl"))
    assert capability_problems(nccl, H200) == []
    assert "use gloo" in only_problem(nccl, CPU)
    buffers = replace(RunConfig(), parallel=replace(RunConfig().parallel, use_nccl_ub=True))
    assert capability_problems(buffers, H200) == []
    assert "--use-nccl-ub: cpu has no CUDA device" in only_problem(buffers, CPU)


@pytest.mark.parametrize(
    ("backend", "flags", "text"),
    [
        ("unfused", {"parallel": ParallelConfig(context_parallel_size=2)}, "has no context parallelism"),
        ("fused", {"model": ModelConfig(window_size=(128, 0), attention_dropout=0.1)}, "windows without dropout only"),
    ],
)
def test_attention_without_a_kernel_is_refused(backend: str, flags: dict[str, Any], text: str) -> None:
    config = RunConfig(**flags, precision=PrecisionConfig(attention_backend=backend))
    assert text in only_problem(config, H200)
    assert capability_problems(replace(config, precision=PrecisionConfig()), H200) == []


def test_flash_attention_has_a_plain_softmax() -> None:
    def problems(backend: str, softmax: str) -> list[str]:
        precision = PrecisionConfig(attention_backend=backend)
        return capability_problems(RunConfig(model=ModelConfig(softmax_type=softmax), precision=precision), H200)

    assert "--softmax-type learnable: FlashAttention has a plain softmax" in problems("flash", "learnable")[0]
    assert problems("flash", "vanilla") == problems("unfused", "learnable") == []


def test_all_problems_are_reported_together() -> None:
    config = fp8("mxfp8", attention_backend="flash", fp8_param_gather=True, use_transformer_engine_op_fuser=True)
    assert len(capability_problems(config, CPU)) == 3


# ---- this machine ---------------------------------------------------------------------------------------------------


def pretend_installed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A transformer-engine whose package is `folder`."""
    spec = importlib.machinery.ModuleSpec("transformer_engine", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.20.2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_an_incomplete_installation_is_a_problem_with_its_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the bare package, every import of megatron-core fails."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    pretend_installed(monkeypatch, package)
    target = capability.detect_target()
    assert target.transformer_engine is None
    assert "pip uninstall transformer-engine" in only_problem(RunConfig(), target)


@pytest.mark.parametrize("place", ["transformer_engine", "transformer_engine/wheel_lib", "."])
def test_a_complete_installation_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str) -> None:
    package = tmp_path / "transformer_engine"
    (package / "wheel_lib").mkdir(parents=True)
    (tmp_path / place / "transformer_engine_torch.cpython-311.so").touch()
    pretend_installed(monkeypatch, package)
    assert capability.transformer_engine_version() == ("2.20.2", None)


def test_a_missing_transformer_engine_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert capability.transformer_engine_version() == (None, None)


def test_every_target_device_has_the_fields_of_the_rules() -> None:
    for name, target in TARGETS.items():
        assert target.name == name
        assert (target.kind == "cuda") == (target.compute_capability is not None)


def test_environment_variables_that_change_the_recipe_give_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    monkeypatch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "0")
    blockwise = PrecisionConfig(fp8_format="e4m3", fp8_recipe="blockwise")
    (notice,) = capability.environment_notices(blockwise, "transformer_engine")
    assert notice.startswith("NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 is set") and "scales are FP32" in notice
    assert capability.environment_notices(blockwise, "emulated") == []
    tensorwise = PrecisionConfig(fp8_format="e4m3", fp8_recipe="tensorwise")
    assert capability.environment_notices(tensorwise, "transformer_engine") == []
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", "0")
    attention = [PrecisionConfig(fp8_format="hybrid", fp8_dot_product_attention=asked) for asked in (True, False)]
    (notice,), nothing = (capability.environment_notices(each, "transformer_engine") for each in attention)
    assert "computes the backward pass of attention in BF16" in notice and nothing == []


# ---- precision maps -------------------------------------------------------------------------------------------------


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
    assert capability_problems(mapped(*entries), H200) == []
    assert resolve_implementation(mapped(*entries), H200) == "transformer_engine"
    assert capability_problems(mapped(*entries, fp8_format=None, fp8_recipe="delayed"), H200) == []


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_a_stateless_output_layer_works_with_every_recipe(recipe: str) -> None:
    config = mapped("output_layer=tensorwise", fp8_recipe=recipe, use_transformer_engine_op_fuser=True)
    assert capability_problems(config, H200) == [] and resolve_implementation(config, H200) == "transformer_engine"


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
    ],
)
def test_maps_unsupported_by_transformer_engine_are_refused_or_emulated(config: RunConfig, words: str) -> None:
    asked = replace(config, precision=replace(config.precision, transformer_impl="transformer_engine"))
    assert words in only_problem(asked, H200)
    emulated = replace(config, precision=replace(config.precision, use_transformer_engine_op_fuser=False))
    # As without a map, a format is never a reason to emulate.
    assert resolve_implementation(config, H200) == ("transformer_engine" if "E5M2" in words else "emulated")
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
def test_notice_of_auto_emulation_has_the_reason(config: RunConfig, words: str) -> None:
    (notice,) = capability.emulation_notices(config, H200)
    assert notice.startswith(f"all layers are emulated because of {words}")
    assert notice.endswith("; to get an error instead: --no-emulation")
    told = replace(config, precision=replace(config.precision, transformer_impl="emulated"))
    strict = replace(config, precision=replace(config.precision, emulation=False))
    silent = [(told, H200), (strict, H200), (config, CPU), (config, replace(H200, transformer_engine=None))]
    assert [capability.emulation_notices(*each) for each in silent] == [[]] * 4


def test_layers_of_transformer_engine_need_no_notice() -> None:
    assert capability.emulation_notices(mapped("*.linear_fc2=blockwise/e4m3"), H200) == []


def test_weights_of_block_recipes_are_not_kept_as_codes() -> None:
    config = mapped("*.linear_fc2=mxfp8", fp8_param_gather=True, transformer_impl="emulated")
    assert "--precision *.linear_fc2=mxfp8 stores two copies" in only_problem(config, CPU)


def test_messages_of_warmup_and_flush_overlap_on_gpus_only() -> None:
    config = with_values(RunConfig(), {"parallel.overlap_p2p_comm_warmup_flush": True})
    found = capability.implementation_problems(config, capability.TARGETS["cpu"], "emulated")
    assert any("--overlap-p2p-communication-warmup-flush: on CPU ranks" in problem for problem in found)


@pytest.mark.parametrize(
    ("recipe", "kernels", "policy", "problem"),
    [
        ("delayed", "te", "skip", None),
        ("tensorwise", "triton", "stop", None),
        ("blockwise", "te", "stop", None),
        ("delayed", "triton", "bf16", None),
        ("blockwise", "te", "bf16", "Transformer Engine's fused MLP shows no infinite amax"),
    ],
)
def test_reactions_need_casts_that_show_infinite_amaxes(
    recipe: str, kernels: str, policy: str, problem: str | None
) -> None:
    fused = {"quantize_kernels": kernels, "use_transformer_engine_op_fuser": problem is not None}
    config = with_values(fp8(recipe, **fused), {"training.on_nonfinite_activation": policy})
    if problem is None:
        assert not capability_problems(config, H200)
    else:
        assert problem in only_problem(config, H200)
