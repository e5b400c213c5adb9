"""Studies: reading a study's YAML file, and expanding its grids into runs.

    name: stdlib                         # default: the file's name
    folder: runs/stdlib                  # default: runs/NAME; a run's own folder is in it
    flags: --seq-length 128 --bf16 ...   # of every run, as on the command line
    tokens_per_parameter: 20             # or tokens: 2e9; or give --train-iters among the flags
    gpus: 1                              # of a run; on a CPU: ranks
    grid:                                # an axis is a list of values or a mapping of named options
      size:
        small: --num-layers 2 --hidden-size 64 --num-attention-heads 2
        large: {flags: --num-layers 4 --hidden-size 128 --num-attention-heads 4, gpus: 2, tokens: 4e9}
      recipe:
        bf16: ""
        fp8: --fp8-format hybrid --fp8-recipe tensorwise
      lr: [1e-3, 3e-3]                   # a list's axis is a flag (--lr), or gpus, tokens, tokens_per_parameter
      seed: [1, 2, 3]
    slurm: {time: 4:00:00, partition: gpu}  # of the jobs, as in a job file of megafp8 slurm
    kubernetes: {image: registry.example.com/megafp8:1, claim: shared}  # of megafp8 kubernetes

`grid` may be a list of such grids. A run has one option of every axis of a grid. If options conflict, the later axis
wins.

A run has an id that does not change when the grid grows. It is a hash of the settings that differ from the defaults and
the number of ranks, without those for output and logging. So another axis, renamed options or other folders lead to the
same run, and a run with another learning rate is never taken for a finished one.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from megafp8.config import derived, dimensions, iterations, model_shapes, rules
from megafp8.config import flags as config_flags
from megafp8.config.flags import ParsedArgs
from megafp8.config.schema import RunConfig
from megafp8.config.settings import all_settings, value_of, with_values
from megafp8.config.variants import NEUTRAL_SETTINGS
from megafp8.errors import ConfigError
from megafp8.launch.job import name_problems
from megafp8.planning import plan
from megafp8.utils import numbers
from megafp8.utils.files import UnreadableFile, path_problem, printable, read_text
from megafp8.utils.formatting import control_problems
from megafp8.utils.strict_yaml import MAX_BYTES, key_lines, parse_yaml
from megafp8.utils.suggestions import unknown_keys

SIZE_KEYS = ("tokens", "tokens_per_parameter", "gpus")
"""Numbers of a run that are not training flags."""
LAUNCHERS = ("slurm", "kubernetes")
"""Keys with the fields of the jobs."""
KEYS = ("name", "folder", "flags", "grid", *LAUNCHERS, *SIZE_KEYS)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of an axis, or the settings that all runs share.

    Attributes:
        flags: words of training flags.
        sizes: values for some of `SIZE_KEYS`.
    """

    name: str = ""
    flags: tuple[str, ...] = ()
    sizes: Mapping[str, float] = field(default_factory=dict)


Grid = Mapping[str, tuple[Option, ...]]


@dataclass(frozen=True, kw_only=True)
class Study:
    """The contents of a study's file.

    Attributes:
        path: the file.
        folder: contains the folders of the runs.
        slurm, kubernetes: fields of the jobs there (`launch/job.py`), as text.
        slurm_flag: flag that gives these fields as KEY=VALUE; empty: the file has them.
    """

    path: Path
    name: str
    folder: Path
    common: Option
    grids: tuple[Grid, ...]
    slurm: Mapping[str, Any] = field(default_factory=dict)
    kubernetes: Mapping[str, Any] = field(default_factory=dict)
    slurm_flag: str = ""


