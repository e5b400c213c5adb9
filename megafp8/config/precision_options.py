"""Reads the file of `--precision-map`: YAML in which each key is a pattern.

    "*.linear_fc2": blockwise
    layers.20-23.*:
      dgrad: bf16
      wgrad: bf16
    output_layer: mxfp8

When a run computes by its recipes, and when in high precision: `--fp8-schedule bf16:100,fp8:900,bf16`.

The stretches in their order, each with its last step; the last one has none and goes on to the end. `fp8` (or `fp4`) is
the run with its recipes and its precision map, `bf16` (`fp32` without --bf16) the same run in high precision.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

from megafp8.config.precision_map import MapFileEntry
from megafp8.config.schema import PrecisionConfig
from megafp8.errors import ConfigError
from megafp8.utils import strict_yaml
from megafp8.utils.files import UnreadableFile, read_text


def read_map(path: str) -> tuple[MapFileEntry, ...]:
    """The entries of a file, as `--precision` spells them, in their order.

    Raises:
        ConfigError: the file cannot be read, or is another kind of YAML; with the line, where there is one.
    """
    try:
        text = read_text(path, strict_yaml.MAX_BYTES)
    except UnreadableFile as error:
        raise ConfigError(f"--precision-map {path}: cannot be read: {error.reason}") from error
    try:
        return tuple(_file_entry(path, line, entry) for line, entry in _entries(text))
    except ValueError as error:
        raise ConfigError(f"--precision-map {path}: {error}") from error


def _file_entry(path: str, line: str, text: str) -> MapFileEntry:
    entry = MapFileEntry(text)
    entry.place = f"--precision-map {path}: {line}"
    return entry


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Where each stands in the file, and its text."""
    import yaml  # only for those who have such a file: keeps --help quick

    try:
        root = strict_yaml.compose_yaml(text)
    except UnreadableFile as error:
        raise ValueError(_syntax(text, error)) from error
    for pattern, value in _pairs(root, "the file"):
        if isinstance(value, yaml.ScalarNode):
            yield _place(pattern), f"{pattern.value}={value.value}"
            continue
        given: dict[str, str] = {}
        for gemms, recipe in _pairs(value, pattern.value):
            if not isinstance(recipe, yaml.ScalarNode):
                raise ValueError(f"{_place(recipe)}: {pattern.value}, {gemms.value}: give a recipe")
            # A mapping has no order to win by: `dgrad` beside `dgrad,wgrad` says two things of one GEMM.
            for gemm in gemms.value.split(","):
                if (before := given.setdefault(gemm, gemms.value)) != gemms.value:
                    raise ValueError(
                        f"{_place(gemms)}: {pattern.value}: {before!r} and {gemms.value!r} both say what {gemm} is; "
                        "give each GEMM once"
                    )
            yield _place(gemms), f"{pattern.value}:{gemms.value}={recipe.value}"


def _syntax(text: str, error: UnreadableFile) -> str:
    """What YAML does not understand, in a line, and the likeliest mend."""
    mark, problem = getattr(error.__cause__, "problem_mark", None), getattr(error.__cause__, "problem", None)
    if mark is None or problem is None:
        return error.reason
    line = next(iter(text.splitlines()[mark.line :]), "").strip()
    told = f"line {mark.line + 1}: not YAML: {line!r}: {problem}"
    quotes = ": a pattern that begins with * needs quotes, as in '*.linear_fc2': blockwise"
    return told + (quotes if line.startswith("*") else "")


def _pairs(node: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """Keys and values of a mapping, which has some, and each key once."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        where = "" if node is None else f"{_place(node)}: "
        raise ValueError(f"{where}{name} is to give recipes by name, as in '*.linear_fc2: blockwise'")
    if not node.value:
        raise ValueError(f"{_place(node)}: {name} gives no recipe")
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(f"{_place(key)}: a name is one word")
        # Parsed YAML would keep the last of two equal keys, and nobody would know.
        if key.value in seen:
            raise ValueError(f"{_place(key)}: {key.value} is there twice")
        seen.add(key.value)
        yield key, value


def _place(node: Any) -> str:
    return f"line {node.start_mark.line + 1}"


QUANTIZED = ("fp8", "fp4")
HIGH = ("bf16", "fp32")


class Stretch(NamedTuple):
    """Some steps on end.

    Attributes:
        precision: a word of QUANTIZED or HIGH.
        last_step: None for the last stretch.
    """

    precision: str
    last_step: Optional[int]

    @property
    def is_quantized(self) -> bool:
        """Does the run compute by its recipes?"""
        return self.precision in QUANTIZED


@functools.lru_cache(maxsize=16)
def parse_schedule(text: str) -> tuple[Stretch, ...]:
    """Read `bf16:100,fp8:900,bf16`.

    Raises:
        ValueError: it is no schedule; the message says why.
    """
    stretches: list[Stretch] = []
    parts = text.split(",")
    for part in parts:
        word, colon, step = part.strip().partition(":")
        if word not in (*QUANTIZED, *HIGH):
            raise ValueError(f"{word!r} is none of {', '.join((*HIGH, *QUANTIZED))}")
        if colon and not step.isdecimal():
            raise ValueError(f"{part.strip()!r}: the last step of a stretch is a whole number")
        stretches.append(Stretch(word, int(step) if colon else None))
    steps = [stretch.last_step for stretch in stretches[:-1]]
    if None in steps:
        raise ValueError("every stretch but the last has its last step, as in bf16:100,fp8:900,bf16")
    if stretches[-1].last_step is not None:
        raise ValueError(
            f"{parts[-1].strip()!r}: the last stretch goes to the end of the run and has no last step: give "
            f"{stretches[-1].precision}, or another stretch behind it"
        )
    if any(later <= earlier for earlier, later in zip([0, *steps], steps)):  # noqa: B905
        raise ValueError(f"last steps rise from 1: {', '.join(map(str, steps))}")
    if any(a.is_quantized == b.is_quantized for a, b in zip(stretches, stretches[1:])):  # noqa: B905
        raise ValueError("stretches in high precision and quantized ones take turns")
    return tuple(stretches)


def is_quantized_at(precision: PrecisionConfig, step: int) -> bool:
    """Whether a step (the first is 1) computes by the run's recipes; always without a schedule."""
    if precision.fp8_schedule is None:
        return True
    stretches = parse_schedule(precision.fp8_schedule)
    return next(each for each in stretches if each.last_step is None or step <= each.last_step).is_quantized
