"""Which options need Transformer Engine's layers, a GPU or emulated layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Optional

import pytest
from device_targets import CPU, H200, WITHOUT_TE, fp8, only_problem

from megafp8.config.layer_backends import EMULATED
from megafp8.config.schema import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TrainingConfig,
)
from megafp8.config.settings import with_values
from megafp8.device import capability
from megafp8.device.capability import Target, capability_problems


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


def test_documents_limit_context_parallel_communication_in_another_way() -> None:
    window, offsets, dropout = {"window_size": "127,0"}, {"softmax_type": "learnable"}, {"attention_dropout": 0.1}
    cases: tuple[tuple[dict[str, Any], str, str], ...] = (
        ({}, "p2p", ""),
        (window, "p2p", ""),
        (offsets, "p2p", ""),
        ({"multi_latent_attention": True}, "a2a", ""),
        (dropout, "a2a", ""),
        ({}, "a2a+p2p", "allgather or a2a, not a2a+p2p"),
        (offsets, "a2a", "--reset-attention-mask and --softmax-type learnable with --context-parallel-size 2"),
        (dropout, "allgather", "--reset-attention-mask and --attention-dropout 0.1 with --context-parallel-size 2"),
    )
    for options, kind, problem in cases:
        config = RunConfig(
            model=ModelConfig(**{"attention_dropout": 0.0} | options),
            data=DataConfig(reset_attention_mask=True),
            parallel=ParallelConfig(context_parallel_size=2, cp_comm_type=kind),
        )
        problems = capability_problems(config, H200)
        assert [problem in each for each in problems] == [True] * bool(problem), (kind, problems)


@pytest.mark.parametrize(
    ("length", "parallel", "gib"),
    [
        (4096, {}, None),  # 2^29 products
        (8192, {}, "256"),
        (8192, {"tensor_model_parallel_size": 4}, None),
        (8192, {"context_parallel_size": 2}, None),  # a fourth of the queries in each of two pieces
        (8192, {"context_parallel_size": 2, "cp_comm_type": "a2a"}, "128"),  # half of the heads
        (16384, {"context_parallel_size": 2}, "256"),
    ],
)
def test_deterministic_attention_of_long_documents_is_refused(
    length: int, parallel: dict[str, Any], gib: Optional[str]
) -> None:
    config = RunConfig(
        model=ModelConfig(num_attention_heads=32, attention_dropout=0.0),
        data=DataConfig(reset_attention_mask=True, seq_length=length),
        parallel=ParallelConfig(**parallel),
        training=TrainingConfig(micro_batch_size=1),
    )
    assert capability_problems(config, H200) == []
    deterministic = with_values(config, {"precision.deterministic_mode": True})
    found = capability_problems(deterministic, H200)
    assert len(found) == (gib is not None) and capability_problems(deterministic, CPU) == []
    assert all(f"needs {gib} GiB or more; remove --deterministic-mode" in text for text in found)


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


def test_tokens_are_written_into_the_memory_of_gpus_only() -> None:
    config = with_values(RunConfig(), {"model.num_experts": 4, "parallel.moe_token_dispatcher_type": "peer"})
    assert "--moe-token-dispatcher-type peer needs a GPU" in only_problem(config, CPU)


def test_messages_of_warmup_and_flush_overlap_on_gpus_only() -> None:
    config = with_values(RunConfig(), {"parallel.overlap_p2p_comm_warmup_flush": True})
    found = capability.implementation_problems(config, capability.TARGETS["cpu"], EMULATED)
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
