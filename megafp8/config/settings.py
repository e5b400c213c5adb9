"""The schema as a flat table: one `Setting` per field, named `section.field`, with its type read from the annotation.

The command line, the JSON file, the presets and the diff all walk this table, so none of them can forget a field.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Union

from megafp8.config.schema import AUTO, RunConfig
from megafp8.utils.paths import path_fault


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
        name, hint, optional, many, declared.default, metadata["help"], flags, metadata["off"],
        choices() if callable(choices := metadata["choices"]) else choices, metadata["auto"], metadata["metavar"],
        metadata["path"], metadata["maximum"],
    )


