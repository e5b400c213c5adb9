"""Rules and warnings that follow from the declaration of each setting: its range, and what it has no effect without."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megafp8.config import precision_map
from megafp8.config.features import changed_flag, has_feature
from megafp8.config.rules.base import no_effect_without
from megafp8.config.schema import RunConfig
from megafp8.config.settings import Setting, all_settings, settings_by_name, value_of
from megafp8.recipes import registry


def numbers_are_in_range(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every number is in its range."""
    for setting in all_settings():
        if setting.is_out_of_range(value := value_of(config, setting.name)):
            yield f"{setting.as_flag(value)} must be {setting.range}"


def model_has_what_its_settings_require(config: RunConfig, world_size: int) -> Iterator[str]:
    """A setting of the model that has no effect without another is not given without it."""
    return _without_requirements(config, [each for each in all_settings() if each.section == "model"])


def run_has_what_its_settings_require(config: RunConfig, world_size: int) -> Iterator[str]:
    """Another setting that has no effect without another is not given without it."""
    return _without_requirements(config, [each for each in all_settings() if each.section != "model"])


def _without_requirements(config: RunConfig, settings: Iterable[Setting]) -> Iterator[str]:
    needed = ((setting, setting.requires) for setting in settings)
    yield from (no_effect_without(flag, feature) for flag, feature in _without_effect(config, needed))


def _without_effect(config: RunConfig, needed: Iterable[tuple[Setting, str]]) -> Iterator[tuple[str, str]]:
    """The flags of settings that are given and lack what they need, each with what that is."""
    for setting, feature in needed:
        if feature and (flag := changed_flag(config, setting)) and not has_feature(config, feature):
            yield flag, feature


def unused_settings(config: RunConfig) -> Iterator[str]:
    """A warning for each setting that has no effect without another that is not given.

    Megatron-LM runs such command lines: its scripts and tests give one set of flags to many runs.
    """
    needed = ((setting, setting.needs) for setting in all_settings())
    yield from (f"{flag} has no effect without {feature}" for flag, feature in _without_effect(config, needed))
    if config.checkpoint.save is None and config.checkpoint.save_interval is not None:
        yield f"--save-interval {config.checkpoint.save_interval} has no effect without --save: nothing is saved"
    yield from _unused_amax_history(config)
    if config.parallel.ddp_average_in_collective:
        yield (
            "--ddp-average-in-collective has no effect: gradients are summed over the ranks and divided by the number "
            "of tokens of the global batch, which is their average"
        )


HISTORY_SETTINGS = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
"""Options of delayed scaling that another recipe only warns about: Megatron-LM's scripts give them with all recipes.
`precision.py` refuses other options there, and these too in a run without FP8."""


def _unused_amax_history(config: RunConfig) -> Iterator[str]:
    """Settings of the amax history under a recipe that computes scales from the current values."""
    precision = config.precision
    used = [registry.get(name) for name in precision_map.used_recipes(precision)]
    if precision.fp8_format is None or any(set(HISTORY_SETTINGS) & set(recipe.setting_names) for recipe in used):
        return
    for setting in (settings_by_name()[f"precision.{name}"] for name in HISTORY_SETTINGS):
        if flag := changed_flag(config, setting):
            yield f"{flag} has no effect with {registry.get(precision.fp8_recipe).flag}"
