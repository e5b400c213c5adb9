"""Rules about activation recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import derived
from megafp8.config.rules.base import Rule, all_positive, flags_without_effect, no_effect_without
from megafp8.config.schema import RunConfig
from megafp8.recipes import registry


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
    count, pp = training.recompute_num_layers, config.parallel.pipeline_model_parallel_size
    if count is None or not all_positive(config.model.num_layers, pp):
        return
    per_stage = derived.layers_per_pipeline_rank(config)
    if count > per_stage:
        yield (
            f"--recompute-num-layers {count} is more than the {config.model.num_layers} / {pp} = {per_stage} layers of "
            f"a pipeline stage: use at most {per_stage}"
        )


def layer_choice_needs_full_recompute(config: RunConfig, world_size: int) -> Iterator[str]:
    """Method and number of layers are options of full recompute."""
    training = config.training
    if training.recompute_granularity != "full":
        is_given = {
            f"--recompute-method {training.recompute_method}": training.recompute_method is not None,
            f"--recompute-num-layers {training.recompute_num_layers}": training.recompute_num_layers is not None,
        }
        yield from flags_without_effect(is_given, "--recompute-granularity full")


def module_choice_needs_selective_recompute(config: RunConfig, world_size: int) -> Iterator[str]:
    """Modules are an option of selective recompute."""
    modules = config.training.recompute_modules
    if modules and derived.recompute_granularity(config.training) != "selective":
        yield no_effect_without(f"--recompute-modules {' '.join(modules)}", "--recompute-granularity selective")


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


RULES: tuple[Rule, ...] = (
    full_recompute_says_which_layers,
    layer_choice_needs_full_recompute,
    module_choice_needs_selective_recompute,
    delayed_scaling_excludes_norm_recompute,
    mlp_recompute_excludes_biases,
    saved_activations_have_ranks_to_spread_over,
)
