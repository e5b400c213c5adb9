"""The file of a study: what is common to its runs, and the grids in which they differ.

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
    slurm: {time: 4:00:00, partition: gpu}  # of the jobs, as in a job file of launcher/slurm.py

`grid` may be a list of such grids. A run is one option of every axis of a grid; where options say the same thing, the
axis further down wins.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from megafp8.errors import ConfigError
from megafp8.launch.control_characters import control_problems
from megafp8.launch.job import name_problems
from megafp8.utils.paths import path_fault, shown
from megafp8.utils.small_files import UnreadableFile
from megafp8.utils.strict_yaml import read_yaml

SIZES = ("tokens", "tokens_per_parameter", "gpus")
"""Numbers of a run that no flag of its own gives."""
KEYS = ("name", "folder", "flags", "grid", "slurm", *SIZES)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One choice on an axis, or what is common to all runs.

    Attributes:
        flags: training flags, one word each.
        sizes: some of `SIZES`.
    """

    name: str = ""
    flags: tuple[str, ...] = ()
    sizes: Mapping[str, float] = field(default_factory=dict)


Grid = Mapping[str, tuple[Option, ...]]


@dataclass(frozen=True, kw_only=True)
class Study:
    """What a file asks for.

    Attributes:
        path: of the file.
        folder: of the study; runs have theirs in it.
        slurm: fields of the jobs (`launch/job.py`), texts as the file has them.
    """

    path: Path
    name: str
    folder: Path
    common: Option
    grids: tuple[Grid, ...]
    slurm: Mapping[str, Any] = field(default_factory=dict)


def read_study(path: Path, folder: Optional[Path] = None) -> Study:
    """Read a study's file.

    Args:
        folder: takes the place of the file's.

    Raises:
        ConfigError: the file cannot be read, or is no study; all problems of it.
    """
    try:
        # Every value as it is written: to YAML's usual reader 24:00:00 is 86400, and 1e-3 a text beside the number 0.1.
        plain = read_yaml(path, as_written=True)
    except UnreadableFile as error:
        raise ConfigError(f"{path}: cannot be read: {error.reason}") from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: not a mapping with the keys {', '.join(KEYS)}")
    problems = [f"unknown key {key!r}; there are {', '.join(KEYS)}" for key in plain if key not in KEYS]
    common = read_option("", {key: plain[key] for key in ("flags", *SIZES) if key in plain}, "of all runs", problems)
    plain_grids = plain.get("grid", {})
    plain_grids = plain_grids if isinstance(plain_grids, list) else [plain_grids]
    grids = tuple(read_grid(grid, problems) for grid in plain_grids)
    slurm = plain.get("slurm") or {}
    if not isinstance(slurm, dict):
        problems.append(f"slurm: {slurm!r} is not a mapping of settings")
    name = str(plain.get("name") or path.stem)
    problems += name_problems(name)  # of folders, and of jobs where there is Slurm
    folder = folder or Path(str(plain.get("folder") or f"runs/{name}"))
    problems += control_problems("folder", folder)
    problems += control_problems("flags", common.flags)
    for grid in grids:
        for axis, options in grid.items():
            problems += control_problems("grid", axis)
            for option in options:
                problems += control_problems(f"grid: {axis}", (option.name, *option.flags))
    if fault := path_fault(str(folder)):
        problems.append(f"folder: {shown(str(folder))} {fault}")
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return Study(path=path, name=name, folder=folder, common=common, grids=grids, slurm=slurm)


def read_grid(plain: Any, problems: list[str]) -> Grid:
    """One grid; what is wrong with it is appended."""
    if not isinstance(plain, dict) or not plain:
        problems.append(f"grid: {plain!r} is not a mapping of axes, such as seed: [1, 2, 3]")
        return {}
    return {str(axis): read_axis(str(axis), options, problems) for axis, options in plain.items()}


def read_axis(axis: str, plain: Any, problems: list[str]) -> tuple[Option, ...]:
    """Options of an axis: of a list, values for the flag that it is named after, of a mapping named ones."""
    if isinstance(plain, dict) and plain:
        return tuple(read_option(str(name), option, f"{axis}: {name}", problems) for name, option in plain.items())
    if isinstance(plain, list) and plain:
        return tuple(read_value(axis, value, problems) for value in plain)
    problems.append(f"grid: {axis}: {plain!r} is neither a list of values nor a mapping of names to flags")
    return ()


def read_value(axis: str, value: Any, problems: list[str]) -> Option:
    """A value of an axis that is a list."""
    if not isinstance(value, str):
        problems.append(f"grid: {axis}: {value!r} is no value of a flag; options that are more are named ones")
        return Option()
    if axis in SIZES:
        return read_option(f"{axis}{value}", {axis: value}, f"grid: {axis}", problems)
    return Option(name=f"{axis}{value}", flags=(f"--{axis.replace('_', '-')}", value))


def read_option(name: str, plain: Any, where: str, problems: list[str]) -> Option:
    """An option: its flags as a text, or a mapping of flags and sizes."""
    plain = plain if isinstance(plain, dict) else {"flags": plain}
    problems += [
        f"{where}: unknown key {key!r}; there are flags, {', '.join(SIZES)}"
        for key in plain if key not in ("flags", *SIZES)
    ]  # fmt: skip
    flags = plain.get("flags") or ""
    if not isinstance(flags, str):
        problems.append(f"{where}: {flags!r} is not a text of flags")
        flags = ""
    sizes = {key: read_number(plain[key], f"{where}: {key}", problems) for key in SIZES if key in plain}
    try:
        words = tuple(shlex.split(flags, comments=True))
    except ValueError as error:
        problems.append(f"{where}: {flags!r}: {error}")
        words = ()
    return Option(name=name, flags=words, sizes=sizes)


def read_number(value: Any, where: str, problems: list[str]) -> float:
    """A number above 0."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        problems.append(f"{where}: {value!r} is not a number above 0")
        return 1.0
    return number
