"""Table of all settings, and conversion of a `RunConfig` to and from JSON, to a hash and to a diff.

The table has one `Setting` per field of the schema, named `section.field`. The command line, JSON files, presets and
diffs are all made from it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Union

from megafp8.config.schema import AUTO, RunConfig
from megafp8.config.schema.setting import Audience, Range, Role
from megafp8.errors import ConfigError
from megafp8.recipes import registry
from megafp8.utils.files import UnreadableFile, path_problem, printable
from megafp8.utils.strict_json import parse_json
from megafp8.utils.suggestions import closest


@dataclass(frozen=True)
class Setting:
    """One field of the schema. The attributes that are not described here are arguments of `schema.setting`.

    Attributes:
        name: `section.field`, or `field` for a field of `RunConfig` itself.
        type: int, float, bool or str; with `many`, the type of each element.
        optional: whether the value may be None.
    """

    name: str
    type: type
    optional: bool
    many: bool
    default: Any
    help: str
    flags: tuple[str, ...]
    off: tuple[str, ...]
    choices: tuple[Any, ...]
    auto: bool
    metavar: "str | None"
    is_path: bool
    maximum: int
    range: "Range | None"
    needs: str
    requires: str
    role: Role
    unset: str
    unit: str
    group: str
    audience: Audience
    megatron: str
    former: str

    @property
    def section(self) -> str:
        """Name of the section; empty for a field of `RunConfig` itself."""
        return self.name.rpartition(".")[0]

    @property
    def field(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def is_switch(self) -> bool:
        """Whether its flags take no value."""
        return self.type is bool and not self.many

    def problem(self, value: Any) -> "str | None":
        """What is wrong with a value of the right type, regardless of other settings; None if nothing is."""
        if self.type is int and isinstance(value, int) and abs(value) > self.maximum:
            return f"must be at most {self.maximum:,}"
        if self.is_path and value == "":
            return "is empty: give a path, or leave the flag out"
        return path_problem(value) if self.is_path and isinstance(value, str) else None

    def is_out_of_range(self, value: Any) -> bool:
        """Whether a number, or one of several, is not in the range of the setting."""
        if self.range is None or value is None or (self.auto and value == AUTO):
            return False
        return not all(map(self.range.holds, value if isinstance(value, tuple) else (value,)))

    def as_flag(self, value: Any) -> str:
        """The flag that gives a value, as messages show it."""
        flag = (self.off if value is False and self.off else self.flags)[0]
        if isinstance(value, bool):
            return flag
        return " ".join([flag, *map(str, value)]) if isinstance(value, tuple) else f"{flag} {value}"

    def written(self, value: Any) -> Any:
        """A value as JSON and messages show it: `AUTO` is "auto"."""
        return "auto" if self.auto and value == AUTO and value is not None else value


@functools.lru_cache(maxsize=1)
def all_settings() -> tuple[Setting, ...]:
    """Every setting, in the order of the schema."""
    table: list[Setting] = []
    for outer in dataclasses.fields(RunConfig):
        if dataclasses.is_dataclass(outer.type):
            section: Any = outer.type
            groups = _groups_of(section)
            fields = dataclasses.fields(section)
            table += [
                _setting(f"{outer.name}.{inner.name}", inner, section.ROLE, groups.get(inner.name, outer.name))
                for inner in fields
            ]
        else:
            table.append(_setting(outer.name, outer, RunConfig.ROLE, ""))
    return tuple(table)


@functools.cache
def settings_with(role: Role) -> Mapping[str, Setting]:
    """The settings that have one of some roles, by name."""
    return types.MappingProxyType({setting.name: setting for setting in all_settings() if setting.role & role})


@functools.lru_cache(maxsize=1)
def settings_by_flag() -> Mapping[str, Setting]:
    """Every setting by each of its flags, also those that set it to False."""
    return types.MappingProxyType({flag: each for each in all_settings() for flag in (*each.flags, *each.off)})


@functools.lru_cache(maxsize=1)
def settings_by_key() -> Mapping[str, Setting]:
    """Every setting by the keys of configuration files: its flags and its field, with `_` for `-`."""
    return types.MappingProxyType(
        {each.field: each for each in all_settings()}
        | {flag.removeprefix("--").replace("-", "_"): each for flag, each in settings_by_flag().items()}
    )


@functools.lru_cache(maxsize=1)
def settings_by_name() -> Mapping[str, Setting]:
    """Every setting by its `section.field` name."""
    return types.MappingProxyType({setting.name: setting for setting in all_settings()})


def _groups_of(section: type) -> dict[str, str]:
    """Topics of `--help` by field, of the base classes of a section that name one."""
    bases = [base for base in section.__mro__ if "GROUP" in vars(base)]
    return {field: vars(base)["GROUP"] for base in bases for field in vars(base)["__annotations__"]}


def section_names() -> Set[str]:
    """The names of the sections."""
    return {setting.section for setting in all_settings()} - {""}


def value_of(config: RunConfig, name: str) -> Any:
    """The value of the setting `name` in `config`."""
    return _reader(name)(config)


@functools.cache
def _reader(name: str) -> Callable[[RunConfig], Any]:
    return operator.attrgetter(name)


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """A copy of `config` with some settings replaced.

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


