"""Rules about quantization statistics: --fp8-log-interval, --fp8-log-layers and --fp8-what-if."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from megafp8.config import derived, gemm_alignment, precision_map
from megafp8.config.activations import is_plain_swiglu
from megafp8.config.rules.base import all_positive, no_effect_without
from megafp8.config.rules.precision import has_gemm_dimensions
from megafp8.config.schema import ModelConfig, RunConfig
from megafp8.config.settings import with_values
from megafp8.recipes import registry


def statistics_have_an_object(config: RunConfig, world_size: int) -> Iterator[str]:
    """In high precision there are statistics only with --fp8-what-if."""
    logging = config.logging
    is_quantized = precision_map.is_quantized(config.precision)
    if logging.fp8_log_interval is not None and not is_quantized and not derived.what_if_recipes(logging):
        yield no_effect_without(
            f"--fp8-log-interval {logging.fp8_log_interval}", "--fp8-format, --fp4-format or recipes for --fp8-what-if"
        )


def patterns_name_linears(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every pattern of --fp8-log-layers matches a linear that has statistics."""
    num_layers, patterns = config.model.num_layers, derived.log_layer_patterns(config.logging)
    if not patterns:
        yield (
            f"--fp8-log-layers {config.logging.fp8_log_layers!r} contains no pattern: remove it to record all linear "
            "layers"
        )
    if num_layers is None or not all_positive(num_layers):
        return
    names = _linears_with_each_expert(config.model)
    for pattern in patterns:
        if problem := precision_map.pattern_problem(pattern, config.model, names):
            yield f"--fp8-log-layers {pattern}: {problem}"
        elif config.logging.fp8_log_interval is not None:
            yield from missing_statistics_problems(config, pattern)


@functools.lru_cache(maxsize=16)
def _linears_with_each_expert(model: ModelConfig) -> tuple[str, ...]:
    """Names of the linears of every expert, which the layout search asks for with every layout of one model."""
    return precision_map.expert_names(model, precision_map.linear_names(model))


def missing_statistics_problems(config: RunConfig, pattern: str) -> Iterator[str]:
    """Why no linear that matches a pattern has statistics."""
    observable, flag = (
        precision_map.linears_with_statistics(config.model, config.precision),
        f"--fp8-log-layers {pattern}",
    )
    if any(precision_map.matches_pattern(name, pattern) for name in observable):
        return
    if not observable:
        yield (
            f"--fp8-log-interval {config.logging.fp8_log_interval}: no linear layer of this run is quantized; remove it"
        )
    elif precision_map.is_quantized(config.precision):
        yield (
            f"{flag} matches only linear layers in high precision, which have no statistics; choose some of the "
            f"{len(observable)} quantized ones, {observable[0]} to {observable[-1]}, or set a recipe for these with "
            "--precision"
        )
    elif derived.what_if_recipes(config.logging):
        yield (
            f"{flag}: in a high-precision run, --fp8-what-if covers only the linear layers of transformer layers; "
            "choose some of layers.*"
        )


def tried_recipes_can_be_tried(config: RunConfig, world_size: int) -> Iterator[str]:
    """Recipes of --fp8-what-if exist, are given once, and support the GEMM dimensions."""
    recipes, known = derived.what_if_recipes(config.logging), [recipe.name for recipe in registry.stateless()]
    if config.logging.fp8_what_if is not None and not recipes:
        yield f"--fp8-what-if {config.logging.fp8_what_if!r} contains no recipe: choose from {', '.join(known)}"
    for recipe in dict.fromkeys(recipes):
        if recipe not in known:
            yield f"--fp8-what-if {recipe}: not available; choose from {', '.join(known)}"
        elif has_gemm_dimensions(config):
            yield from (
                f"--fp8-what-if {recipe}: {problem}"
                for problem in gemm_alignment.gemm_alignment_problems(config_with_recipe(config, recipe))
            )
            yield from expert_row_problems(config, recipe)
    if len(set(recipes)) < len(recipes):
        yield f"--fp8-what-if {config.logging.fp8_what_if}: give each recipe once"


def expert_row_problems(config: RunConfig, name: str) -> Iterator[str]:
    """Why a recipe with a Hadamard transform cannot be tried on the rows of experts, whose number is not known."""
    recipe = registry.get(name)
    is_transformed = any(rule is not None and rule.is_transformed for *_, rule in recipe.rules().rules)
    multiple = max((each.gemm_alignment for each in derived.used_recipes(config.precision)), default=1)
    if config.model.num_experts and is_transformed and multiple % recipe.gemm_alignment:
        yield (
            f"--fp8-what-if {name} with --num-experts {config.model.num_experts}: it transforms groups of "
            f"{recipe.gemm_alignment} rows, and rows of experts are padded to multiples of {multiple}; remove it"
        )


def config_with_recipe(config: RunConfig, name: str) -> RunConfig:
    """The same configuration with one recipe for all linears of the layers, in its default format."""
    recipe = registry.get(name)
    changes = {
        "fp8_format": None, "fp4_format": None, f"{recipe.family}_recipe": name,
        f"{recipe.family}_format": recipe.default_format, "precision_map": (), "first_last_layers_bf16": False,
    }  # fmt: skip
    return with_values(config, {f"precision.{field}": value for field, value in changes.items()})


def fused_operations_show_swiglu(config: RunConfig, world_size: int) -> Iterator[str]:
    """Of Transformer Engine's fused activations only SwiGLU shows its results, which the statistics need."""
    interval, is_fused = config.logging.fp8_log_interval, config.precision.use_transformer_engine_op_fuser
    if interval is not None and is_fused and not is_plain_swiglu(config.model):
        yield (
            f"--fp8-log-interval {interval} with --use-transformer-engine-op-fuser: of the fused activations only that "
            "of --swiglu shows the MLP's operands; remove one"
        )
