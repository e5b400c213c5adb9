"""Variants of a comparison of runs: recipes by name as flags, which are added to the flags that all runs share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from megafp8.config import flags as config_flags
from megafp8.config import iterations, precision_map, settings, topology
from megafp8.config.layer_backends import EMULATED
from megafp8.config.schema import AUTO, RunConfig
from megafp8.config.settings import with_values
from megafp8.errors import ConfigError
from megafp8.recipes import registry
from megafp8.recipes.base import FP8_FORMATS
from megafp8.recipes.known_bad import KNOWN_BAD
from megafp8.utils.suggestions import did_you_mean

BASELINE, CONTROL = "bf16", "bf16-control"
FORKS, TRUNKS = "forks", "trunks"
"""Folders of a comparison by forks (`launch/forks.py`)."""
EMULATED_FORM = "-emulated"
"""Behind the name of a recipe, the good form of a known-bad control, which is emulated on every machine."""

# Runs that differ in these settings only train alike, up to the order of summation.
NEUTRAL_SETTINGS = ("checkpoint.", "logging.", "training.num_threads", "data.num_workers", "data.data_cache_path")
# Flags that the comparison adds to the flags of its runs.
FOLDER_FLAGS = {"checkpoint.save": "--save", "checkpoint.load": "--load"}
RECIPE_FLAGS = {
    f"precision.{kind}_{word}": f"--{kind}-{word}" for kind in ("fp8", "fp4") for word in ("format", "recipe")
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A variant and its flags."""

    name: str
    flags: tuple[str, ...]


def names() -> tuple[str, ...]:
    """The names that `build_variant` accepts, without those that have a format."""
    return (BASELINE, CONTROL, *recipe_names())


def control_variants(shared: RunConfig, world_size: int) -> list[Variant]:
    """The known-bad controls and their good forms, all emulated."""
    emulated = ("--transformer-impl", str(EMULATED))
    good = [build_variant(name, shared, world_size) for name in dict.fromkeys(good for good, _ in KNOWN_BAD.values())]
    found = [Variant(name=f"{each.name}{EMULATED_FORM}", flags=(*each.flags, *emulated)) for each in good]
    bad = [Variant(name=name, flags=("--bf16", *flags.split(), *emulated)) for name, (_, flags) in KNOWN_BAD.items()]
    return found + bad


def recipe_names() -> tuple[str, ...]:
    """The recipes, each followed by its variants, such as `nvfp4-four-over-six`."""
    return tuple(
        name for each in registry.recipes() for name in (each.name, *(f"{each.name}-{own}" for own, _ in each.variants))
    )


def build_variant(name: str, shared: RunConfig, world_size: int) -> Variant:
    """Build a variant by name: `bf16`, `bf16-control`, a recipe, or one with a format or variant: `delayed-e4m3`.

    The control is the baseline with another micro-batch size: the same arithmetic, but gradients are summed in another
    order. Its difference from the baseline shows the effect of any change in rounding.

    Args:
        name: of the variant.
        shared: settings of all runs.
        world_size: ranks of each run.

    Raises:
        ConfigError: the name is unknown, or the global batch has no other micro-batch size.
    """
    if name == BASELINE:
        return Variant(name=name, flags=("--bf16",))
    if name == CONTROL:
        batch, micro = iterations.global_batch_size(shared, world_size), control_micro_batch_size(shared, world_size)
        # A step schedule gives the batch already.
        given = () if shared.training.step_batch_size_schedule else ("--global-batch-size", str(batch))
        return Variant(name=name, flags=("--bf16", "--micro-batch-size", str(micro), *given))
    if not is_known(name):
        raise ConfigError(f"recipe {unknown_name_text(name, names())} (--variant NAME='FLAGS' takes other settings)")
    recipe_name, _, form = name.partition("-")
    recipe = registry.get(recipe_name)
    added = dict(recipe.variants).get(form)
    number_format = form if form and added is None else recipe.default_format
    flags = (f"--{recipe.family}-format", number_format, f"--{recipe.family}-recipe", recipe_name)
    return Variant(name=name, flags=("--bf16", *flags, *(added or "").split()))


def is_known(name: str) -> bool:
    """Whether `build_variant` accepts a name."""
    recipe_name, _, number_format = name.partition("-")
    if name in names():
        return True
    return recipe_name in registry.names() and number_format in registry.get(recipe_name).formats


def unknown_name_text(name: str, choices: Sequence[str]) -> str:
    """The message about a name that is not known, without what names it."""
    if near := did_you_mean(name, choices):
        return f"{name}: unknown{near}"
    return (
        f"{name}: unknown; choose from {', '.join(choices)}, or an FP8 recipe with one of the formats "
        f"{', '.join(FP8_FORMATS)}, such as {registry.DEFAULT_FP8}-e4m3"
    )


