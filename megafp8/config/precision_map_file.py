"""Parser of the file of `--precision-map`.

It is YAML in which each key is a pattern of linears:

    "*.linear_fc2": blockwise
    layers.20-23.*:
      dgrad: bf16
      wgrad: bf16
    output_layer: mxfp8
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megafp8.config.precision_map import MapFileEntry
from megafp8.errors import ConfigError
from megafp8.utils import strict_yaml
from megafp8.utils.files import UnreadableFile, read_text


def read_map(path: str) -> tuple[MapFileEntry, ...]:
    """The entries of a precision map file in the syntax of `--precision`, in their order.

    Raises:
        ConfigError: the file cannot be read or is not a precision map, with the line.
    """
    try:
        text = read_text(path, strict_yaml.MAX_BYTES)
    except UnreadableFile as error:
        raise ConfigError(f"--precision-map {path}: cannot be read: {error.reason}") from error
    try:
        return tuple(_file_entry(path, line, entry) for line, entry in _parse_entries(text))
    except UnreadableFile as error:
        # The most likely syntax error: * begins an alias.
        hint = ": a pattern that starts with * needs quotes, as in '*.linear_fc2': bf16" * ("'*" in error.reason)
        raise ConfigError(f"--precision-map {error.located(path)}{hint}") from error


def _file_entry(path: str, line: int, text: str) -> MapFileEntry:
    entry = MapFileEntry(text)
    entry.source = f"--precision-map {path}:{line}"
    return entry


def _parse_entries(text: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each entry."""
    import yaml  # here, because --help imports this module

    for pattern, value in _mapping_items(strict_yaml.compose_yaml(text), "the file"):
        if isinstance(value, yaml.ScalarNode):
            yield _line_of(pattern), f"{pattern.value}={value.value}"
            continue
        given: dict[str, str] = {}
        for gemms, recipe in _mapping_items(value, pattern.value):
            if not isinstance(recipe, yaml.ScalarNode):
                raise UnreadableFile(
                    f"{pattern.value}, {gemms.value}: expected the name of a recipe", line=_line_of(recipe)
                )
            # The keys of a mapping have no order, so `dgrad` and `dgrad,wgrad` contradict each other.
            for gemm in gemms.value.split(","):
                if (before := given.setdefault(gemm, gemms.value)) != gemms.value:
                    raise UnreadableFile(
                        f"{pattern.value}: {before!r} and {gemms.value!r} both set {gemm}; give each GEMM once",
                        line=_line_of(gemms),
                    )
            yield _line_of(gemms), f"{pattern.value}:{gemms.value}={recipe.value}"


def _mapping_items(node: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """The items of a mapping node, which must not be empty or repeat a key."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        line = None if node is None else _line_of(node)
        raise UnreadableFile(f"{name} must map patterns to recipes, as in '*.linear_fc2': bf16", line=line)
    if not node.value:
        raise UnreadableFile(f"{name} is empty; give at least one recipe", line=_line_of(node))
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise UnreadableFile("a key must be a plain string", line=_line_of(key))
        # PyYAML would silently keep the last of two equal keys.
        if key.value in seen:
            raise UnreadableFile(f"{key.value} is given twice", line=_line_of(key))
        seen.add(key.value)
        yield key, value


def _line_of(node: Any) -> int:
    return int(node.start_mark.line) + 1
