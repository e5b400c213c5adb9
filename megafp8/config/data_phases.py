"""Phases of data (`--data-phases`): blends of shards that a run reads one after the other, each from a given sample on.

    - name: web
      data_path: [0.7, shards/web, 0.3, shards/code]
    - name: anneal
      start: 90%                  # or 4000 samples, 2B tokens, 9000 steps
      data_path: [0.2, shards/web, 0.8, shards/math]

The setting holds the contents of the file, one text for each phase, so that records and checkpoints have them:
`anneal 90% 0.2 shards/web 0.8 shards/math`, quoted as for a shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from megafp8.config import iterations
from megafp8.config.batch_schedule import SUFFIXES
from megafp8.config.data_blend import Blend, parse_blend
from megafp8.config.lr_schedule import lr_marks
from megafp8.config.schema import DataConfig, RunConfig
from megafp8.errors import ConfigError
from megafp8.utils import strict_yaml
from megafp8.utils.files import UnreadableFile, read_text
from megafp8.utils.suggestions import unknown_keys

FLAG = "--data-phases"
EVENT = "data phase"
"""Name of the record of a phase that begins; its detail opens with the phase's name and a comma."""
SUFFIX = (".yaml", ".yml")
KEYS = ("name", "start", "data_path")
FIRST_START = "0%"
STARTS = "90%, 4000 samples, 2B tokens or 9000 steps"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_START = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([KMBT]?) ?(%|samples|tokens|steps)")


@dataclass(frozen=True)
class DataPhase:
    """One phase.

    Attributes:
        start: as written, such as `90%`.
        words: the blend, as `--data-path` has it.
    """

    name: str
    start: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join([self.name, self.start, *self.words])

    @property
    def flag(self) -> str:
        """The phase as messages name it."""
        return f"{FLAG} {self.name}:"

    def first_sample(self, config: RunConfig, world_size: int) -> int:
        """The first training sample of the phase, rounded down to whole samples.

        Raises:
            ConfigError: no number with a unit, or of tokens without `--seq-length`.
        """
        match = _START.fullmatch(self.start)
        if match is None:
            raise ConfigError(f"{self.flag} start {self.start!r} is no number with its unit: write {STARTS}")
        number, unit = Fraction(match[1]) * SUFFIXES.get(match[2], 1), match[3]
        if unit == "%":
            return int(number * iterations.train_samples(config, world_size) / 100)
        if unit == "steps":
            return iterations.batch_schedule(config, world_size).advance(int(number))
        if unit == "samples":
            return int(number)
        if not config.data.seq_length:
            raise ConfigError(f"{self.flag} start {self.start!r} counts tokens: --seq-length is missing")
        return int(number / config.data.seq_length)


def parse_phases(data: DataConfig) -> tuple[DataPhase, ...]:
    """The phases of a run; empty without `--data-phases`.

    Raises:
        ConfigError: a text of the setting is no phase, or a name is given twice.
    """
    phases, problems = list[DataPhase](), list[str]()
    for text in data.data_phases:
        try:
            name, start, *words = shlex.split(text)
        except ValueError:
            problems.append(f"{FLAG} {text!r}: give a YAML file whose name ends in {' or '.join(SUFFIX)}")
            continue
        phases.append(DataPhase(name, start, tuple(words)))
        if not _NAME.fullmatch(name):
            problems.append(f"{FLAG}: the name {name!r} may have letters, digits and _ . - only")
        if any(name == each.name for each in phases[:-1]):
            problems.append(f"{FLAG}: two phases have the name {name}: give each its own")
        problems += [f"{phases[-1].flag} {text}" for text in _blend_problems(words)]
    if problems:
        raise ConfigError(problems)
    return tuple(phases)


def _blend_problems(words: Sequence[str]) -> Iterator[str]:
    if not words:
        yield "no shards: give data_path"
        return
    try:
        blend = parse_blend(words)
    except ValueError as error:
        yield f"{' '.join(words)}: {error}"
        return
    if blend.weights is None and len(blend.prefixes) > 1:
        yield f"{' '.join(words)}: give each shard its weight, as in [0.7, A, 0.3, B]"
    if twice := [each for each in dict.fromkeys(blend.prefixes) if blend.prefixes.count(each) > 1]:
        yield f"{twice[0]} is given twice: add its weights"


