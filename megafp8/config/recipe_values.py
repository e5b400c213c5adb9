"""`--recipe NAME`: a recipe with its tested format and options, as values of other settings.

The values are defaults: flags, and keys of the file that names the recipe, override them one by one. What contradicts
the recipe itself (another recipe, a format that it does not have, FP16) is refused. The configuration of a run has the
values and not the name, so that printed, saved and resumed settings are those of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megafp8.config.expert_layers import is_mixture
from megafp8.config.schema import RunConfig
from megafp8.config.settings import Setting, settings_by_name, value_of, with_values
from megafp8.recipes import registry

UNQUANTIZED = "bf16"
"""The name for training in BF16 without quantization."""
FAMILIES = ("fp8", "fp4")


def names() -> tuple[str, ...]:
    """The names that `--recipe` takes."""
    return (UNQUANTIZED, *registry.names())


def apply_recipe(
    config: RunConfig, name: str, own: Mapping[str, Any], warnings: list[str], problems: list[str]
) -> RunConfig:
    """Give a configuration the values of a recipe.

    Args:
        config: with the values of all sources.
        name: of the recipe.
        own: values of the sources that override the recipe, by setting.
        warnings: to which what the recipe stands for is added.
        problems: to which values that contradict the recipe are added.
    """
    values = recipe_values(name, has_experts=is_mixture(config.model))
    conflicts = list(_conflicts(name, own))
    table = settings_by_name()
    problems.extend(
        f"--recipe {name} and {table[each].as_flag(own[each] or 'none')} contradict each other: remove one"
        for each in conflicts
    )
    # What a conflict would lead to is not reported as well.
    resolved = {each: table[each].default for each in conflicts} | {
        each: value for each, value in values.items() if each not in own or each in conflicts
    }
    config = with_values(config, resolved)
    if not conflicts:
        warnings.append(_meaning(name, values, config))
    return config


def recipe_values(name: str, has_experts: bool) -> dict[str, Any]:
    """The settings that a recipe stands for."""
    values: dict[str, Any] = {"precision.bf16": True} | {f"precision.{family}_format": None for family in FAMILIES}
    if name != UNQUANTIZED:
        recipe = registry.get(name)
        values[f"precision.{recipe.family}_format"] = recipe.tested_format(has_experts)
        values[f"precision.{recipe.family}_recipe"] = name
        values |= {f"precision.{option}": value for option, value in recipe.tested_options}
    return values


def _conflicts(name: str, own: Mapping[str, Any]) -> Iterator[str]:
    """The settings among `own` that give another recipe or weight format than the recipe."""
    recipe = registry.get(name) if name != UNQUANTIZED else None
    for family in FAMILIES:
        is_own_family = recipe is not None and family == recipe.family
        formats = recipe.formats if recipe is not None and is_own_family else (None,)
        if own.get(each := f"precision.{family}_format", formats[0]) not in formats:
            yield each
        if (each := f"precision.{family}_recipe") in own and not (is_own_family and own[each] == name):
            yield each
    if own.get("precision.fp16"):
        yield "precision.fp16"


def _written(setting: Setting, value: Any) -> str:
    return setting.as_flag(value) if value is not False else f"no {setting.flags[0]}"


def _meaning(name: str, values: Mapping[str, Any], config: RunConfig) -> str:
    """The flags that a recipe stands for, and what other settings changed of them."""
    table = settings_by_name()
    wanted = {each: value for each, value in values.items() if value is not None}
    flags = [table[each].as_flag(value) for each, value in wanted.items() if value_of(config, each) == value]
    changed = [
        _written(table[each], value_of(config, each))
        for each, value in wanted.items()
        if value_of(config, each) != value
    ]
    text = f"--recipe {name} stands for {' '.join(flags)}"
    if changed:
        text += f"; given: {' '.join(changed)}"
    is_for_experts = values != recipe_values(name, has_experts=False)
    if is_for_experts and not any("-format " in flag for flag in changed):
        text += "; in this format all experts of a GPU run in one launch"
    return text
