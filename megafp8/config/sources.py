"""Values of settings from all sources, in the order in which they override each other.

    default  <  checkpoint (--use-checkpoint-args)  <  preset  <  --fp8-lm-level  <  --config file
             <  --precision-map file  <  flag

A --model-preset on the command line replaces the model section of the --config file completely, because a mixture of
two model shapes is never intended.
"""

from __future__ import annotations

from typing import Any, Optional

from megafp8.config import fp8_lm
from megafp8.config.schema import RunConfig
from megafp8.config.settings import all_settings, read_settings, value_of, with_values
from megafp8.errors import ConfigError
from megafp8.utils.files import UnreadableFile, read_text

ACCUMULATED = ("overrides", "precision.precision_map")
"""List settings to which every occurrence adds. Of the others the last occurrence wins."""


def merge(
    base: RunConfig,
    values: dict[str, Any],
    path: Optional[str],
    map_path: Optional[str],
    notices: list[str],
    problems: list[str],
) -> tuple[RunConfig, frozenset[str]]:
    """Combine defaults or a checkpoint's settings, preset, files and flags.

    Args:
        base: the defaults, or the settings of a checkpoint.
        values: of flags, by setting; entries of the --precision-map file and of lists are added to them.
        path: the --config file.
        map_path: the --precision-map file.
        notices: to which what overrides what is added.
        problems: to which an unknown preset and unreadable files are added.

    Returns:
        The settings, and the names of those that the --config file gives.
    """
    from megafp8.config.model_shapes import PRESETS  # here, so that --help does not import it

    from_file = _read_config(path, problems) if path is not None else {}
    named = values.get("model.model_preset")
    if named is not None and any(name.startswith("model.") for name in from_file):
        from_file = {name: value for name, value in from_file.items() if not name.startswith("model.")}
        notices.append(f"--model-preset {named} replaces the model section of --config {path}")
    preset = named if named is not None else from_file.get("model.model_preset")
    if preset is not None and preset not in PRESETS:
        problems.append(f"--model-preset {preset}: unknown preset; presets: {', '.join(PRESETS)}")
        preset = None
    config = with_values(base, PRESETS[preset]) if preset is not None else base
    from_file = fp8_lm.kept_values(from_file, values)
    # The level of a checkpoint is already in its other settings.
    level = values.get(fp8_lm.LEVEL, from_file.get(fp8_lm.LEVEL))
    config = with_values(config, fp8_lm.level_values(level, from_file | values) | from_file)
    if map_path is not None:
        from_map = _read_precision_map(map_path, problems)
        values["precision.precision_map"] = (*from_map, *values.get("precision.precision_map", ()))
    for name in set(ACCUMULATED) & set(values):
        values[name] = (*value_of(config, name), *values[name])
    config = with_values(config, values)
    if notice := fp8_lm.level_notice(config):
        notices.append(notice)
    return config, frozenset(from_file)


def flags_set(config: RunConfig) -> set[str]:
    """The flags of all settings that are not the default, wherever their values come from."""
    changed = (each for each in all_settings() if value_of(config, each.name) != each.default)
    return {flag for each in changed for flag in (each.flags if value_of(config, each.name) else each.off)}


def _read_precision_map(path: str, problems: list[str]) -> tuple[str, ...]:
    from megafp8.config.precision_options import read_map  # here, so that --help does not import it

    try:
        return read_map(path)
    except ConfigError as error:
        problems.extend(error.problems)
        return ()


def _read_config(path: str, problems: list[str]) -> dict[str, Any]:
    try:
        return read_settings(read_text(path))
    except ConfigError as error:
        problems.extend(f"--config {path}: {problem}" for problem in error.problems)
    except UnreadableFile as error:
        problems.append(f"--config {path}: cannot be read: {error.reason}")
    return {}
