"""Parsers of the file of `--precision-map` and of `--fp8-schedule`.

A precision map file is YAML in which each key is a pattern of linears:

    "*.linear_fc2": blockwise
    layers.20-23.*:
      dgrad: bf16
      wgrad: bf16
    output_layer: mxfp8

A schedule such as `bf16:100,fp8:900,bf16` lists phases, each with its last step; the last phase has none and lasts to
the end of the run. In an `fp8` or `fp4` phase the run uses its recipes and its precision map; in a `bf16` phase (`fp32`
without --bf16) it computes in high precision.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

from megafp8.config.precision_map import HIGH_PRECISION_DTYPES, MapFileEntry
from megafp8.config.schema import PrecisionConfig
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


RECIPE_FAMILIES = ("fp8", "fp4")


class SchedulePhase(NamedTuple):
    """Consecutive steps of one precision.

    Attributes:
        precision: one of `RECIPE_FAMILIES` or `HIGH_PRECISION_DTYPES`.
        last_step: None for the last phase.
    """

    precision: str
    last_step: Optional[int]

    @property
    def is_quantized(self) -> bool:
        """Whether the run uses its recipes in this phase."""
        return self.precision in RECIPE_FAMILIES


@functools.lru_cache(maxsize=16)
def parse_schedule(text: str) -> tuple[SchedulePhase, ...]:
    """Parse a schedule such as `bf16:100,fp8:900,bf16`.

    Raises:
        ValueError: it is not a valid schedule, with the reason.
    """
    phases: list[SchedulePhase] = []
    parts = text.split(",")
    for part in parts:
        word, colon, step = part.strip().partition(":")
        if word not in (*RECIPE_FAMILIES, *HIGH_PRECISION_DTYPES):
            raise ValueError(f"{word!r} is not one of {', '.join((*HIGH_PRECISION_DTYPES, *RECIPE_FAMILIES))}")
        if colon and not (step.isascii() and step.isdecimal()):
            raise ValueError(f"{part.strip()!r}: the last step of a phase must be an integer")
        phases.append(SchedulePhase(word, int(step) if colon else None))
    steps = [phase.last_step for phase in phases[:-1] if phase.last_step is not None]
    if len(steps) < len(phases) - 1:
        raise ValueError("every phase except the last needs its last step, as in bf16:100,fp8:900,bf16")
    if phases[-1].last_step is not None:
        raise ValueError(
            f"{parts[-1].strip()!r}: the last phase lasts to the end of the run and takes no step: give "
            f"{phases[-1].precision}, or add another phase after it"
        )
    if any(later <= earlier for earlier, later in zip([0, *steps], steps)):  # noqa: B905
        raise ValueError(f"last steps must increase, starting from at least 1: {', '.join(map(str, steps))}")
    if any(a.is_quantized == b.is_quantized for a, b in itertools.pairwise(phases)):
        raise ValueError("phases must alternate between high precision and FP8 or FP4")
    return tuple(phases)


def is_quantized_at(precision: PrecisionConfig, step: int) -> bool:
    """Whether a step (counted from 1) uses the run's recipes; always true without a schedule."""
    if precision.fp8_schedule is None:
        return True
    phases = parse_schedule(precision.fp8_schedule)
    return next(phase for phase in phases if phase.last_step is None or step <= phase.last_step).is_quantized
