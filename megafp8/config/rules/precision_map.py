"""Recipes by linear and GEMM, and by step."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import derived, fp8_schedule, precision_map
from megafp8.config.rules.rule import Rule, batch_size, positive, without
from megafp8.config.schema import RunConfig
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
        if stretch.precision in fp8_schedule.HIGH and stretch.precision != dtype:
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
        stretches = fp8_schedule.parse_schedule(precision.fp8_schedule)
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


def schedule_of(config: RunConfig) -> tuple[fp8_schedule.Stretch, ...]:
    """The stretches; none without a schedule that can be read."""
    if config.precision.fp8_schedule is None:
        return ()
    try:
        return fp8_schedule.parse_schedule(config.precision.fp8_schedule)
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
