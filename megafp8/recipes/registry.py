"""Recipe registry: every module of this package that defines `RECIPE`, and those that the environment adds.

    MEGAFP8_RECIPES=recipes/mine.py,team.recipe megafp8 pretrain --fp8-recipe mine ...

The variable lists Python files or modules that define a `RECIPE`, as the modules of this package do. All ranks, and
the tools that read the run's checkpoints and records, need the same value.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import runpy
from collections.abc import Collection, Iterator
from typing import Any, Optional

from megafp8.errors import ConfigError
from megafp8.recipes.base import Recipe

RECIPES_VARIABLE = "MEGAFP8_RECIPES"
DEFAULT_FP8, DEFAULT_FP4, DEFAULT_EXPORT = "delayed", "nvfp4", "blockwise"
DEFAULT_MODULE = "tensorwise"  # of modules in other programs: without state


def get(name: str) -> Recipe:
    """The recipe with this name.

    Raises:
        ConfigError: there is none; the message lists the known recipes.
    """
    known = _recipes()
    if name not in known:
        raise ConfigError(f"{name!r} is not a recipe; recipes: {', '.join(names())}")
    return known[name]


def names(family: Optional[str] = None) -> tuple[str, ...]:
    """Names of all recipes, or of those of one family ("fp8" or "fp4"), in the order of `recipes`."""
    return tuple(each.name for each in recipes(family))


def recipes(family: Optional[str] = None) -> tuple[Recipe, ...]:
    """All recipes, or those of one family: FP8 before FP4, coarser scales before finer ones."""
    return tuple(each for each in _recipes().values() if family in (None, each.family))


def stateful() -> tuple[Recipe, ...]:
    """Recipes with state from earlier steps: delayed scaling."""
    return tuple(each for each in recipes() if each.is_stateful)


def stateless() -> tuple[Recipe, ...]:
    """Recipes without state from earlier steps: all but delayed scaling."""
    return tuple(each for each in recipes() if not each.is_stateful)


def with_export_form() -> tuple[str, ...]:
    """Names of the recipes whose quantized weights can be exported."""
    return tuple(each.name for each in recipes() if each.export_form is not None)


def with_triton_casts() -> tuple[str, ...]:
    """Names of the recipes for which Triton kernels can replace Transformer Engine's casts."""
    return tuple(each.name for each in recipes() if each.te_quantizer is not None)


def with_fused_swiglu() -> tuple[str, ...]:
    """Names of the recipes for which the Triton SwiGLU can quantize its output without the Triton casts."""
    return tuple(each.name for each in recipes() if each.fuses_swiglu)


def with_param_gather() -> tuple[str, ...]:
    """Names of the recipes whose weights the emulated layers can store as codes and scales alone."""
    return tuple(each.name for each in recipes() if each.supports_param_gather)


def with_fp8_attention() -> tuple[str, ...]:
    """Names of the recipes under which attention can run in FP8."""
    return tuple(each.name for each in recipes() if each.supports_fp8_attention)


def with_setting(field: str) -> tuple[str, ...]:
    """Names of the recipes without which a field of `PrecisionConfig` has no effect; empty for the other fields."""
    return tuple(each.name for each in recipes() if field in each.setting_names)


def family_hint(name: str, choices: Collection[Any]) -> str:
    """What to write for a recipe that is no choice of a flag because it is one of the other family; else empty."""
    if name not in names() or name in choices or not choices or not set(choices) < set(names()):
        return ""
    recipe = get(name)
    flags = f"--{recipe.family}-format {recipe.default_format} {recipe.flag}"
    return f"{name} is an {recipe.family.upper()} recipe: use --recipe {name}, or {flags}"


def clear_cache() -> None:
    """Read the environment variable again at the next use. For tests."""
    _recipes.cache_clear()


@functools.cache
def _recipes() -> dict[str, Recipe]:
    found: dict[str, Recipe] = {}
    for recipe in (*_built_in(), *_external()):
        if recipe.name in found:
            raise ConfigError(f"{RECIPES_VARIABLE}: a recipe {recipe.name!r} already exists; choose another name")
        found[recipe.name] = recipe
    return {each.name: each for each in sorted(found.values(), key=_sort_key)}


def _built_in() -> Iterator[Recipe]:
    for module in pkgutil.iter_modules([os.path.dirname(__file__)], f"{__package__}."):
        if hasattr(imported := importlib.import_module(module.name), "RECIPE"):
            yield imported.RECIPE


def _external() -> Iterator[Recipe]:
    for source in filter(None, os.environ.get(RECIPES_VARIABLE, "").split(",")):
        try:
            recipe = (
                runpy.run_path(source)["RECIPE"] if source.endswith(".py") else importlib.import_module(source).RECIPE
            )
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # user code may raise anything, and call sys.exit
            raise ConfigError(
                f"{RECIPES_VARIABLE}: {source}: {type(error).__name__}: {error}; it must define RECIPE"
            ) from error
        if not isinstance(recipe, Recipe) or not recipe.name.replace("_", "").isalnum():
            kind = "a megafp8.recipes.base.Recipe whose name has letters, digits and underscores only"
            raise ConfigError(f"{RECIPES_VARIABLE}: {source}: RECIPE is {recipe!r}; it must be {kind}")
        yield recipe


def _sort_key(recipe: Recipe) -> tuple[bool, float, bool, str]:
    unblocked = {True: 1 << 30, False: float("inf")}[recipe.has_whole_dimensions]
    return (recipe.family == "fp4", -float(recipe.block_length or unblocked), recipe.is_stateful, recipe.name)