def parse_variant(text: str) -> Variant:
    """Parse a variant of the form NAME='FLAGS'.

    Raises:
        ConfigError: the form is invalid, or a flag is repeated, is one that the comparison adds, or makes the runs
            choose their own micro-batch size.
    """
    name, _, words = text.partition("=")
    if not words or not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"--variant {text}: must be NAME='FLAGS', with a name of letters, digits, - and _")
    try:
        variant = Variant(name=name, flags=("--bf16", *shlex.split(words)))
    except ValueError as error:
        raise ConfigError(f"--variant {text}: {error}") from error
    if problems := _variant_problems(variant.flags):
        raise ConfigError([f"--variant {name}: {problem}" for problem in problems])
    return variant


def _variant_problems(words: Sequence[str]) -> list[str]:
    """Problems that only a variant's flags can have. Others are found when they are parsed with the shared flags."""
    parsed, _ = config_flags.parse_with_problems(words)
    problems = [
        f"{flag}: set by the comparison, from --output-dir, --seeds and the --seed of all runs; remove it"
        for name, flag in (*FOLDER_FLAGS.items(), ("training.seed", "--seed"))
        if name in parsed.given
    ]
    names = [word.partition("=")[0] for word in words]
    problems += [
        f"{flag} is given twice, and a run would use only the last one: keep one"
        for flag in RECIPE_FLAGS.values()
        if names.count(flag) > 1
    ]
    # The rule about recipes without a format does not see a recipe that is the default.
    for kind in ("fp8", "fp4"):
        if f"precision.{kind}_recipe" in parsed.given and f"precision.{kind}_format" not in parsed.given:
            problems.append(f"--{kind}-recipe has no effect without --{kind}-format: give both, or remove it")
    return problems + _auto_micro_batch_problems(parsed.config)


def _auto_micro_batch_problems(config: RunConfig) -> list[str]:
    """A problem if each run would choose its own micro-batch size."""
    if config.training.micro_batch_size != AUTO:
        return []
    return ["--micro-batch-size auto: each run could find a different size; give a number"]


def control_micro_batch_size(config: RunConfig, world_size: int) -> int:
    """Micro-batch size of the control: half that of the baseline, or twice that if it is odd.

    Raises:
        ConfigError: it does not divide the global batch.
    """
    micro = config.training.micro_batch_size or 0
    per_rank = iterations.global_batch_size(config, world_size) // topology.data_parallel_size(config, world_size)
    other = micro // 2 if micro % 2 == 0 else 2 * micro
    if not other or per_rank % other:
        raise ConfigError(
            f"{CONTROL}: --micro-batch-size {micro} and {per_rank} sequences per rank allow no other division of the "
            "batch; use an even micro-batch size or a larger --global-batch-size, or leave the control out"
        )
    other_config = with_values(config, {"training.micro_batch_size": other})
    is_rounded = config.training.decrease_batch_size_if_needed
    schedule, other_schedule = (iterations.batch_schedule(each, world_size) for each in (config, other_config))
    if is_rounded and schedule != other_schedule:
        raise ConfigError(
            f"{CONTROL}: --decrease-batch-size-if-needed gives other global batches with --micro-batch-size {other} "
            f"than with {micro}: give global batches that both divide, or leave the control out"
        )
    return other


def differences(before: RunConfig, after: RunConfig) -> list[str]:
    """The settings that differ and affect training, as lines of `settings.diff`."""
    return [line for line in settings.diff(before, after) if not line.startswith(NEUTRAL_SETTINGS)]


def parse_shared_flags(words: Sequence[str], folder: str) -> tuple[RunConfig, list[str]]:
    """Parse the flags that all runs share. Returns the settings of a run in `folder`, and the problems."""
    parsed, problems = config_flags.parse_with_problems(words)
    own = FOLDER_FLAGS | RECIPE_FLAGS
    problems += [
        f"{flag} in the flags of all runs: set by the comparison, from --output-dir and --recipes; remove it"
        for name, flag in own.items()
        if name in parsed.given
    ]
    config = parsed.config
    precision = config.precision
    has_own_flags = not parsed.given.isdisjoint(own)
    is_mixed = precision.fp8_schedule is not None or precision.first_last_layers_bf16
    if is_mixed or (precision_map.is_quantized(precision) and not has_own_flags):
        problems.append(
            "the flags of all runs enable quantization, a precision map or a schedule, which would also apply to the "
            "baseline; give them to a variant, --variant NAME='FLAGS'"
        )
    problems += _auto_micro_batch_problems(config)
    return with_values(parsed.config, {"checkpoint.save": folder, "checkpoint.load": folder}), problems