def read_study(path: Path, folder: Optional[Path] = None) -> Study:
    """Read a study's file.

    Args:
        folder: replaces the file's.

    Raises:
        ConfigError: the file cannot be read or is invalid; with all problems.
    """
    try:
        # All values are read as text: YAML's usual reader makes 86400 of 24:00:00, and a number of 0.1 but not of 1e-3.
        text = read_text(path, MAX_BYTES)
    except UnreadableFile as error:
        raise ConfigError(f"{path}: cannot be read: {error.reason}") from None
    try:
        plain = parse_yaml(text, path, as_written=True)
    except UnreadableFile as error:
        raise ConfigError(str(error)) from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: must be a mapping with the keys {', '.join(KEYS)}")
    lines = {keys[0]: line for keys, line in key_lines(text).items() if len(keys) == 1}
    unknown, problems = unknown_keys(lines, KEYS, path), list[str]()
    common = read_option(
        "", {key: plain[key] for key in ("flags", *SIZE_KEYS) if key in plain}, "of all runs", problems
    )
    plain_grids = plain.get("grid", {})
    plain_grids = plain_grids if isinstance(plain_grids, list) else [plain_grids]
    grids = tuple(read_grid(grid, problems) for grid in plain_grids)
    jobs = {key: plain.get(key) or {} for key in LAUNCHERS}
    problems += [f"{key}: {fields!r} must be a mapping of settings" for key, fields in jobs.items() if
                 not isinstance(fields, dict)]  # fmt: skip
    name = str(plain.get("name") or path.stem)
    problems += name_problems(name)  # also a name of folders, and of jobs under Slurm
    folder = folder or Path(str(plain.get("folder") or f"runs/{name}"))
    problems += control_problems("folder", folder)
    problems += control_problems("flags", common.flags)
    for grid in grids:
        for axis, options in grid.items():
            problems += control_problems("grid", axis)
            for option in options:
                problems += control_problems(f"grid: {axis}", (option.name, *option.flags))
    if problem := path_problem(str(folder)):
        problems.append(f"folder: {printable(str(folder))} {problem}")
    if unknown or problems:
        raise ConfigError([*unknown, *(f"{path}: {problem}" for problem in problems)])
    return Study(
        path=path, name=name, folder=folder, common=common, grids=grids, slurm=jobs["slurm"],
        kubernetes=jobs["kubernetes"],
    )  # fmt: skip


def read_grid(plain: Any, problems: list[str]) -> Grid:
    """Read one grid, and append its problems to `problems`."""
    if not isinstance(plain, dict) or not plain:
        problems.append(f"grid: {plain!r} must be a mapping of axes, such as seed: [1, 2, 3]")
        return {}
    return {str(axis): read_axis(str(axis), options, problems) for axis, options in plain.items()}


def read_axis(axis: str, plain: Any, problems: list[str]) -> tuple[Option, ...]:
    """Read the options of an axis: a list of values for the flag of this name, or a mapping of named options."""
    if isinstance(plain, dict) and plain:
        return tuple(read_option(str(name), option, f"{axis}: {name}", problems) for name, option in plain.items())
    if isinstance(plain, list) and plain:
        return tuple(read_value(axis, value, problems) for value in plain)
    problems.append(f"grid: {axis}: {plain!r} must be a list of values, or a mapping of names to flags")
    return ()


def read_value(axis: str, value: Any, problems: list[str]) -> Option:
    """Read a value of an axis that is a list."""
    if not isinstance(value, str):
        problems.append(
            f"grid: {axis}: {value!r} cannot be the value of a flag; for several flags use a mapping of names to flags"
        )
        return Option()
    if axis in SIZE_KEYS:
        return read_option(f"{axis}{value}", {axis: value}, f"grid: {axis}", problems)
    return Option(name=f"{axis}{value}", flags=(f"--{axis.replace('_', '-')}", value))


def read_option(name: str, plain: Any, where: str, problems: list[str]) -> Option:
    """Read an option: flags as text, or a mapping of flags and sizes."""
    plain = plain if isinstance(plain, dict) else {"flags": plain}
    problems += [f"{where}: {text}" for text in unknown_keys(dict.fromkeys(plain), ("flags", *SIZE_KEYS))]
    flags = plain.get("flags") or ""
    if not isinstance(flags, str):
        problems.append(f"{where}: {flags!r} must be a string of flags")
        flags = ""
    sizes = {key: read_number(plain[key], f"{where}: {key}", problems) for key in SIZE_KEYS if key in plain}
    try:
        words = tuple(shlex.split(flags, comments=True))
    except ValueError as error:
        problems.append(f"{where}: {flags!r}: {error}")
        words = ()
    return Option(name=name, flags=words, sizes=sizes)


