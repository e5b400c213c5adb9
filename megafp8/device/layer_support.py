"""Options of the model and of number formats that only some layers support, and layers that cannot be in a graph."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from megafp8.config import derived, mixture, precision_map, sharding
from megafp8.config.expert_layers import is_mixture
from megafp8.config.grouped_experts import (
    expert_choices,
    grouped_expert_problems,
    one_launch_suggestion,
    peer_problems,
)
from megafp8.config.layer_backends import LayerBackend, Reasons
from megafp8.config.rules.precision import fuses_swiglu_quantization, triton_cast_recipes, uses_op_fuser
from megafp8.config.schema import (
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TrainingConfig,
)
from megafp8.recipes import registry
from megafp8.recipes.base import Gemm, Operand, Recipe

# ---------------------------------------------------------------------------------------------------------------------
# What the settings need of this machine's packages and environment variables; a dry run reports it as warnings


def package_problems(logging: LoggingConfig) -> list[str]:
    """Requested packages that are not installed on this machine."""
    requested = (
        ("--wandb-project", logging.wandb_project, "wandb", "wandb"),
        ("--mlflow-experiment", logging.mlflow_experiment, "mlflow", "mlflow"),
        ("--metrics-port", logging.metrics_port, "prometheus_client", "prometheus-client"),
    )
    return [
        f"{flag} {value}: the package {package} is not installed; pip install {package}, or remove the flag "
        "(records.jsonl and TensorBoard have the same values)"
        for flag, value, module, package in requested
        if value and importlib.util.find_spec(module) is None
    ]


def offloading_problems(training: TrainingConfig) -> list[str]:
    """What this machine's environment lacks for activation offloading: Transformer Engine reads it on import."""
    variable = "NVTE_CPU_OFFLOAD_V1"
    if not training.fine_grained_activation_offloading or os.environ.get(variable) == "1":
        return []
    return [
        f"--fine-grained-activation-offloading: Transformer Engine 2.10 and newer would copy weights to the host, too; "
        f"set the environment variable {variable}=1"
    ]