def first_samples(config: RunConfig, world_size: int) -> tuple[int, ...]:
    """The first training sample of each phase: they begin at 0, increase, and are within the run.

    Raises:
        ConfigError: they do not, or as `parse_phases`.
    """
    phases = parse_phases(config.data)
    if not phases:
        return ()
    starts = [phase.first_sample(config, world_size) for phase in phases]
    total, problems = iterations.train_samples(config, world_size), list[str]()
    if starts[0] != 0:
        problems.append(f"{phases[0].flag} start {phases[0].start!r}: the first phase starts the run: remove its start")
    for (before, first), (phase, start) in pairwise(zip(phases, starts, strict=True)):
        if start <= first:
            problems.append(
                f"{before.flag} it ends before it begins: it starts at sample {first:,}, and {phase.name} (start "
                f"{phase.start}) at sample {start:,}: order the phases by their starts, or remove one"
            )
    late = [(phase, start) for phase, start in zip(phases, starts, strict=True) if start >= max(total, 1)]
    problems += [
        f"{phase.flag} start {phase.start} is sample {start:,}, beyond the run's {total:,}: start it earlier, as in "
        "90%, or train for longer"
        for phase, start in late[:1]
    ]
    if problems:
        raise ConfigError(problems)
    return tuple(starts)


def training_blends(config: RunConfig, world_size: int) -> Iterator[tuple[float, Blend]]:
    """The blends of shards for training, each with its share of the samples.

    Raises:
        ConfigError: as `first_samples`.
        ValueError: a list of shards cannot be parsed.
    """
    phases = parse_phases(config.data)
    if not phases:
        yield 1.0, parse_blend(config.data.train_data_path or config.data.data_path)
        return
    total = iterations.train_samples(config, world_size)
    for phase, (start, end) in zip(phases, pairwise([*first_samples(config, world_size), total]), strict=True):
        yield (end - start) / total, parse_blend(phase.words)


def schedule_marks(config: RunConfig, world_size: int) -> dict[str, float]:
    """The steps within the run at which a phase of the learning rate or of the data begins or ends, by its label."""
    batches, last = iterations.batch_schedule(config, world_size), iterations.train_iters(config, world_size)
    starts = zip(parse_phases(config.data), first_samples(config, world_size), strict=True)
    samples = lr_marks(config, world_size) | {f"data: {phase.name}": start for phase, start in starts}
    marks = {name: batches.steps_until(sample) for name, sample in samples.items()}
    # Step n has the learning rate of the samples of n - 1 steps.
    return {name: step + 1 for name, step in marks.items() if 0 < step < last}


# ---- the file -----------------------------------------------------------------------------------------------------


def is_file(words: Sequence[str]) -> bool:
    """Whether the words of the flag name a file; else they are phases."""
    return len(words) == 1 and words[0].endswith(SUFFIX)


def read_phases(path: str) -> tuple[str, ...]:
    """The phases of a file, as the setting holds them.

    Raises:
        ConfigError: the file cannot be read or is no list of phases, with the line.
    """
    try:
        root = strict_yaml.compose_yaml(read_text(path, strict_yaml.MAX_BYTES))
        if getattr(root, "id", "") != "sequence" or not root.value:
            raise UnreadableFile("must be a list of phases: - name: web and, below it, data_path: [0.7, A, 0.3, B]")
        return tuple(str(_read_phase(node, number)) for number, node in enumerate(root.value, start=1))
    except UnreadableFile as error:
        raise ConfigError(f"{FLAG} {error.located(path)}") from error


def _read_phase(node: Any, number: int) -> DataPhase:
    """A phase from its PyYAML node."""
    if node.id != "mapping":
        raise UnreadableFile(f"phase {number} must have the keys {', '.join(KEYS)}", line=node.start_mark.line + 1)
    values: dict[str, tuple[str, ...]] = {}
    for key, value in node.value:
        line, name = key.start_mark.line + 1, str(key.value)
        items = value.value if value.id == "sequence" else [value]
        if problems := unknown_keys({name: None}, KEYS):
            raise UnreadableFile(f"phase {number}: {problems[0]}", line=line)
        if name in values:
            raise UnreadableFile(f"phase {number}: {name} is given twice", line=line)
        if any(item.id != "scalar" for item in items) or (value.id == "sequence") > (name == "data_path"):
            raise UnreadableFile(f"phase {number}: {name} must be text, and data_path may be a list", line=line)
        # `data_path: 0.7 A 0.3 B` is as on a command line; a path with blanks is an item of a list.
        is_line = name == "data_path" and value.id == "scalar"
        values[name] = tuple(value.value.split()) if is_line else tuple(str(item.value) for item in items)
    if number > 1 and "start" not in values:
        raise UnreadableFile(f"phase {number}: start is missing: write {STARTS}", line=node.start_mark.line + 1)
    return DataPhase(
        name=" ".join(values.get("name", (f"phase{number}",))),
        start=" ".join(values.get("start", (FIRST_START,))),
        words=values.get("data_path", ()),
    )