def read_number(value: Any, where: str, problems: list[str]) -> float:
    """Read a positive number."""
    try:
        number = numbers.number(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, argparse.ArgumentTypeError):
        number = 0.0
    if not 0 < number < float("inf"):
        problems.append(f"{where}: {value!r} must be a number above 0")
        return 1.0
    return number


ID_DIGITS = 8
# Settings of checkpoints that are part of a run's id, because they decide where training starts.
DECISIVE_SETTINGS = ("checkpoint.pretrained_checkpoint", "checkpoint.finetune")
BUDGETS = ("tokens", "tokens_per_parameter")
# Longer than any schedule: for checking rules before the length is known.
MANY_STEPS = 10**9
# Of Megatron-LM's ByteLevelTokenizer.
BYTE_LEVEL_VOCABULARY = 512


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One run of a study.

    Attributes:
        label: names of its options, joined.
        choice: name of its option by axis.
        flags: all flags of `megafp8 pretrain`.
        world_size: number of GPUs, or of ranks on a CPU.
        folder: for checkpoints and records.
    """

    id: str
    label: str
    choice: Mapping[str, str]
    flags: tuple[str, ...]
    config: RunConfig
    world_size: int
    folder: Path

    @property
    def tokens(self) -> int:
        """Number of training tokens."""
        config = self.config
        assert config.data.seq_length is not None
        return iterations.trained_samples(config, self.world_size) * config.data.seq_length

    @property
    def padded_vocab(self) -> Optional[int]:
        """Vocabulary size after padding; None if only the tokenizer's files have it."""
        known = vocabulary_size(self.config)
        return None if known is None else dimensions.padded_vocab_size(self.config, known)

    @property
    def parameters(self) -> Optional[int]:
        """Number of parameters, embeddings included; None without the vocabulary size."""
        rows = self.padded_vocab
        return None if rows is None else model_shapes.count_parameters(self.config.model, rows).total

    @property
    def flops(self) -> Optional[float]:
        """Model FLOPs of the complete run; None without the vocabulary size."""
        rows, seq_length = self.padded_vocab, self.config.data.seq_length
        if rows is None or seq_length is None:
            return None
        return self.tokens * model_shapes.flops_per_token(self.config.model, rows, seq_length)

    @property
    def recipe(self) -> str:
        """The FP8 or FP4 recipe of the linears, or else the dtype of the parameters."""
        return derived.quantization_recipe(self.config.precision) or derived.params_dtype(self.config.precision)


def expand(study: Study) -> list[StudyRun]:
    """Expand the grids into runs, in the order of the file. The last axis varies fastest. Equal runs are merged.

    Raises:
        ConfigError: flags of a run are wrong, or two options of a grid lead to the same run.
    """
    runs: dict[str, StudyRun] = {}
    problems: dict[str, list[str]] = {}
    for grid in study.grids:
        labels: dict[str, str] = {}
        for options in itertools.product(*grid.values()):
            run, found = build_run(study, grid, options)
            for problem in found:
                problems.setdefault(problem, []).append(run.label)
            if run.id in labels and not found:
                problems.setdefault(f"the same run as {labels[run.id]}", []).append(run.label)
            labels[run.id] = run.label
            runs.setdefault(run.id, run)
    if problems:
        raise ConfigError([f"{labels_text(affected)}: {problem}" for problem, affected in problems.items()])
    return list(runs.values())