def _setting(name: str, declared: dataclasses.Field[Any], section_role: Role, group: str) -> Setting:
    hint = declared.type
    optional = typing.get_origin(hint) in (Union, types.UnionType) and type(None) in typing.get_args(hint)
    if optional:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    many = typing.get_origin(hint) is tuple
    if many:
        hint = typing.get_args(hint)[0]
    assert hint in (int, float, bool, str), f"{name}: {hint} has no command-line form"
    metadata = dict(declared.metadata)
    assert metadata["many"] == many, f"{name}: many={metadata['many']} does not fit its annotation"
    if not metadata["flags"] and not metadata["off"]:
        metadata["flags"] = ("--" + declared.name.replace("_", "-"),)
    if metadata["role"] is None:
        metadata["role"] = section_role
    metadata["group"] = metadata["group"] or group
    if callable(metadata["choices"]):
        metadata["choices"] = metadata["choices"]()
    return Setting(name=name, type=hint, optional=optional, default=declared.default, **metadata)


def to_json(config: RunConfig) -> str:
    """All settings as indented JSON with a final newline: `{"model": {"num_layers": 12, ...}, ...}`."""
    return json.dumps(to_dict(config), indent=2, allow_nan=False) + "\n"


def from_json(text: str) -> RunConfig:
    """The inverse of `to_json`. Settings that are missing have their defaults.

    Raises:
        ConfigError: the text is not JSON, has an unknown setting, or has a value of the wrong type.
    """
    return with_values(RunConfig(), read_settings(text))


def read_settings(text: str) -> dict[str, Any]:
    """Parse JSON settings. Returns values by `section.field` name.

    Raises:
        ConfigError: as `from_json`, with all problems.
    """
    try:
        tree = parse_json(text)
    except UnreadableFile as error:
        raise ConfigError(error.reason) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"not a JSON object of sections, but a {type(tree).__name__}")
    return convert_tree(tree)


def convert_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by section, as JSON has them, to values by `section.field` name.

    Raises:
        ConfigError: unknown settings, or values of the wrong type, with all problems.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in _flatten(tree).items():
        setting = settings_by_name().get(name)
        if setting is None:
            problems.append(f"unknown key {name!r}{_suggestion(name)}")
            continue
        try:
            values[name] = _convert(setting, value)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ConfigError(problems)
    return values


def stable_hash(config: RunConfig) -> str:
    """SHA-256 of the settings in hexadecimal, the same on every machine and Python version."""
    import hashlib  # here, because --help imports this module

    canonical = json.dumps(to_dict(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def diff(before: RunConfig, after: RunConfig) -> list[str]:
    """One line per setting that differs, for example `model.num_layers: 12 -> 24`."""
    lines = []
    for setting in all_settings():
        old, new = value_of(before, setting.name), value_of(after, setting.name)
        if old != new:
            lines.append(f"{setting.name}: {_as_json(setting.written(old))} -> {_as_json(setting.written(new))}")
    return lines


def to_dict(config: RunConfig) -> dict[str, Any]:
    """All settings as nested dictionaries and lists for JSON, by section."""
    tree: dict[str, Any] = {}
    for setting in all_settings():
        value = value_of(config, setting.name)
        # 1000 and 1000.0 are equal settings and must serialize alike.
        if setting.type is float and value is not None:
            value = tuple(map(float, value)) if setting.many else float(value)
        holder = tree.setdefault(setting.section, {}) if setting.section else tree
        holder[setting.field] = list(value) if setting.many else setting.written(value)
    return tree


def changed_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of sections that differ from their defaults, by section as in `to_dict`."""
    tree, changed = to_dict(config), dict[str, dict[str, Any]]()
    for setting in all_settings():
        if setting.section and value_of(config, setting.name) != setting.default:
            changed.setdefault(setting.section, {})[setting.field] = tree[setting.section][setting.field]
    return changed


def _flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    sections = section_names()
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if key in sections and isinstance(value, dict):
            flat.update({f"{key}.{field}": inner for field, inner in value.items()})
        else:
            flat[key] = value
    return flat


def _convert(setting: Setting, value: Any) -> Any:
    if setting.former and value != setting.default:
        raise ValueError(f"{value!r}: {setting.former}")
    if value is None and setting.optional:
        return None
    if setting.auto and value in ("auto", AUTO):
        if value == AUTO:
            raise ValueError(f'{value!r} must be at least 1, or "auto"')
        return AUTO
    if setting.many:
        if not isinstance(value, list):
            raise ValueError(f"{value!r} is not a list")
        return tuple(_convert_one(setting, item) for item in value)
    return _convert_one(setting, value)


def _convert_one(setting: Setting, value: Any) -> Any:
    # JSON writes 1 for a float, too. bool is a subclass of int and must not pass as a number.
    accepted = (int, float) if setting.type is float else (setting.type,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and setting.type is not bool):
        raise ValueError(f"{value!r} is not of type {setting.type.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    if hint := registry.family_hint(str(value), setting.choices):
        raise ValueError(hint)
    if setting.choices and value not in setting.choices:
        raise ValueError(f"{value!r} is not one of {', '.join(map(str, setting.choices))}")
    if problem := setting.problem(value):
        raise ValueError(f"{printable(str(value))} {problem}")
    return setting.type(value)


def _suggestion(name: str) -> str:
    near = closest(name, settings_by_name(), similarity=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _as_json(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
