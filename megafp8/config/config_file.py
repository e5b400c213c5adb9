"""Configuration files that people write (`megafp8 pretrain CONFIG.yaml`): a flag per key, in YAML or JSON.

    model_preset: llama3-8b          # --model-preset llama3-8b
    recipe: tensorwise
    lr: 3e-4
    swiglu: true
    recompute_modules: [mlp, moe]    # --recompute-modules mlp moe

A value is read as on the command line: `3e-4` is a number and `98,2,0` is text, whatever YAML makes of them. `null` is
the word `none`. A section of the settings may group its keys. JSON files may also have the form of a run's
`config.json`, in which every field has its section and its type (`settings.read_settings`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Optional, Union

from megafp8.config import megatron_flags
from megafp8.config.settings import Setting, convert_tree, section_names, settings_by_key, settings_by_name
from megafp8.errors import ConfigError
from megafp8.utils import strict_yaml
from megafp8.utils.files import UnreadableFile, read_text
from megafp8.utils.strict_json import parse_json
from megafp8.utils.suggestions import did_you_mean

FLAGS = ("--recipe", "--precision-map", "--min-lr-ratio", "--num-epochs")
"""Flags that are no settings and that a file may give."""
Value = Union[bool, str, tuple[str, ...]]
ReadOption = Callable[[list[str], dict[str, Any], list[str]], None]


@dataclass(frozen=True)
class ConfigEntry:
    """One key of a configuration file.

    Attributes:
        source: file and line, for messages: `c.yaml:7`.
        key: as written.
        value: true or false, or the words of a command line.
    """

    source: str
    key: str
    value: Value

    @property
    def name(self) -> str:
        """The key as a field of the settings is written."""
        return self.key.replace("-", "_")

    @property
    def flag(self) -> str:
        return f"--{self.key.replace('_', '-')}"


def read_config(path: str, read_option: ReadOption, problems: list[str]) -> dict[str, Any]:
    """Read a configuration file.

    Args:
        path: of the file; one that does not end in .yaml or .yml is JSON.
        read_option: reads a flag and its words, as on a command line: (option, values, problems).
        problems: to which everything that is wrong is added, with file and line.

    Returns:
        The values by setting, and of the options of `FLAGS` by their names.
    """
    try:
        tree, entries = _parse(path)
    except ConfigError as error:
        problems.extend(error.problems)
        return {}
    except UnreadableFile as error:
        problems.append(f"--config {path}: cannot be read: {error.reason}")
        return {}
    values: dict[str, Any] = {}
    try:
        values = convert_tree(tree)
    except ConfigError as error:
        problems.extend(f"--config {path}: {problem}" for problem in error.problems)
    entry_of: dict[str, ConfigEntry] = {}  # by what it sets
    for entry in entries:
        found: list[str] = []
        setting = settings_by_key().get(entry.name) if entry.flag not in FLAGS else None
        if setting is None and entry.flag not in FLAGS:
            found.append(f"unknown key `{entry.key}`{_key_hint(entry)}")
        # Also two keys for one setting, and equal keys, of which PyYAML's own mappings would keep the last.
        elif (first := entry_of.setdefault(setting.name if setting else entry.flag, entry)) is not entry:
            found.append(f"`{entry.key}` sets the same flag as `{first.key}` ({first.source}): keep one")
        else:
            _read_entry(entry, setting, read_option, values, found)
        problems.extend(f"{entry.source}: {problem}" for problem in found)
    return values


def _read_entry(
    entry: ConfigEntry, setting: Optional[Setting], read_option: ReadOption, values: dict[str, Any], problems: list[str]
) -> None:
    value, is_switch = entry.value, setting is not None and setting.type is bool and not setting.many
    if setting is not None and is_switch:
        if isinstance(value, bool):
            values[setting.name] = value is (entry.flag not in setting.off)
        elif value == "none" and setting.optional:
            values[setting.name] = None
        else:
            problems.append(f"{entry.flag}: {value!r} is not true or false")
    elif isinstance(value, bool):
        problems.append(f"`{entry.key}` takes a value, not {str(value).lower()}")
    elif value == () and setting is not None and setting.many:
        values[setting.name] = ()
    else:
        flag = setting.flags[0] if setting is not None else entry.flag
        read_option([flag, *((value,) if isinstance(value, str) else value)], values, problems)


def _key_hint(entry: ConfigEntry) -> str:
    """What to write in place of an unknown key."""
    (read, *_), replacements = megatron_flags.replace([[entry.flag]])
    if replacements:
        return f": it is {' '.join(read)} here"
    if verdict := megatron_flags.classify(entry.flag, ()):
        return f": {verdict.reason}"
    if use := megatron_flags.of_other_program(entry.key, as_key=True):
        return f"; {use}"
    if near := did_you_mean(entry.name, [*settings_by_key(), *(flag[2:].replace("-", "_") for flag in FLAGS)]):
        return near
    if use := megatron_flags.of_other_program(entry.key, as_key=True, is_near=True):
        return f"; {use}"
    return "; a key is a flag of `megafp8 pretrain --help-all` without its dashes"


def _parse(path: str) -> tuple[dict[str, Any], list[ConfigEntry]]:
    """The typed values of a JSON file's sections, and the entries of hand-written keys."""
    if path.endswith((".yaml", ".yml")):
        text = read_text(path, strict_yaml.MAX_BYTES)
        try:
            return {}, list(_yaml_entries(path, strict_yaml.compose_yaml(text)))
        except UnreadableFile as error:
            raise ConfigError(error.located(path)) from None
    text = read_text(path)
    try:
        tree = parse_json(text, unique_keys=True)
    except UnreadableFile as error:
        hint = "" if path.endswith(".json") else "; the name of a YAML file ends in .yaml or .yml"
        raise ConfigError(f"--config {path}: {error.reason}{hint}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {path}: not a JSON object of flags, but a {type(tree).__name__}")
    typed = {key: value for key, value in tree.items() if isinstance(value, dict) or key in settings_by_name()}
    return typed, [_json_entry(path, text, key, value) for key, value in tree.items() if key not in typed]