def build_run(study: Study, grid: Grid, options: Sequence[Option]) -> tuple[StudyRun, list[str]]:
    """Build a run, and return it with its problems. If there are any, only its label is valid."""
    chosen = (study.common, *options)
    label = "-".join(safe_name(option.name) for option in options) or study.name
    gpus = last_given_size(chosen, ("gpus",)) or ("gpus", 1.0)
    budget = last_given_size(chosen, BUDGETS)
    words = [word for option in chosen for word in option.flags]
    parsed, problems = config_flags.parse_with_problems(words)
    config, world_size = parsed.config, int(gpus[1])
    problems += study_problems(parsed, gpus[1], budget)
    config = with_save_folder(config, study.folder / label)
    if budget is not None and not problems:
        # Check the rules first, for any length, because the number of steps can only be computed from valid settings.
        unit = "samples" if iterations.has_batch_schedule(config.training) else "iters"
        problems += rules.setting_problems(with_values(config, {f"training.train_{unit}": MANY_STEPS}), world_size)
        if not problems:
            steps = budget_steps(config, world_size, *budget)
            length = iterations.batch_schedule(config, world_size).advance(steps) if unit == "samples" else steps
            words += [f"--train-{unit}", str(length)]
            config = with_values(config, {f"training.train_{unit}": length})
    if not problems:
        problems += rules.setting_problems(config, world_size)
    run_id = run_hash(config, world_size)
    folder = run_folder(study.folder, run_id, label)
    run = StudyRun(
        id=run_id, label=label, choice={axis: option.name for axis, option in zip(grid, options, strict=True)},
        flags=(*words, "--save", str(folder), "--load", str(folder)), config=with_save_folder(config, folder),
        world_size=world_size, folder=folder,
    )  # fmt: skip
    return run, problems


def with_save_folder(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration with --save and --load in this folder."""
    return with_values(config, {"checkpoint.save": str(folder), "checkpoint.load": str(folder)})


def last_given_size(options: Sequence[Option], names: Sequence[str]) -> Optional[tuple[str, float]]:
    """Name and value of the last of these sizes that an option gives; None if none does."""
    given = [(name, option.sizes[name]) for option in options for name in names if name in option.sizes]
    return given[-1] if given else None


def study_problems(parsed: ParsedArgs, gpus: float, budget: Optional[tuple[str, float]]) -> list[str]:
    """Problems of settings that are valid in a run, but not in a study."""
    config, problems = parsed.config, []
    if parsed.dry_run or config.checkpoint.save or config.checkpoint.load:
        problems.append("--save, --load and --dry-run: set by the study, with one folder per run; remove them")
    if gpus % 1:
        problems.append(f"gpus: {gpus:g} must be an integer")
    if budget is None:
        return problems
    if config.training.train_iters is not None or config.training.train_samples is not None:
        problems.append(f"--train-iters and --train-samples are derived from {budget[0]}: keep one of them")
    if budget[0] == "tokens_per_parameter" and vocabulary_size(config) is None:
        problems.append(
            "tokens_per_parameter: the vocabulary size is unknown, because the tokenizer is not read here: give "
            "--vocab-size"
        )
    return problems


def budget_steps(config: RunConfig, world_size: int, kind: str, amount: float) -> int:
    """Number of steps for at least `amount` tokens, or tokens per parameter (embeddings included)."""
    if kind == "tokens_per_parameter":
        rows = dimensions.padded_vocab_size(config, vocabulary_size(config) or 0)
        amount *= model_shapes.count_parameters(config.model, rows).total
    assert config.data.seq_length is not None
    return math.ceil(iterations.batch_schedule(config, world_size).steps_until(amount / config.data.seq_length))


def vocabulary_size(config: RunConfig) -> Optional[int]:
    """Vocabulary size before padding; None if only the tokenizer's files have it."""
    is_byte_level = config.model.vocab_size is None and config.data.tokenizer_type == "ByteLevelTokenizer"
    return BYTE_LEVEL_VOCABULARY if is_byte_level else plan.vocabulary_size(config)


def run_hash(config: RunConfig, world_size: int) -> str:
    """The id of a run. Settings at their default do not count, so that settings of later versions do not change it."""
    decisive = {
        setting.name: value_of(config, setting.name)
        for setting in all_settings()
        if value_of(config, setting.name) != setting.default
        and (setting.name in DECISIVE_SETTINGS or not setting.name.startswith(NEUTRAL_SETTINGS))
    }
    canonical = json.dumps([world_size, decisive], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:ID_DIGITS]


def run_folder(study_folder: Path, run_id: str, label: str) -> Path:
    """The existing folder of a run, which ends with its id, or else the folder that it will have."""
    return next(iter(sorted(study_folder.glob(f"*-{run_id}"))), study_folder / f"{label}-{run_id}")


def safe_name(text: str) -> str:
    """A text as part of a file name."""
    return re.sub(r"[^\w.+=-]+", "_", text)


def labels_text(labels: Sequence[str]) -> str:
    """The runs that share a problem, as text."""
    return labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
