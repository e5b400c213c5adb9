"""A training job: the machines that it wants, and what they run.

Parts of the shell scripts that start runs, as a person would write them.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from megafp8.errors import ConfigError
from megafp8.launch.node_check import NODE_CHECK_TIMEOUT_S
from megafp8.utils.files import UnreadableFile
from megafp8.utils.formatting import check_lines, control_problems
from megafp8.utils.strict_yaml import parse_yaml

# Between a run's time to save and the end: srun and the supervisor have to end, too.
SIGNAL_MARGIN_S = 60
SLURM_EARLY_S = 60  # man sbatch, --signal
DEFAULT_RESTARTS = 3
# Of a job's name, which becomes a folder's and a label's.
NAME = re.compile(r"[\w.+-]+")
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
OPTION = re.compile(r"[a-z][a-z0-9-]*")
ENDPOINT = re.compile(r"[\w.-]+:\d+")
INTEGER = re.compile(r"-?[0-9]+")
TIME = re.compile(r"(?:\d+-)?\d+(?::\d+){0,2}")
# Options of sbatch that a job's own fields give, or that restarts rest on.
TAKEN = ("job-name", "nodes", "time", "array", "signal", "requeue", "no-requeue", "gpus-per-node", "partition",
         "account", "output", "ntasks-per-node", "cpus-per-task", "open-mode")  # fmt: skip
PROJECT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is run where. In a job file the fields have these names; words may be given as one line of shell.

    Attributes:
        name: of the job, for people.
        training: flags of `pretrain_gpt.py`, which all runs share; with `--save` and `--load` on one folder.
        nodes: machines.
        gpus_per_node: 0 is a job on CPUs.
        ranks_per_node: one for each GPU unless given; needed without GPUs.
        cpus_per_node: what Slurm is asked for; None asks for none.
        exclusive: whether nodes are this job's alone, with all their memory.
        time: Slurm's time limit: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS. None is the partition's.
        time_to_save_s: seconds that a run needs for a step and a checkpoint. A signal comes so long before the time
            limit, and ranks are not killed earlier after it.
        partition, account: as the cluster calls them.
        sbatch: further options of sbatch by their long names, such as `qos` or `constraint`; an empty value is an
            option without one.
        project: folder of the checkout, the same on all nodes; everything runs in it.
        setup: shell before all else, such as `module load cuda`, as it is.
        venv: a virtual environment to activate.
        container: for the ranks: a `.sif` file is Apptainer's, any other image is Pyxis's. Outside of it the job needs
            a python3 with psutil, that of `venv` if given.
        mounts: folders that the container sees under the same name, besides the project.
        environment: variables for all ranks; they win over those that a job sets by itself.
        max_restarts: starts again in an allocation, in a row, without progress (`restarts`: None is 3).
        max_requeues: how often the job is put back into the queue.
        check_nodes: look at every node before training.
        runs: flags that differ: one run of an array for each; empty is a single run.
        array_limit: runs of the array at a time; None is as many as there is room for.
        logs: folder for what the job itself writes. Default: `logs` in the run's folder; an array needs it.
        endpoint: HOST:PORT of the first machine, for several machines without Slurm.
    """

    name: str
    training: tuple[str, ...]
    nodes: int = 1
    gpus_per_node: int = 8
    ranks_per_node: Optional[int] = None
    cpus_per_node: Optional[int] = None
    exclusive: bool = True
    time: Optional[str] = None
    time_to_save_s: int = 300
    partition: Optional[str] = None
    account: Optional[str] = None
    sbatch: Mapping[str, str] = field(default_factory=dict)
    project: str = PROJECT
    setup: Optional[str] = None
    venv: Optional[str] = None
    container: Optional[str] = None
    mounts: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: Optional[int] = None
    max_requeues: int = 100
    check_nodes: bool = True
    runs: tuple[tuple[str, ...], ...] = ()
    array_limit: Optional[int] = None
    logs: Optional[str] = None
    endpoint: Optional[str] = None

    @property
    def ranks(self) -> int:
        """Ranks on a node."""
        return self.ranks_per_node or self.gpus_per_node or 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks

    @property
    def restarts(self) -> int:
        """How often the supervisor starts a run again."""
        return DEFAULT_RESTARTS if self.max_restarts is None else self.max_restarts

    @property
    def commands(self) -> list[tuple[str, ...]]:
        """The flags of each run."""
        return [(*self.training, *run) for run in self.runs] or [self.training]

    @property
    def run_folder(self) -> Optional[str]:
        """What the shared flags have as --save; None when each run of an array has its own."""
        return value_after("--save", self.training)

    @property
    def log_folder(self) -> str:
        """Where the job's own output goes."""
        return self.logs or f"{self.run_folder or 'runs'}/logs"


def warning_s(job: Job) -> int:
    """Seconds before the end of its time at which a job is told."""
    return job.time_to_save_s + SIGNAL_MARGIN_S


