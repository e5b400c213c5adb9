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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Union

from megafp8.config.settings import all_settings, settings_by_name
from megafp8.errors import ConfigError
from megafp8.utils import strict_yaml
from megafp8.utils.files import UnreadableFile, read_text
from megafp8.utils.strict_json import parse_json

Value = Union[bool, str, tuple[str, ...]]


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


def read_config(path: str) -> tuple[dict[str, Any], list[ConfigEntry]]:
    """Read a configuration file.

    Returns:
        The typed values of a JSON file's sections by setting (`settings.read_settings` converts them), and the entries
        of hand-written keys.

    Raises:
        ConfigError: the file cannot be read, is not YAML or JSON, repeats a key, or has values of a wrong form.
        UnreadableFile: the file cannot be opened, or is too large.
    """
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
        raise ConfigError(f"--config {path}: {error.reason}") from error
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
            if is_section or name not in {each.section for each in all_settings()}:
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
