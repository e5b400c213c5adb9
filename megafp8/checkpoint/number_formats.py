"""Whether a run goes on in the number formats that its checkpoint was trained in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megafp8.checkpoint.reading import read_config
from megafp8.config import derived, precision_map
from megafp8.config.schema import PrecisionConfig, RunConfig
from megafp8.errors import CheckpointError

# Settings that decide which numbers a step computes with, each where it has an effect.
OF_FP8 = ("fp8_recipe", "fp8_wgrad", "fp8_dot_product_attention")
MOST_NAMES = 4
OF_LAYERS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


def number_formats(precision: PrecisionConfig) -> dict[str, Any]:
    """The settings of a run's numbers, by name. What has no effect in it is left out, and so is how they are computed
    (kernels, emulation) and kept (`--fp8-param-gather`)."""
    names = ["bf16", "fp16", "fp8_format", "fp4_format", "fp8_schedule"]
    used = derived.used_recipes(precision)
    names += OF_FP8 if precision.fp8_format is not None else ()
    names += ["fp4_recipe"] if any(recipe.family == "fp4" for recipe in used) else []
    names += [name for recipe in used for name in recipe.resume_option_names]
    if used:
        names += ["first_last_layers_bf16", *(OF_LAYERS if precision.first_last_layers_bf16 else ())]
    return {name: getattr(precision, name) for name in names}


def map_changes(before: RunConfig, now: RunConfig) -> list[str]:
    """What precision maps change, linear by linear; nothing where neither run has one, nor of other models' linears."""
    if not (before.precision.precision_map or now.precision.precision_map):
        return []
    old, new = (precision_map.resolve(config.model, config.precision) for config in (before, now))
    changed: dict[str, list[str]] = {}
    for name in (name for name in old if name in new and old[name] != new[name]):
        changed.setdefault(f"{old[name]} -> {new[name]}", []).append(name)
    return [f"precision of {_shortened(names)}: {change}" for change, names in changed.items()]


def _shortened(names: list[str]) -> str:
    rest = f" and {len(names) - MOST_NAMES} others" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + rest


def check_same_formats(path: Path, config: RunConfig) -> tuple[str, ...]:
    """Refuse to go on in other number formats than the checkpoint's, unless `--override-precision` asks for it.

    Returns:
        What a person should know, in words.

    Raises:
        CheckpointError: they differ, and nobody asked for it.
    """
    saved = read_config(path)
    before, now = number_formats(saved.precision), number_formats(config.precision)
    # What belongs to a format that only one of the two has is not worth a line beside that.
    lines = [
        f"precision.{name}: {before[name]} -> {now[name]}"
        for name in before
        if name in now and before[name] != now[name]
    ] + map_changes(saved, config)
    if not lines:
        return ()
    if config.checkpoint.override_precision:
        return (f"goes on in other number formats ({'; '.join(lines)})",)
    raise CheckpointError(
        f"{path} was trained in other number formats (checkpoint -> this run):\n"
        + "\n".join(f"  {line}" for line in lines)
        + "\nmend: give the checkpoint's values, or --override-precision to go on in these"
    )