def reserved_s(job: Job) -> int:
    """Seconds of a job's time limit in which it does not train, or may not."""
    return warning_s(job) + SLURM_EARLY_S + (NODE_CHECK_TIMEOUT_S if job.check_nodes else 0)


def seconds_of(time: str) -> int:
    """Slurm's minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS in seconds."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (parts + [0, 0])[:3]
    else:
        hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def value_after(flag: str, words: tuple[str, ...]) -> Optional[str]:
    """The last value of a flag; None when it is not there."""
    value = None
    for word, following in itertools.zip_longest(words, words[1:]):
        if word == flag:
            value = following
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def name_problems(name: str) -> list[str]:
    """What keeps a name from being a job's."""
    return [] if NAME.fullmatch(name) else [f"name: {name!r}: letters, digits and . _ + - only"]


def check_job(job: Job) -> None:
    """Refuse a job that no script can be made of.

    Raises:
        ConfigError: with everything that is wrong.
    """
    problems = [
        f"{name}: {value}: at least {least}"
        for name, least in (("nodes", 1), ("gpus_per_node", 0), ("ranks_per_node", 1), ("cpus_per_node", 1),
                            ("time_to_save_s", 1), ("max_restarts", 0), ("max_requeues", 0), ("array_limit", 1))
        if (value := getattr(job, name)) is not None and value < least
    ]  # fmt: skip
    problems += name_problems(job.name)
    for each in dataclasses.fields(job):
        # `setup` is shell in lines.
        problems += control_problems(each.name, getattr(job, each.name), allowed="\n\t" if each.name == "setup" else "")
    if job.time is not None and not TIME.fullmatch(job.time):
        problems.append(f"time: {job.time!r}: minutes, HH:MM:SS or D-HH:MM:SS")
    elif job.time is not None and seconds_of(job.time) <= reserved_s(job):
        check = (
            f", and the check of the nodes may take {NODE_CHECK_TIMEOUT_S} s before it trains"
            if job.check_nodes
            else ""
        )
        fix = ", or set check_nodes to false (--no-check-nodes)" if job.check_nodes else ""
        problems.append(
            f"time: {job.time} with time_to_save_s {job.time_to_save_s}: the warning comes {warning_s(job)} s before "
            f"the end, and Slurm may send it {SLURM_EARLY_S} s early{check}: nothing is left to train in. Give more "
            f"than {reserved_s(job)} s{fix}"
        )
    problems += [f"environment: {name!r} is no name of a variable" for name in job.environment if not
                 VARIABLE.fullmatch(name)]  # fmt: skip
    problems += [f"sbatch: {name}: a job's fields or the launcher itself give it" for name in job.sbatch
                 if name in TAKEN]  # fmt: skip
    problems += [f"sbatch: {name!r} is no long name of an option" for name in job.sbatch if not
                 OPTION.fullmatch(name)]  # fmt: skip
    if job.gpus_per_node and job.ranks_per_node not in (None, job.gpus_per_node):
        problems.append(f"ranks_per_node: {job.ranks_per_node}, gpus_per_node: {job.gpus_per_node}: a rank has one GPU")
    if job.endpoint is not None and not ENDPOINT.fullmatch(job.endpoint):
        problems.append(f"endpoint: {job.endpoint!r}: HOST:PORT")
    if job.array_limit and not job.runs:
        problems.append(f"array_limit: {job.array_limit}: there are no `runs`")
    if job.mounts and not job.container:
        problems.append("mounts: there is no container")
    for words in job.commands:
        save, load = value_after("--save", words), value_after("--load", words)
        if save is None or save != load:
            problems.append(
                f"--save {save} and --load {load}: a job that comes again goes on where it stopped if both name one "
                "folder"
            )
    saves = [value_after("--save", words) for words in job.commands]
    problems += [f"--save {save}: {saves.count(save)} runs have it" for save in sorted({*saves} - {None})
                 if saves.count(save) > 1]  # fmt: skip
    if job.runs and not job.logs:
        problems.append("logs: an array needs a folder for its output")
    if problems:
        raise ConfigError(problems)


def read_job(text: str, given: Mapping[str, Any], training: Sequence[str] = ()) -> Job:
    """A job file's text (YAML), and what is given besides it, which wins; flags of training are added.

    Every value is taken as it is written: to YAML's usual readers `24:00:00` is 86400, and `on` is true.

    Raises:
        ConfigError: it is no YAML, has fields that a job does not have or values of another type, or lacks some.
    """
    try:
        plain = parse_yaml(text, as_written=True) or {}
    except UnreadableFile as error:
        raise ConfigError(f"the job file cannot be read: {error.reason}") from None
    if not isinstance(plain, dict):
        raise ConfigError("the job file is no table of fields")
    merged = plain | dict(given)
    for name in plain.keys() & given.keys():
        if isinstance(plain[name], dict) and isinstance(given[name], dict):
            merged[name] = plain[name] | given[name]
    return build_job(merged, training)


