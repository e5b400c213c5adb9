"""The schema as a flat table: one `Setting` per field, named `section.field`, with its type read from the annotation.

The command line, the JSON file, the presets and the diff all walk this table, so none of them can forget a field.

RunConfig to JSON and back, a hash that depends on nothing but the settings, and a diff that a person can read.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Union

from megafp8.config.schema import AUTO, RunConfig
from megafp8.errors import ConfigError
from megafp8.utils.files import UnreadableFile, path_fault, shown
from megafp8.utils.strict_json import parse_json


@dataclass(frozen=True)
class Setting:
    """One field of the schema."""

    name: str
    """`section.field`, or the field alone where it belongs to the run and to no section."""
    type: type
    """int, float, bool or str: of the value, or of each value when `many`."""
    optional: bool
    """The value may be None ("not given")."""
    many: bool
    """The value is a tuple."""
    default: Any
    help: str
    flags: tuple[str, ...]
    """Spellings that set the field (for a boolean: to True)."""
    off: tuple[str, ...]
    """Spellings that set a boolean to False."""
    choices: tuple[Any, ...]
    auto: bool
    """The word `auto` is a value, too."""
    metavar: "str | None"
    is_path: bool
    maximum: int
    """Of a whole number."""

    @property
    def section(self) -> str:
        """Name of the section; empty for a field of the run itself."""
        return self.name.rpartition(".")[0]

    @property
    def field(self) -> str:
        return self.name.rpartition(".")[2]

    def fault(self, value: Any) -> "str | None":
        """Why nothing can be done with a value of the right type, whatever the other settings are; None if it can."""
        if self.type is int and isinstance(value, int) and abs(value) > self.maximum:
            return f"must be at most {self.maximum:,}"
        return path_fault(value) if self.is_path and isinstance(value, str) else None

    def written(self, value: Any) -> Any:
        """A value as people and JSON write it."""
        return "auto" if self.auto and value == AUTO and value is not None else value


@functools.lru_cache(maxsize=1)
def all_settings() -> tuple[Setting, ...]:
    """Every setting, in the order of the schema."""
    table: list[Setting] = []
    hints = typing.get_type_hints(RunConfig)
    for outer in dataclasses.fields(RunConfig):
        section_class = hints[outer.name]
        if dataclasses.is_dataclass(section_class):
            inner_hints = typing.get_type_hints(section_class)
            for inner in dataclasses.fields(section_class):
                table.append(_setting(f"{outer.name}.{inner.name}", inner, inner_hints[inner.name]))
        else:
            table.append(_setting(outer.name, outer, section_class))
    return tuple(table)


@functools.lru_cache(maxsize=1)
def settings_by_name() -> Mapping[str, Setting]:
    """Every setting under its `section.field` name."""
    return types.MappingProxyType({setting.name: setting for setting in all_settings()})


def section_titles() -> Mapping[str, str]:
    """First line of each section's docstring, under the section's name."""
    hints = typing.get_type_hints(RunConfig)
    sections = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    return {name: (section.__doc__ or name).splitlines()[0] for name, section in sections.items()}


def value_of(config: RunConfig, name: str) -> Any:
    """The value of the setting `name` in `config`."""
    return functools.reduce(getattr, name.split("."), config)


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """A copy of `config` in which the named settings have the given values.

    Example:
        >>> with_values(RunConfig(), {"model.num_layers": 2}).model.num_layers
        2
    """
    of_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        setting = settings_by_name()[name]
        of_section.setdefault(setting.section, {})[setting.field] = value
    of_run = of_section.pop("", {})
    sections = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in of_section.items()}
    return dataclasses.replace(config, **sections, **of_run)


def _setting(name: str, declared: dataclasses.Field, hint: Any) -> Setting:
    optional = typing.get_origin(hint) in (Union, types.UnionType) and type(None) in typing.get_args(hint)
    if optional:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    many = typing.get_origin(hint) is tuple
    if many:
        hint = typing.get_args(hint)[0]
    assert hint in (int, float, bool, str), f"{name}: {hint} has no command-line form"
    metadata = declared.metadata
    assert metadata["many"] == many, f"{name}: many={metadata['many']} does not fit its annotation"
    flags = metadata["flags"]
    if not flags and not metadata["off"]:
        flags = ("--" + declared.name.replace("_", "-"),)
    return Setting(
        name,
        hint,
        optional,
        many,
        declared.default,
        metadata["help"],
        flags,
        metadata["off"],
        choices() if callable(choices := metadata["choices"]) else choices,
        metadata["auto"],
        metadata["metavar"],
        metadata["path"],
        metadata["maximum"],
    )


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
            raise ValueError(f'{value!r} must be at least 1, or "auto"')
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
