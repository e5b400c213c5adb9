"""Rules about activations for the backward pass: recomputed, offloaded, or kept as codes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megafp8.config import derived, saved_activations, stages
from megafp8.config.expert_layers import is_mixture
from megafp8.config.rules.base import has_shape, no_effect_without
from megafp8.config.rules.pipeline import has_stages
from megafp8.config.schema import RunConfig
from megafp8.config.schema.training import OFFLOAD_MODULES
from megafp8.recipes import registry


def offloading_has_its_modules(config: RunConfig, world_size: int) -> Iterator[str]:
    """--fine-grained-activation-offloading needs modules, which the model has and keeps inputs of."""
    training, flag = config.training, "--fine-grained-activation-offloading"
    modules = training.offload_modules
    if not training.fine_grained_activation_offloading:
        return
    if not modules:
        yield f"{flag} needs --offload-modules: give some of {', '.join(OFFLOAD_MODULES)}"
    if "attn_proj" in modules and "core_attn" not in modules:
        yield "--offload-modules attn_proj: its input is the output of core_attn, which keeps it; add core_attn"
    of_experts = " ".join(name for name in ("expert_fc1", "moe_act") if name in modules)
    if of_experts and not (is_mixture(config.model) and config.parallel.moe_grouped_gemm):
        yield no_effect_without(f"--offload-modules {of_experts}", "--num-experts with --moe-grouped-gemm")
    if derived.recompute_granularity(training) == "full":
        yield f"{flag} with --recompute-granularity full, which keeps only the inputs of layers: remove one"


def full_recompute_says_which_layers(config: RunConfig, world_size: int) -> Iterator[str]:
    """Full recompute needs a method and a number of layers, which a pipeline stage must have."""
    training = config.training
    if training.recompute_granularity != "full":
        return
    if training.recompute_activations:
        yield "--recompute-activations (selective) contradicts --recompute-granularity full: keep one"
    needed = {
        "--recompute-method": training.recompute_method,
        "--recompute-num-layers": training.recompute_num_layers,
    }
    if missing := [flag for flag, value in needed.items() if value is None]:
        yield (
            f"--recompute-granularity full needs {' and '.join(missing)}: --recompute-method uniform "
            "--recompute-num-layers 1 recomputes every layer"
        )
    count = training.recompute_num_layers
    if count is None or count < 1 or not has_stages(config, world_size):
        return
    sizes = sorted({len(chunk) for chunks in stages.stage_layers(config) for chunk in chunks} - {0})
    chunk = (
        "virtual pipeline stage" if stages.virtual_pipeline_size(config.model, config.parallel) else "pipeline stage"
    )
    if count > sizes[-1]:
        yield (
            f"--recompute-num-layers {count} is more than the {sizes[-1]} layers of a {chunk}: use at most {sizes[-1]}"
        )
    elif training.recompute_method == "uniform" and any(size % count for size in sizes):
        yield (
            f"--recompute-method uniform: groups of --recompute-num-layers {count} do not divide the "
            f"{' and '.join(map(str, sizes))} layers of the {chunk}s: use a divisor, for example "
            f"{math.gcd(count, *sizes)}"
        )


def delayed_scaling_excludes_norm_recompute(config: RunConfig, world_size: int) -> Iterator[str]:
    """Recomputing a norm would quantize its output a second time and enter the amax into the history twice."""
    name = derived.quantization_recipe(config.precision)
    recipe = None if name is None else registry.get(name)
    if recipe and recipe.is_stateful and "layernorm" in derived.recompute_modules(config.training):
        yield f"--recompute-modules layernorm is not supported with {recipe.flag}: remove layernorm"


def mlp_recompute_excludes_biases(config: RunConfig, world_size: int) -> Iterator[str]:
    """megatron-core's recomputed MLP returns its bias unchanged, and its backward pass then recurses infinitely."""
    if config.model.add_bias_linear and "mlp" in derived.recompute_modules(config.training):
        yield (
            "--recompute-modules mlp is not supported with biases in linear layers: remove mlp, or give "
            "--disable-bias-linear"
        )


def saved_activations_have_ranks_to_spread_over(config: RunConfig, world_size: int) -> Iterator[str]:
    """--distribute-saved-activations splits the saved activations of full recompute over tensor-parallel ranks."""
    training, parallel = config.training, config.parallel
    if not training.distribute_saved_activations:
        return
    if training.recompute_granularity != "full":
        yield no_effect_without("--distribute-saved-activations", "--recompute-granularity full")
    if parallel.tensor_model_parallel_size == 1:
        yield (
            "--distribute-saved-activations needs more than one tensor-parallel rank: remove it, or use "
            "--tensor-model-parallel-size 2 or more"
        )
    if parallel.sequence_parallel:
        yield (
            "--distribute-saved-activations with --sequence-parallel, which already shards saved activations: remove "
            "the former"
        )


def saved_activations_can_be_codes(config: RunConfig, world_size: int) -> Iterator[str]:
    """--fp8-saved-activations packs BF16 activations in groups, of dense MLPs and their norms."""
    precision, flag = config.precision, "--fp8-saved-activations"
    if not precision.fp8_saved_activations:
        return
    if not precision.bf16:
        kind = "FP16's largest activations would overflow when codes are decoded" if precision.fp16 else "FP32 is exact"
        yield f"{flag} needs --bf16: {kind}; give --bf16, or remove {flag}"
    has_activation = saved_activations.ACTIVATION in precision.fp8_saved_activations
    if has_activation and is_mixture(config.model):
        yield (
            f"{flag} activation with --num-experts: the activations of experts are not packed; remove activation, or "
            "use --recompute-granularity selective --recompute-modules moe_act"
        )
    for entry in config.overrides:
        if has_activation and entry.partition("=")[0] == "transformer.activation_func_fp8_input_store":
            yield f"{flag} activation with --override {entry}, which casts the same tensor without a scale: remove one"
    if not has_shape(config):
        return
    for part, channels in saved_activations.grouped_channels(config).items():
        if part in precision.fp8_saved_activations and channels % saved_activations.GROUP:
            sizes = "--hidden-size" if part == saved_activations.NORM else "--ffn-hidden-size on a tensor-parallel rank"
            yield (
                f"{flag} {part}: {sizes}, {channels}, must be a multiple of the group size, {saved_activations.GROUP}; "
                f"remove {part}, or change the size"
            )


def saved_activations_are_saved(config: RunConfig, world_size: int) -> Iterator[str]:
    """Recomputation and offloading keep other tensors than those that --fp8-saved-activations packs."""
    parts, flag = config.precision.fp8_saved_activations, "--fp8-saved-activations"
    if not parts:
        return
    if config.training.fine_grained_activation_offloading:
        yield f"{flag} with --fine-grained-activation-offloading: both replace saved activations; remove one"
    if derived.recompute_granularity(config.training) == "full":
        yield f"{flag} with --recompute-granularity full, which keeps only the inputs of layers: remove one"
    modules = derived.recompute_modules(config.training)
    if "mlp" in modules:
        yield (
            f"{flag} {' '.join(parts)} with --recompute-modules mlp, which keeps the MLP's input in high precision and "
            "drops the rest: remove one"
        )
    if "layernorm" in modules and saved_activations.NORM in parts:
        yield (
            f"{flag} norm with --recompute-modules layernorm, which keeps the inputs of norms in high precision: "
            "remove one"
        )