def build_job(plain: Mapping[str, Any], training: Sequence[str] = ()) -> Job:
    """A job of texts, lists and tables, as they stand in a job file, and further flags of training.

    Raises:
        ConfigError: fields that a job does not have, values of another type, or fields that are missing.
    """
    fields = {field.name: str(field.type) for field in dataclasses.fields(Job)}
    problems = [f"{name}: no such field; there are {', '.join(fields)}" for name in plain if name not in fields]
    if "name" not in plain:
        problems.append("name: is not given")
    values: dict[str, Any] = {"training": ()}
    for name in plain.keys() & fields.keys():
        try:
            values[name] = converted(fields[name], plain[name])
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ConfigError(problems)
    job = Job(**values | {"training": (*values["training"], *training)})
    check_job(job)
    return job


def converted(kind: str, value: Any) -> Any:
    """A value of a job file as a field of this annotation has it.

    Raises:
        ValueError: with what was expected.
    """
    if kind == "tuple[str, ...]":
        return words_of(value)
    if kind.startswith("tuple[tuple"):
        return tuple(words_of(run) for run in (value if isinstance(value, list) else value.splitlines()))
    if kind.startswith("Mapping"):
        if not isinstance(value, Mapping):
            raise ValueError(f"{value!r}: a table of names and values is expected")
        return {key: str(item) for key, item in value.items()}
    if not isinstance(value, str):
        raise ValueError(f"{value!r}: a text is expected")
    if kind == "bool":
        if value not in ("true", "false"):
            raise ValueError(f"{value!r}: true or false is expected")
        return value == "true"
    if kind in ("int", "Optional[int]"):
        if not INTEGER.fullmatch(value):  # int() would take line breaks around it
            raise ValueError(f"{value!r}: a whole number is expected")
        return int(value)
    return value


def words_of(value: Any) -> tuple[str, ...]:
    """Words that are given as a list, or as lines of shell.

    Raises:
        ValueError: a quotation does not end, or an item is no text.
    """
    if isinstance(value, str):
        return tuple(shlex.split(value, comments=True))
    if not all(isinstance(word, str) for word in value):
        raise ValueError(f"{value!r}: words are expected")
    return tuple(value)


WIDTH = 116
COMMENTS = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "  # seconds from a signal until ranks are killed"}


def script_of(parts: Sequence[Sequence[str]]) -> str:
    """The text of a script, with an empty line between its parts.

    Raises:
        ConfigError: what was meant to be one line is several.
    """
    for part in parts:
        check_lines(part)
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def environment_lines(job: Job) -> list[str]:
    """Folder, modules, Python and the variables of all ranks."""
    lines = [f"cd {shlex.quote(job.project)}"]
    if job.setup:
        lines += job.setup.rstrip().split("\n")
    if job.venv:
        lines.append(f". {shlex.quote(job.venv)}/bin/activate")
    lines += [
        "# Said once, for all ranks. What the shell before had set for Transformer Engine does not count.",
        'unset "${!NVTE_@}"',
        *(f"export {name}={shlex.quote(value)}{COMMENTS.get(name, '')}" for name, value in environment(job).items()),
    ]
    return lines


def environment(job: Job) -> dict[str, str]:
    """Variables for all ranks: those of every job, then the job's own. Others, `pretrain_gpt.py` sets as it needs them.

    So many seconds after a signal torchrun kills its ranks; they read the same variable and give up saving before.
    """
    every = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.time_to_save_s)}
    if job.gpus_per_node:
        every["NCCL_DEBUG"] = "WARN"
    return every | dict(job.environment)


def training_lines(job: Job) -> list[str]:
    """The flags as an array `training`; in a job array those of the task are added."""
    lines = array("training", filled(job.training))
    if job.runs:
        lines += ["# The runs of the array.", "case $SLURM_ARRAY_TASK_ID in"]
        lines += [f"  {task}) training+=({' '.join(map(quoted, run))}) ;;" for task, run in enumerate(job.runs)]
        lines.append("esac")
    return lines


def filled(words: Sequence[str]) -> list[str]:
    """Words of a command in lines; a flag and its first value are not parted."""
    pairs: list[str] = []
    for word in map(quoted, words):
        if pairs and not word.startswith("--") and pairs[-1].startswith("--") and " " not in pairs[-1]:
            pairs[-1] += f" {word}"
        else:
            pairs.append(word)
    lines: list[str] = []
    for pair in pairs:
        if lines and len(lines[-1]) + len(pair) < WIDTH:
            lines[-1] += f" {pair}"
        else:
            lines.append(pair)
    return lines


def quoted(word: str) -> str:
    """A word of an array; commas look like a mistake there unless they are quoted."""
    plain = shlex.quote(word)
    return f"'{word}'" if plain == word and "," in word else plain


def array(name: str, lines: Sequence[str]) -> list[str]:
    """An array of the words in these lines."""
    return [f"{name}=(", *(f"  {line}" for line in lines), ")"]
