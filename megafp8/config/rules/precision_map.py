"""Recipes by linear and GEMM, and by step.

Attention in FP8: which runs Transformer Engine has it for.

Looks at what quantization does to the operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megafp8.config import derived, model_shapes, precision_map, precision_options
from megafp8.config.rules.base import Rule, batch_size, positive, without
from megafp8.config.rules.precision import has_gemms
from megafp8.config.schema import LoggingConfig, RunConfig
from megafp8.recipes import registry


def entries_can_be_read(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every entry is PATTERN[:GEMMS]=RECIPE[/FORMAT]."""
    texts = config.precision.precision_map
    for text, (entry, fault) in zip(texts, precision_map.read_entries(texts), strict=True):
        if entry is None:
            yield f"{precision_map.said(text)}: {fault}"


def entries_name_linears(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every pattern names linears that the model has."""
    num_layers = config.model.num_layers
    if num_layers is None or not positive(num_layers):
        return
    for said, entry in precision_map.said_entries(config.precision):
        if fault := precision_map.why_nothing(entry.pattern, num_layers):
            yield f"{said}: {fault}"


def high_precision_is_that_of_the_weights(config: RunConfig, world_size: int) -> Iterator[str]:
    """GEMMs that are not quantized multiply in the type of the weights."""
    dtype = derived.params_dtype(config.precision)
    mend = {"bf16": "give bf16", "fp32": "give fp32, or --bf16 for the run", "fp16": "remove it, or give --bf16"}[dtype]
    for said, entry in precision_map.said_entries(config.precision):
        if entry.recipe in precision_map.HIGH_PRECISION and entry.recipe != dtype:
            yield f"{said}: the weights of this run are {dtype}: {mend}"
    for stretch in schedule_of(config):
        if stretch.precision in precision_options.HIGH and stretch.precision != dtype:
            yield (
                f"--fp8-schedule {config.precision.fp8_schedule}: {stretch.precision}, but the weights of this run are "
                f"{dtype}: {mend}"
            )


def delayed_scales_have_one_format(config: RunConfig, world_size: int) -> Iterator[str]:
    """A linear remembers one scale for each operand, which is for one format; without a map there is but one."""
    if not config.precision.precision_map or not positive(config.model.num_layers):
        return
    for name, chosen in precision_map.resolve(config.model, config.precision).items():
        stateful = [choice for choice in chosen if choice.recipe and registry.get(choice.recipe).is_stateful]
        formats = sorted({str(choice.format) for choice in stateful})
        if len(formats) > 1:
            yield (
                f"the precision map gives {name} delayed scaling in {' and '.join(formats)}: an operand has one scale "
                "for both; give its GEMMs one format"
            )


def schedule_can_be_read(config: RunConfig, world_size: int) -> Iterator[str]:
    """--fp8-schedule is one, and says when the run computes by recipes that it has."""
    precision, flag = config.precision, f"--fp8-schedule {config.precision.fp8_schedule}"
    if precision.fp8_schedule is None:
        return
    try:
        stretches = precision_options.parse_schedule(precision.fp8_schedule)
    except ValueError as error:
        yield f"{flag}: {error}"
        return
    families = {recipe.family for recipe in derived.used_recipes(precision)}
    for word in dict.fromkeys(stretch.precision for stretch in stretches if stretch.is_quantized):
        if word not in families:
            yield without(f"{word} in {flag}", f"--{word}-format")
    if not any(stretch.is_quantized for stretch in stretches):
        yield f"{flag} never is in FP8: remove it, and --fp8-format"


def schedule_ends_within_the_run(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every stretch has steps."""
    training = config.training
    if training.train_iters is None and (training.train_samples is None or batch_size(config, world_size) is None):
        return
    num_steps = derived.train_iters(config, world_size)
    for stretch in schedule_of(config)[:-1]:
        if stretch.last_step is not None and stretch.last_step >= num_steps:
            yield (
                f"--fp8-schedule {config.precision.fp8_schedule}: the run ends at step {num_steps}, and nothing comes "
                f"after {stretch.precision}:{stretch.last_step}"
            )


def schedule_of(config: RunConfig) -> tuple[precision_options.Stretch, ...]:
    """The stretches; none without a schedule that can be read."""
    if config.precision.fp8_schedule is None:
        return ()
    try:
        return precision_options.parse_schedule(config.precision.fp8_schedule)
    except ValueError:
        return ()


def weights_in_fp8_have_one_form(config: RunConfig, world_size: int) -> Iterator[str]:
    """A weight that is codes alone has them for fprop and dgrad, at every step."""
    precision = config.precision
    if not precision.fp8_param_gather:
        return
    if precision.fp8_schedule is not None:
        yield (
            f"--fp8-param-gather with --fp8-schedule {precision.fp8_schedule}: steps in high precision need weights in "
            "high precision; remove one"
        )
    if not positive(config.model.num_layers):
        return
    for name, chosen in precision_map.resolve(config.model, precision).items():
        if name != precision_map.OUTPUT_LAYER and chosen.fprop != chosen.dgrad:
            yield (
                f"--fp8-param-gather: the precision map gives {name} one recipe for fprop and another for dgrad, and "
                "its weight has codes of one; give both the same, or remove the flag"
            )


RULES: tuple[Rule, ...] = (
    entries_can_be_read,
    entries_name_linears,
    high_precision_is_that_of_the_weights,
    delayed_scales_have_one_format,
    schedule_can_be_read,
    schedule_ends_within_the_run,
    weights_in_fp8_have_one_form,
)
FLAG = "--fp8-dot-product-attention"


def its_products_can_be_in_fp8(config: RunConfig, world_size: int) -> Iterator[str]:
    """cuDNN's kernels alone compute in FP8, and every pass of theirs has to run under the layers' recipe."""
    model, precision, parallel = config.model, config.precision, config.parallel
    if not precision.fp8_dot_product_attention or precision.fp8_format is None:
        return
    if derived.params_dtype(precision) == "fp32":
        yield f"{FLAG} without --bf16: cuDNN's kernels quantize BF16 tensors, not FP32; give --bf16"
    if not registry.get(precision.fp8_recipe).supports_fp8_attention:
        known = " or ".join(recipe.flag for recipe in registry.recipes() if recipe.supports_fp8_attention)
        yield (
            f"{FLAG} with --fp8-recipe {precision.fp8_recipe}: on Hopper Transformer Engine has it for delayed scaling "
            f"alone; give {known}, or remove it"
        )
    if precision.attention_backend not in ("auto", "fused"):
        yield f"{FLAG} with --attention-backend {precision.attention_backend}: only fused attention has FP8; give fused"
    if "core_attn" in derived.recompute_modules(config.training):
        yield (
            f"{FLAG} with --recompute-modules core_attn: megatron-core would compute it again outside of the recipe: "
            "recompute other modules, or give --recompute-granularity full"
        )
    untried = (
        (model.attention_dropout, f"--attention-dropout {model.attention_dropout}", "give --attention-dropout 0"),
        (parallel.context_parallel_size > 1, f"--context-parallel-size {parallel.context_parallel_size}", "remove one"),
        (model.window_size is not None, f"--window-size {model.window_size}", "remove one"),
    )
    yield from (f"{FLAG} with {flag}: this was not tried; {mend}" for is_there, flag, mend in untried if is_there)


FP8_ATTENTION_RULES: tuple[Rule, ...] = (its_products_can_be_in_fp8,)


def statistics_have_an_interval(config: RunConfig, world_size: int) -> Iterator[str]:
    """What is looked at needs steps at which that happens."""
    logging = config.logging
    if logging.fp8_log_interval is None:
        if logging.fp8_what_if is not None:
            yield without(f"--fp8-what-if {logging.fp8_what_if}", "--fp8-log-interval")
        if logging.fp8_log_layers != LoggingConfig().fp8_log_layers:
            yield without(f"--fp8-log-layers {logging.fp8_log_layers}", "--fp8-log-interval")


def statistics_have_an_object(config: RunConfig, world_size: int) -> Iterator[str]:
    """In high precision nothing is quantized, unless recipes are tried."""
    logging = config.logging
    is_quantized = precision_map.is_quantized(config.precision)
    if logging.fp8_log_interval is not None and not is_quantized and not derived.what_if_recipes(logging):
        yield without(
            f"--fp8-log-interval {logging.fp8_log_interval}", "--fp8-format, --fp4-format or recipes for --fp8-what-if"
        )


def patterns_name_linears(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every pattern of --fp8-log-layers names a linear of the model, and one that is looked at."""
    num_layers, patterns = config.model.num_layers, derived.log_layer_patterns(config.logging)
    if not patterns:
        yield f"--fp8-log-layers {config.logging.fp8_log_layers!r} names nothing: leave it out to look at all linears"
    if num_layers is None or not positive(num_layers):
        return
    for pattern in patterns:
        if fault := precision_map.why_nothing(pattern, num_layers):
            yield f"--fp8-log-layers {pattern}: {fault}"
        elif config.logging.fp8_log_interval is not None:
            yield from why_no_statistics(config, pattern)


def why_no_statistics(config: RunConfig, pattern: str) -> Iterator[str]:
    """What keeps the linears of a pattern from being looked at."""
    observable, flag = precision_map.observable_linears(config.model, config.precision), f"--fp8-log-layers {pattern}"
    if any(precision_map.is_named(name, pattern) for name in observable):
        return
    if not observable:
        yield f"--fp8-log-interval {config.logging.fp8_log_interval}: the run's recipes quantize no linear; remove it"
    elif precision_map.is_quantized(config.precision):
        yield (
            f"{flag} names linears in high precision alone, at which nobody looks: quantized are {observable[0]} to "
            f"{observable[-1]}, {len(observable)} linears; name some of those, or give these a recipe by --precision"
        )
    elif derived.what_if_recipes(config.logging):
        yield f"{flag}: in high precision recipes are tried on the layers' linears alone; name some of layers.*"


def tried_recipes_can_be_tried(config: RunConfig, world_size: int) -> Iterator[str]:
    """Recipes of --fp8-what-if exist, are given once, and suit the dimensions."""
    recipes, known = derived.what_if_recipes(config.logging), [recipe.name for recipe in registry.stateless()]
    if config.logging.fp8_what_if is not None and not recipes:
        yield f"--fp8-what-if {config.logging.fp8_what_if!r} names no recipe: give some of {', '.join(known)}"
    for recipe in dict.fromkeys(recipes):
        if recipe not in known:
            yield f"--fp8-what-if {recipe}: can try {', '.join(known)}"
        elif has_gemms(config):
            yield from (
                f"--fp8-what-if {recipe}: {problem}" for problem in model_shapes.misfits(with_recipe(config, recipe))
            )
    if len(set(recipes)) < len(recipes):
        yield f"--fp8-what-if {config.logging.fp8_what_if}: give each recipe once"


def with_recipe(config: RunConfig, name: str) -> RunConfig:
    """The same model under a recipe that is tried, in its default format."""
    recipe = registry.get(name)
    changes = {
        "fp8_format": None, "fp4_format": None, f"{recipe.family}_recipe": name,
        f"{recipe.family}_format": recipe.default_format, "precision_map": (), "first_last_layers_bf16": False,
    }  # fmt: skip
    return dataclasses.replace(config, precision=dataclasses.replace(config.precision, **changes))


def fused_operations_have_no_statistics(config: RunConfig, world_size: int) -> Iterator[str]:
    """Transformer Engine's fused MLP shows nobody its operands."""
    if config.logging.fp8_log_interval is not None and config.precision.use_transformer_engine_op_fuser:
        yield (
            f"--fp8-log-interval {config.logging.fp8_log_interval} with --use-transformer-engine-op-fuser: the fused "
            "MLP shows nobody its operands; remove one"
        )


STATISTICS_RULES: tuple[Rule, ...] = (
    statistics_have_an_interval,
    statistics_have_an_object,
    patterns_name_linears,
    tried_recipes_can_be_tried,
    fused_operations_have_no_statistics,
)