def _yaml_entries(path: str, root: Any, is_section: bool = False) -> Iterator[ConfigEntry]:
    import yaml  # here, because --help imports this module

    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: a configuration has a flag and its value per line, such as lr: 3e-4")
    for key, node in root.value:
        name, source = str(key.value), f"{path}:{key.start_mark.line + 1}"
        if isinstance(node, yaml.MappingNode):
            if is_section or name not in section_names():
                raise ConfigError(f"{source}: `{name}` takes a value, not keys of its own")
            yield from _yaml_entries(path, node, is_section=True)
        else:
            yield ConfigEntry(source, name, _yaml_value(source, name, node))


def _yaml_value(source: str, name: str, node: Any) -> Value:
    import yaml

    if isinstance(node, yaml.SequenceNode):
        if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
            raise ConfigError(f"{source}: `{name}` takes a list of values, not of lists or keys")
        return tuple(str(item.value) for item in node.value)
    # Only `true` and `false` are switches: for YAML `on` and `yes` are booleans too, also where a flag takes a name.
    if node.style is None and node.value.lower() in ("true", "false"):
        return str(node.value).lower() == "true"
    return "none" if node.tag.endswith(":null") else str(node.value)


def _json_entry(path: str, text: str, key: str, value: Any) -> ConfigEntry:
    # The parser keeps no lines. A key that a string repeats may give an earlier line.
    match = re.search(rf"{re.escape(json.dumps(key))}\s*:", text)
    line = text.count("\n", 0, match.start()) + 1 if match else 1
    if isinstance(value, list):
        return ConfigEntry(f"{path}:{line}", key, tuple(map(_as_word, value)))
    return ConfigEntry(f"{path}:{line}", key, value if isinstance(value, bool) else _as_word(value))


def _as_word(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "none" if value is None else json.dumps(value)
