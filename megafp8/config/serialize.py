"""RunConfig to JSON and back, a hash that depends on nothing but the settings, and a diff that a person can read."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from megafp8.config.schema import AUTO, RunConfig
from megafp8.config.settings import Setting, all_settings, settings_by_name, value_of, with_values
from megafp8.errors import ConfigError
from megafp8.utils.paths import shown
from megafp8.utils.small_files import UnreadableFile
from megafp8.utils.strict_json import parse_json


def to_json(config: RunConfig) -> str:
    """All settings as indented JSON with a newline at the end: `{"model": {"num_layers": 12, ...}, ...}`."""
    return json.dumps(to_dict(config), indent=2, allow_nan=False) + "\n"


def from_json(text: str) -> RunConfig:
    """The inverse of `to_json`. Settings that the text leaves out keep their defaults.

    Raises:
        ConfigError: the text is not JSON, or names a setting that does not exist, or holds a value of the wrong type.
    """
    return with_values(RunConfig(), read_settings(text))


def read_settings(text: str) -> dict[str, Any]:
    """The settings that a JSON text holds, by `section.field` name, with the types of the schema.

    Raises:
        ConfigError: as `from_json`; all problems at once.
    """
    try:
        tree = parse_json(text)
    except UnreadableFile as error:
        raise ConfigError(error.reason) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"not a JSON object of sections, but a {type(tree).__name__}")
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in _flat(tree).items():
        setting = settings_by_name().get(name)
        if setting is None:
            problems.append(f"unknown key {name!r}{_nearest_key(name)}")
            continue
        try:
            values[name] = _typed(setting, value)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ConfigError(problems)
    return values


def stable_hash(config: RunConfig) -> str:
    """SHA-256 (hex) of the settings: equal for equal settings on every machine, Python and process."""
    canonical = json.dumps(to_dict(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def diff(before: RunConfig, after: RunConfig) -> list[str]:
    """One line per setting that differs, for example `model.num_layers: 12 -> 24`."""
    lines = []
    for setting in all_settings():
        old, new = value_of(before, setting.name), value_of(after, setting.name)
        if old != new:
            lines.append(f"{setting.name}: {_shown(setting.written(old))} -> {_shown(setting.written(new))}")
    return lines


def to_dict(config: RunConfig) -> dict[str, Any]:
    """All settings as nested dictionaries and lists, section by section, ready for JSON."""
    tree: dict[str, Any] = {}
    for setting in all_settings():
        value = value_of(config, setting.name)
        # 1000 and 1000.0 are one setting, so they must be one text.
        if setting.type is float and value is not None:
            value = float(value)
        holder = tree.setdefault(setting.section, {}) if setting.section else tree
        holder[setting.field] = list(value) if setting.many else setting.written(value)
    return tree


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    sections = {setting.section for setting in all_settings()} - {""}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if key in sections and isinstance(value, dict):
            flat.update({f"{key}.{field}": inner for field, inner in value.items()})
        else:
            flat[key] = value
    return flat


def _typed(setting: Setting, value: Any) -> Any:
    if value is None and setting.optional:
        return None
    if setting.auto and value in ("auto", AUTO):
        if value == AUTO:
            raise ValueError(f"{value!r} must be at least 1, or \"auto\"")
        return AUTO
    if setting.many:
        if not isinstance(value, list):
            raise ValueError(f"{value!r} is not a list")
        return tuple(_typed_one(setting, item) for item in value)
    return _typed_one(setting, value)


def _typed_one(setting: Setting, value: Any) -> Any:
    # JSON keeps int and float apart by spelling only; bool is an int to Python and must not pass as a number.
    accepted = (int, float) if setting.type is float else (setting.type,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and setting.type is not bool):
        raise ValueError(f"{value!r} is not of type {setting.type.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    if setting.choices and value not in setting.choices:
        raise ValueError(f"{value!r} is not one of {', '.join(map(str, setting.choices))}")
    if fault := setting.fault(value):
        raise ValueError(f"{shown(str(value))} {fault}")
    return setting.type(value)


def _nearest_key(name: str) -> str:
    import difflib  # only on the way to an error: keeps --help quick

    near = difflib.get_close_matches(name, settings_by_name(), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _shown(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