ATTENTION_SWITCHES = {"flash": "NVTE_FLASH_ATTN", "fused": "NVTE_FUSED_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}
"""Environment variables of Transformer Engine by the attention that they allow (1, its default) or exclude (0)."""


def attention_switch_problems(precision: PrecisionConfig, implementation: LayerBackend) -> list[str]:
    """Variables that contradict `--attention-backend`: megatron-core sets them, and asserts that they are not set."""
    backend = precision.attention_backend
    values = {kind: os.environ[name] for kind, name in ATTENTION_SWITCHES.items() if name in os.environ}
    expected = {kind: "1" if backend in ("auto", kind) else "0" for kind in values}
    if implementation.has_torch_attention or values == expected:
        return []
    text = " ".join(f"{ATTENTION_SWITCHES[kind]}={value}" for kind, value in values.items())
    allowed = [kind for kind in ATTENTION_SWITCHES if values.get(kind) != "0"]
    flag = f"--attention-backend {allowed[0]}" if 0 < len(allowed) < len(ATTENTION_SWITCHES) else "a flag"
    names = " ".join(ATTENTION_SWITCHES[kind] for kind in values)
    return [f"{text} contradicts --attention-backend {backend}; unset {names}, and choose with {flag}"]


def ignore_attention_switches() -> None:
    """Forget variables of Transformer Engine where attention is torch's: megatron-core asserts that they are not 1."""
    for name in ATTENTION_SWITCHES.values():
        os.environ.pop(name, None)


def exchange_library_problems(library: Optional[str]) -> list[str]:
    """The library of `--moe-token-dispatcher-type flex`, if it is not installed on this machine.

    Args:
        library: as `mixture.exchange_library`.
    """
    if library is None or has_exchange_library(library):
        return []
    branch = " (branch hybrid-ep)" if library == "HybridEP" else ""
    return [
        f"--moe-token-dispatcher-type flex: {library} is not installed; build the package deep_ep of "
        f"github.com/deepseek-ai/DeepEP{branch}, or use --moe-token-dispatcher-type alltoall"
    ]


def has_exchange_library(library: str) -> bool:
    """Whether the package deep_ep has the class that megatron-core imports. It is read, since its import needs a GPU.

    Args:
        library: `DeepEP` or `HybridEP`.
    """
    spec = importlib.util.find_spec("deep_ep")
    if spec is None or spec.origin is None:
        return False
    name = {"DeepEP": "Buffer", "HybridEP": "HybridEPBuffer"}[library]
    return re.search(rf"\b{name}\b", Path(spec.origin).read_text(encoding="utf-8")) is not None


# ---- What Transformer Engine does not support beside FP8 weights: FP16 master weights, and shards -------------------


def fp16_master_problems(precision: PrecisionConfig, optimizer: OptimizerConfig) -> list[str]:
    """Problem of FP16 master weights beside FP8 weights: Adam's own FP8 update knows delayed scaling only."""
    dtype = optimizer.main_params_dtype
    is_used = precision.fp8_param_gather and precision.fp8_format is not None
    if dtype == "fp32" or not is_used or derived.is_stateful(precision):
        return []
    known = " or ".join(recipe.flag for recipe in registry.stateful())
    return [
        f"--main-params-dtype {dtype} with --fp8-param-gather and --fp8-recipe {precision.fp8_recipe}: Transformer "
        "Engine's Adam, which keeps such master weights, writes FP8 weights of delayed scaling only; remove "
        f"--main-params-dtype, or use {known}"
    ]


def gathered_codes_problems(parallel: ParallelConfig, precision: PrecisionConfig) -> list[str]:
    """Problem of codes of sharded weights: scales from a history are made inside Transformer Engine, and
    block scales have a layout of its own. Emulated layers support both."""
    if not (parallel.shards_weights and precision.fp8_param_gather):
        return []
    known = ", ".join(
        recipe.name for recipe in registry.recipes() if recipe.te_recipe_class and has_current_tensor_scale(recipe)
    )
    return [
        f"--fp8-param-gather with {sharding.FLAG} and --fp8-recipe {recipe.name}: Transformer Engine's layers read "
        "gathered codes only where a weight has one scale, which follows from its present values, and this recipe has "
        f"{'scales from an amax history' if recipe.is_stateful else 'scales of blocks'}; remove --fp8-param-gather, or "
        f"use --fp8-recipe {known} or --transformer-impl emulated"
        for recipe in derived.used_recipes(precision)
        if not has_current_tensor_scale(recipe)
    ]


def has_current_tensor_scale(recipe: Recipe) -> bool:
    """Whether a weight has one scale, of its present values."""
    rule = recipe.rules().rule(Operand.WEIGHT, Gemm.FPROP)
    return rule is not None and rule.block is None and not recipe.is_stateful


# ----------------------------------------------------------------------------------------------------------------------


def unsupported_in_model(model: ModelConfig) -> list[str]:
    """Options of the model for which there are no layers on Transformer Engine here."""
    options = {
        f"--norm-placement {model.norm_placement}": model.norm_placement != "pre",
        f"--residual-multiplier {model.residual_multiplier:g}": model.residual_multiplier != 1,
        "--parallel-residual": model.parallel_residual,
        "--qk-layernorm-across-heads": model.qk_layernorm_across_heads,
        f"--rotary-base-local {model.rotary_base_local}": model.rotary_base_local is not None,
    }
    return [
        f"{flag}: the layers on Transformer Engine do not support it" for flag, is_given in options.items() if is_given
    ]


def quantizer_problems(config: RunConfig) -> list[str]:
    """What Transformer Engine's layers do not offer: reactions to counts of quantizers, and codes that travel."""
    training = config.training
    policy = training.on_nonfinite_activation
    requested = {
        "--moe-dispatch-in-fp8 without --moe-expert-kernels triton": (
            config.parallel.moe_dispatch_in_fp8 and any(grouped_expert_problems(config))
        ),
    }
    found = [
        f"{flag}: Transformer Engine's layers do not support it; remove the flag, or use --transformer-impl emulated"
        for flag, is_given in requested.items()
        if is_given
    ]
    cast = triton_cast_recipes(config)
    unseen = [
        recipe.name for recipe in derived.used_recipes(config.precision)
        if not recipe.is_stateful and recipe.name not in cast
    ]  # fmt: skip
    if policy != "warn" and unseen and uses_op_fuser(config) and not fuses_swiglu_quantization(config):
        found.append(
            f"--on-nonfinite-activation {policy} with {unseen[0]}: Transformer Engine's fused MLP shows no infinite "
            "amax; use --no-use-transformer-engine-op-fuser, or --quantize-kernels triton"
        )
    if (moving := derived.moves_linears(training)) and config.precision.fp8_dot_product_attention:
        found.append(
            f"{moving} with --fp8-dot-product-attention: the scales of attention are updated with the linears around "
            "it, which may be in high precision then; remove one"
        )
    changing = "--fp8-guard smooth-swiglu" if training.fp8_guard == "smooth-swiglu" else moving
    if changing and config.precision.fp8_saved_activations:
        found.append(
            f"{changing} with --fp8-saved-activations: an MLP that then runs linear by linear saves others; remove one"
        )
    return found


def expert_kernel_problems(config: RunConfig, implementation: LayerBackend) -> list[str]:
    """What emulated layers with all experts in one launch, and megatron-core's own layers, do not offer."""
    if config.parallel.moe_expert_kernels != "triton":
        if not is_mixture(config.model) or mixture.token_dispatcher(config) != mixture.PEER:
            return []
        return ["--moe-token-dispatcher-type peer needs a GPU and --moe-expert-kernels triton; use alltoall"]
    if not implementation.stacks_experts:
        return [
            "--moe-expert-kernels triton with --transformer-impl local: an expert is an MLP there; remove the former"
        ]
    guard, reduction = config.training.fp8_guard, config.precision.fp8_amax_reduction
    requested = {
        f"--fp8-guard {guard}": guard == "smooth-swiglu",
        f"--fp8-amax-reduction {reduction}": reduction != "te",
    }
    return [
        f"{flag}: experts in one launch do not support it; remove it, or --moe-expert-kernels triton"
        for flag, is_given in requested.items()
        if is_given
    ]


FEW_EXPERTS, LARGE_EXPERT = 8, 2**24
"""Experts of a GPU, and weights of a linear, that take longer than in megatron-core where blocks have scales: 8 of 2^26
do, 8 of 2^21 do not (benchmarks/results/experts.md)."""


def expert_launch_warnings(config: RunConfig, target_kind: str, implementation: LayerBackend) -> list[str]:
    """What it costs that the experts of a GPU run one by one, and what avoids it."""
    if not is_mixture(config.model) or target_kind != "cuda" or mixture.experts_per_rank(config) == 1:
        return []
    is_emulated = implementation.emulates
    problem = next(grouped_expert_problems(config), None)
    if not implementation.stacks_experts:
        suggestion = "--transformer-impl auto may run them in one launch"
    elif problem or (is_emulated and config.parallel.moe_expert_kernels != "triton"):
        suggestion = one_launch_suggestion(config, is_emulated)
    else:
        return list(one_launch_warnings(config, is_emulated))
    measured = (
        "in FP8, an H200 took 16 times as long for a step with 128 experts, 1.2 times with 8"
        if derived.used_recipes(config.precision)
        else "in BF16, two H200s took 5 times as long for a step with 64 experts each"
    )
    num_experts = mixture.experts_per_rank(config)
    return [f"the {num_experts} experts of a GPU run one by one, not in one launch ({measured}): {suggestion}"]


def one_launch_warnings(config: RunConfig, is_emulated: bool) -> Iterator[str]:
    """What experts in one launch cost with some settings."""
    if config.precision.fp8_param_gather:
        yield (
            "--fp8-param-gather: the weights of experts in one launch stay in BF16 and are gathered so, with the same "
            "results; --moe-expert-kernels te stores them in FP8 and runs experts one by one"
        )
    names = {name for choice in expert_choices(config.model, config.precision) for name in choice.recipes}
    blocked = [name for name in names if registry.get(name).block_length]
    size = mixture.moe_ffn_hidden_size(config.model) * (config.model.hidden_size or 0)
    if blocked and not is_emulated and mixture.experts_per_rank(config) <= FEW_EXPERTS and size >= LARGE_EXPERT:
        yield (
            f"{blocked[0]}, whose blocks have scales, with experts in one launch: with 8 large experts a step took an "
            "H200 1.06 times as long as in megatron-core, with 4 on each of two 1.09 times; a recipe with a scale for "
            "each tensor took 0.8 times as long"
        )
    yield from exchange_warnings(config)


def exchange_warnings(config: RunConfig) -> Iterator[str]:
    """What it costs in FP8 that experts in one launch get their tokens by a collective."""
    dispatcher, has_ranks = mixture.token_dispatcher(config), config.parallel.expert_model_parallel_size > 1
    if not has_ranks or dispatcher == mixture.PEER or not derived.used_recipes(config.precision):
        return
    problem = next(peer_problems(config), None)
    fix = f"peer does not support {problem}" if problem else "auto takes peer where GPUs reach each other's memory"
    yield (
        f"--moe-token-dispatcher-type {dispatcher}: the host waits for the numbers of tokens once a layer, and no step "
        "is a CUDA graph. On two H200s FP8 was 0.96 to 1.08 times as fast as BF16 with 64 small experts on each and a "
        "scale for each tensor, and 0.95 to 1.00 times with scales of blocks (with peer 1.19 and 1.04), 1.05 to 1.15 "
        f"and 0.92 to 0.95 times with 8 small experts, 1.34 and 1.06 times with 4 large ones: {fix}"
    )


def context_parallel_attention_problems(
    model: ModelConfig, parallel: ParallelConfig, separates_documents: bool, exchange: str
) -> list[str]:
    """Attention that context-parallel ranks have with only some kinds of communication.

    Args:
        separates_documents: attention stops at the borders of documents.
        exchange: as `dimensions.cp_exchange`.
    """
    softmax, is_special = f"--softmax-type {model.softmax_type}", model.softmax_type != "vanilla"
    options: tuple[tuple[str, bool, tuple[str, ...], str], ...] = (
        ("--window-size", model.window_size is not None, ("a2a", "allgather"), "remove --window-size"),
        (softmax, is_special, ("a2a",), "remove --softmax-type"),
    )
    if separates_documents:  # by `te/packed_sequences.py`
        dropout = f"--attention-dropout {model.attention_dropout}"
        options = (
            ("--reset-attention-mask", True, ("allgather", "a2a"), "remove the first flag"),
            (f"--reset-attention-mask and {softmax}", is_special, ("allgather",), "remove --softmax-type"),
            (
                f"--reset-attention-mask and {dropout}",
                model.attention_dropout > 0,
                ("a2a",),
                "give --attention-dropout 0",
            ),
        )
    return [
        f"{flag} with --context-parallel-size {parallel.context_parallel_size}: Transformer Engine needs "
        f"--cp-comm-type {' or '.join(known)}, not {parallel.cp_comm_type}; give that, or {fix}"
        for flag, is_given, known, fix in options
        if is_given and exchange not in known
    ]


def emulated_only_options(precision: PrecisionConfig) -> list[str]:
    """Problems of number format options that Transformer Engine does not offer."""
    by_environment = "Transformer Engine has environment variables for this; remove the flag"
    entries = precision_map.entries(precision_map.with_all_phases(precision))
    requested = {
        "--fp8-format e5m2": (
            "e5m2" in (precision.fp8_format, *(entry.format for entry in entries)),
            "Transformer Engine does not support E5M2 for all tensors; use e4m3 or hybrid"),
        f"--fp8-tensorwise-margin {precision.fp8_tensorwise_margin}": (
            precision.fp8_tensorwise_margin != 0, "Transformer Engine has no such margin; remove it"),
        "--fp8-e8m0-floor": (precision.fp8_e8m0_floor, "Transformer Engine rounds these scales up; remove it"),
        "--fp8-power-2-scale": (precision.fp8_power_2_scale, by_environment),
        "--fp8-block-scaling-fp32-scales": (precision.fp8_block_scaling_fp32_scales, by_environment),
        "--no-fp4-hadamard": (not precision.fp4_hadamard, by_environment),
        "--no-fp4-stochastic-rounding": (not precision.fp4_stochastic_rounding, by_environment),
        "--no-fp4-2d-weights": (not precision.fp4_2d_weights, by_environment),
        "--fp4-four-over-six": (
            precision.fp4_four_over_six, "Transformer Engine has it without Hadamard transform only; remove it"),
        "--fp8-amax-reduction all": (
            precision.fp8_amax_reduction != "te",
            "Transformer Engine reduces amaxes only for operands that it gathers; remove the flag",
        ),
        "--no-fp8-wgrad": (
            not precision.fp8_wgrad,
            "Transformer Engine 2 has no such setting (megatron-core ignores it silently); remove the flag",
        ),
    }  # fmt: skip
    return [
        f"{flag}: {reason}, or use --transformer-impl emulated"
        for flag, (is_requested, reason) in requested.items()
        if is_requested
    ]


def attention_kernel_problems(model: ModelConfig, precision: PrecisionConfig, parallel: ParallelConfig) -> list[str]:
    """Attention for which Transformer Engine does not use the chosen backend, so that no kernel would be left."""
    backend, ranks = precision.attention_backend, parallel.context_parallel_size
    found = []
    if backend == "flash" and model.softmax_type != "vanilla":
        found.append(
            f"--attention-backend flash with --softmax-type {model.softmax_type}: FlashAttention has a plain "
            "softmax; use --attention-backend auto, fused or unfused"
        )
    if backend == "unfused" and ranks > 1:
        found.append(
            f"--attention-backend unfused with --context-parallel-size {ranks}: Transformer Engine's unfused attention "
            "has no context parallelism; use --attention-backend auto, flash or fused"
        )
    if backend == "fused" and model.window_size is not None and model.attention_dropout > 0:
        found.append(
            f"--attention-backend fused with --window-size and --attention-dropout {model.attention_dropout}: cuDNN's "
            "attention has windows without dropout only; use --attention-backend auto, or --attention-dropout 0"
        )
    return found


def graph_problems(graph: str, limits: Reasons) -> list[str]:
    """Layers that cannot be captured in the CUDA graph that was asked for.

    Args:
        graph: `--cuda-graph-impl`.
        limits: as `LayerBackend.graph_limits`.
    """
    return [f"{flag} with --cuda-graph-impl {graph}: {reason}; use --cuda-graph-impl none" for flag, reason in limits]
