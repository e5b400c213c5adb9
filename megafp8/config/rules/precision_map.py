"""Rules about the precision map, --fp8-schedule and FP8 attention."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from megafp8.config import derived, iterations, precision_map, precision_schedule
from megafp8.config.rules.base import all_positive, batch_size, no_effect_without
from megafp8.config.schema import PrecisionConfig, RunConfig
from megafp8.recipes import registry
from megafp8.recipes.base import HIGH_PRECISION_DTYPES


def entries_can_be_read(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every entry has the form PATTERN[:GEMMS]=RECIPE[/FORMAT]."""
    texts = precision_map.with_all_phases(config.precision).precision_map
    for text, (entry, problem) in zip(texts, precision_map.read_entries(texts), strict=True):
        if entry is None:
            yield f"{precision_map.entry_source(text)}: {problem}"


def entries_name_linears(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every pattern matches linears of the model."""
    num_layers = config.model.num_layers
    if num_layers is None or not all_positive(num_layers):
        return
    for source, entry in precision_map.entries_with_source(precision_map.with_all_phases(config.precision)):
        if problem := precision_map.pattern_problem(entry.pattern, config.model):
            yield f"{source}: {problem}"


def phases_quantize_what_the_run_does(config: RunConfig, world_size: int) -> Iterator[str]:
    """Linears are built with the recipes of the run, and phases only take away from that, or change stateless ones."""
    model, precision = config.model, config.precision
    if not all_positive(model.num_layers):
        return
    resolved = precision_map.resolve(model, precision)
    for phase in precision_schedule.phases_with_entries(precision):
        start, choices = f"--fp8-schedule {phase}", precision_map.resolve(model, phase.apply(precision))
        if not any(chosen.is_quantized for chosen in choices.values()):
            yield f"{start} leaves nothing quantized: give {derived.params_dtype(precision)} in place of it"
        for name, chosen in choices.items():
            if chosen.is_quantized and not resolved[name].is_quantized:
                yield (
                    f"{start} quantizes {name}, which is in high precision without the entries: give it a recipe with "
                    "--precision and keep it in high precision in the other phases, or leave it out, as layers.* does "
                    "the output layer"
                )
                break
            new = [now for now, before in zip(chosen, resolved[name], strict=True) if now.recipe and now != before]
            if with_state := [choice.name for choice in new if has_state(choice, precision)]:
                yield (
                    f"{start} gives {name} {with_state[0]}, whose state (an amax history or random numbers) a run has "
                    "from its start: make it the recipe of the run, and give the other recipe to other phases"
                )
                break


def phases_differ(config: RunConfig, world_size: int) -> Iterator[str]:
    """A phase computes in another precision than the one before it."""
    model, precision = config.model, config.precision
    if not all_positive(model.num_layers):
        return
    for before, phase in itertools.pairwise(precision_schedule.readable_phases(precision)):
        if precision_map.resolve(model, before.apply(precision)) == precision_map.resolve(
            model, phase.apply(precision)
        ):
            yield f"--fp8-schedule: {phase} computes as {before}, the phase before it: remove one of them"


def has_state(choice: precision_map.GemmChoice, precision: PrecisionConfig) -> bool:
    """Whether the recipe of a GEMM has an amax history or draws random numbers."""
    recipe = registry.get(str(choice.recipe))
    return recipe.is_stateful or recipe.is_stochastic(vars(precision))


def high_precision_is_that_of_the_weights(config: RunConfig, world_size: int) -> Iterator[str]:
    """GEMMs in high precision use the dtype of the weights."""
    dtype = derived.params_dtype(config.precision)
    fix = {"bf16": "give bf16", "fp32": "give fp32, or --bf16 for the run", "fp16": "remove it, or give --bf16"}[dtype]
    for source, entry in precision_map.entries_with_source(precision_map.with_all_phases(config.precision)):
        if entry.recipe in HIGH_PRECISION_DTYPES and entry.recipe != dtype:
            yield f"{source}: the weights of this run are {dtype}; {fix}"
    for phase in precision_schedule.readable_phases(config.precision):
        if phase.precision in HIGH_PRECISION_DTYPES and phase.precision != dtype:
            yield (
                f"--fp8-schedule {config.precision.fp8_schedule}: {phase.precision}, but the weights of this run are "
                f"{dtype}; {fix}"
            )


def delayed_scales_have_one_format(config: RunConfig, world_size: int) -> Iterator[str]:
    """Under delayed scaling an operand has one scale, which fits one format. Only a map can give it two."""
    if not config.precision.precision_map or not all_positive(config.model.num_layers):
        return
    for name, chosen in precision_map.resolve(config.model, config.precision).items():
        stateful = [choice for choice in chosen if choice.recipe and registry.get(choice.recipe).is_stateful]
        formats = sorted({str(choice.format) for choice in stateful})
        if len(formats) > 1:
            yield (
                f"the precision map gives {name} delayed scaling in {' and '.join(formats)}, but an operand has a "
                "single scale: use the same format for all its GEMMs"
            )


def schedule_can_be_read(config: RunConfig, world_size: int) -> Iterator[str]:
    """--fp8-schedule is valid, and its phases have formats."""
    precision, flag = config.precision, f"--fp8-schedule {config.precision.fp8_schedule}"
    if precision.fp8_schedule is None:
        return
    try:
        phases = precision_schedule.parse_schedule(precision.fp8_schedule)
    except ValueError as error:
        yield f"{flag}: {error}"
        return
    families = {recipe.family for recipe in derived.used_recipes(dataclasses.replace(precision, fp8_schedule=None))}
    for word in dict.fromkeys(phase.precision for phase in phases if phase.is_quantized):
        if word not in families:
            yield no_effect_without(f"{word} in {flag}", f"--{word}-format")
    if not any(phase.is_quantized for phase in phases):
        yield f"{flag} has no quantized phase: remove it, and --fp8-format"


def schedule_ends_within_the_run(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every phase of --fp8-schedule starts before the run ends."""
    training = config.training
    if training.train_iters is None and (training.train_samples is None or batch_size(config, world_size) is None):
        return
    num_steps = iterations.train_iters(config, world_size)
    for phase in precision_schedule.readable_phases(config.precision)[:-1]:
        if phase.last_step is not None and phase.last_step >= num_steps:
            yield (
                f"--fp8-schedule {config.precision.fp8_schedule}: the run ends at step {num_steps}, so no phase after "
                f"{phase.precision}:{phase.last_step} is reached"
            )


def weights_in_fp8_have_one_form(config: RunConfig, world_size: int) -> Iterator[str]:
    """With --fp8-param-gather a weight has one set of codes, for fprop and dgrad and for all steps."""
    precision = config.precision
    if not precision.fp8_param_gather:
        return
    if precision.fp8_schedule is not None:
        yield (
            f"--fp8-param-gather with --fp8-schedule {precision.fp8_schedule}: high-precision phases need "
            "high-precision weights; remove one"
        )
    if not all_positive(config.model.num_layers):
        return
    for name, chosen in precision_map.resolve(config.model, precision).items():
        if name != precision_map.OUTPUT_LAYER and chosen.fprop != chosen.dgrad:
            yield (
                f"--fp8-param-gather: the precision map gives {name} one recipe for fprop and another for dgrad, but "
                "an FP8 weight is stored in one recipe; use the same for both, or remove the flag"
            )


def fp8_attention_is_supported(config: RunConfig, world_size: int) -> Iterator[str]:
    """FP8 attention needs cuDNN's fused kernels, a recipe that supports it, and no recomputation of attention alone."""
    model, precision, parallel = config.model, config.precision, config.parallel
    flag = "--fp8-dot-product-attention"
    if not precision.fp8_dot_product_attention or precision.fp8_format is None:
        return
    if derived.params_dtype(precision) == "fp32":
        yield f"{flag} without --bf16: cuDNN's kernels quantize BF16 tensors, not FP32; give --bf16"
    if not registry.get(precision.fp8_recipe).supports_fp8_attention:
        known = " or ".join(recipe.flag for recipe in registry.recipes() if recipe.supports_fp8_attention)
        yield (
            f"{flag} with --fp8-recipe {precision.fp8_recipe}: attention has the recipe of the linears, and on Hopper, "
            "the only GPU supported here, Transformer Engine does not train attention in this one. Attention in "
            "delayed scaling beside linears in another recipe (NVTE_DPA_FP8_RECIPE) is not supported; use "
            f"{known}, or remove it"
        )
    if precision.attention_backend not in ("auto", "fused"):
        yield (
            f"{flag} with --attention-backend {precision.attention_backend}: only fused attention supports FP8; use "
            "--attention-backend fused"
        )
    if "core_attn" in derived.recompute_modules(config.training):
        yield (
            f"{flag} with --recompute-modules core_attn: megatron-core would recompute attention without FP8; "
            "recompute other modules, or use --recompute-granularity full"
        )
    untried = (
        (model.attention_dropout, f"--attention-dropout {model.attention_dropout}", "give --attention-dropout 0"),
        (parallel.context_parallel_size > 1, f"--context-parallel-size {parallel.context_parallel_size}", "remove one"),
        (model.window_size is not None, f"--window-size {model.window_size}", "remove one"),
    )
    yield from (
        f"{flag} with {other}: no run has compared its losses with those of BF16 attention; {fix}"
        for is_given, other, fix in untried
        if is_given
    )
