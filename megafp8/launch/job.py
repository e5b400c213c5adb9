"""A job of training or preprocessing: its fields, reading and checking a job file."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from megafp8.errors import ConfigError
from megafp8.launch.node_check import NODE_CHECK_TIMEOUT_S
from megafp8.utils.files import UnreadableFile
from megafp8.utils.formatting import control_problems
from megafp8.utils.object_store import local_path
from megafp8.utils.strict_yaml import key_lines, parse_yaml
from megafp8.utils.suggestions import unknown_keys

# Time that srun and the supervisor need to end after the run has saved.
SIGNAL_MARGIN_S = 60
SLURM_EARLY_S = 60  # man sbatch, --signal
DEFAULT_RESTARTS = 3
# Job names are also used as folder names and labels.
JOB_NAME = re.compile(r"[\w.+-]+")
VARIABLE_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
SBATCH_OPTION = re.compile(r"[a-z][a-z0-9-]*")
ENDPOINT = re.compile(r"[\w.-]+:[0-9]+")
INTEGER = re.compile(r"-?[0-9]+")
TIME_LIMIT = re.compile(r"(?:[0-9]{1,9}-)?[0-9]{1,9}(?::[0-9]{1,9}){0,2}")
# Options of sbatch that a job's own fields set, or that restarts depend on.
RESERVED_OPTIONS = (
    "job-name", "nodes", "time", "array", "signal", "requeue", "no-requeue", "gpus-per-node", "partition", "account",
    "output", "ntasks-per-node", "cpus-per-task", "open-mode",
)  # fmt: skip
_ROOT = Path(__file__).resolve().parents[2]
_IS_CHECKOUT = (_ROOT / "launcher").is_dir()  # else an installed package, which has modules instead of scripts
PROJECT = str(_ROOT) if _IS_CHECKOUT else os.getcwd()
PRETRAIN_MODULE, SUPERVISE_MODULE = "-m megafp8.cli.pretrain", "-m megafp8.cli.main supervise"
PRETRAIN = "pretrain_gpt.py" if _IS_CHECKOUT else PRETRAIN_MODULE
SUPERVISE = "launcher/supervise.py" if _IS_CHECKOUT else SUPERVISE_MODULE
PREPROCESS = "-m megafp8.cli.main preprocess"
CHECK_NODES = "launcher/check_nodes.py" if _IS_CHECKOUT else "-m megafp8.cli.main check-nodes"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of training, or of preprocessing. A job file has the same field names; flags may be given as a list or as
    lines of shell.

    Attributes:
        training: flags of `megafp8 pretrain` that all runs share. `--save` and `--load` must name the same folder.
        nodes: number of machines.
        gpus_per_node: 0 for a job on CPUs.
        ranks_per_node: required without GPUs; default: one rank per GPU.
        cpus_per_node: CPUs to request from Slurm; None: no request.
        exclusive: whether the job has exclusive use of its nodes and all their memory.
        time: Slurm's time limit: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS. None: the partition's.
        time_to_save_s: time that a run needs for a step and a checkpoint. The warning signal comes this long before the
            time limit, and ranks are not killed earlier after it.
        partition, account: as the cluster names them.
        sbatch: further options of sbatch by their long names, such as `qos` or `constraint`; an empty value is an
            option without a value.
        project: folder of the checkout, the same on all nodes, and the working directory of the job.
        setup: shell code to run first, such as `module load cuda`.
        venv: a virtual environment to activate.
        container: image for the ranks: Apptainer for a `.sif` file, Pyxis for others. Outside of it the job needs a
            python3 with psutil, which may be that of `venv`.
        mounts: folders to mount in the container under the same path, in addition to the project.
        environment: variables for all ranks; they override those that a job sets itself.
        max_restarts: limit on restarts in a row without progress, within an allocation; None: `DEFAULT_RESTARTS`.
        max_requeues: limit on how often the job is requeued.
        check_nodes: check every node before training.
        runs: additional flags for each run of a job array; empty: a single run.
        preprocess: flags of `megafp8 preprocess`, for a job that makes shards on CPUs in place of training.
        parts: number of parts of such a job. Each is a task of an array, on one node; a second job merges them.
        array_limit: runs or parts of the array at a time; None: no limit.
        logs: folder for the job's own output. Default: `logs` in the run's folder; required for an array.
        endpoint: HOST:PORT of the first machine, for several machines without Slurm.
        image: image of the pods on Kubernetes, which has the package.
        claim: name of a PersistentVolumeClaim, mounted at `project`. None: the run saves to object storage.
        namespace: of the objects on Kubernetes; None: that of kubectl's context.
        gpu_resource: Kubernetes' name of a GPU.
        rdma: RDMA devices of a pod: names of Kubernetes' resources, and their numbers.
        node_selector: labels that a node of Kubernetes must have.
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
    preprocess: tuple[str, ...] = ()
    parts: Optional[int] = None
    array_limit: Optional[int] = None
    logs: Optional[str] = None
    endpoint: Optional[str] = None
    image: Optional[str] = None
    claim: Optional[str] = None
    namespace: Optional[str] = None
    gpu_resource: str = "nvidia.com/gpu"
    rdma: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Ranks per node."""
        return self.ranks_per_node or self.gpus_per_node or 1

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.nodes * self.ranks

    @property
    def restarts(self) -> int:
        """Limit on restarts without progress."""
        return DEFAULT_RESTARTS if self.max_restarts is None else self.max_restarts

    @property
    def commands(self) -> list[tuple[str, ...]]:
        """The flags of each run."""
        return [(*self.training, *run) for run in self.runs] or [self.training]

    @property
    def run_folder(self) -> Optional[str]:
        """--save in the shared flags; None if each run of an array has its own."""
        folder = flag_value("--save", self.training)
        return None if folder is None else str(local_path(folder))

    @property
    def log_folder(self) -> str:
        """Folder for the job's own output."""
        return self.logs or f"{self.run_folder or 'runs'}/logs"


KUBERNETES_FIELDS = ("image", "claim", "namespace", "gpu_resource", "rdma", "node_selector")
FIELDS = {each.name: str(each.type) for each in dataclasses.fields(Job)}
"""The annotation of each field of a job file."""


def unused_fields(job: Job, names: Sequence[str]) -> tuple[str, ...]:
    """Those of the fields `names`, which a launcher does not use, that the job sets."""
    default = Job(name=job.name, training=())
    return tuple(name for name in names if getattr(job, name) != getattr(default, name))


def signal_lead_s(job: Job) -> int:
    """Time before its time limit at which a job gets a signal."""
    return job.time_to_save_s + SIGNAL_MARGIN_S


def reserved_time_s(job: Job) -> int:
    """Part of a job's time limit in which it may not train."""
    return signal_lead_s(job) + SLURM_EARLY_S + (NODE_CHECK_TIMEOUT_S if job.check_nodes else 0)


def time_limit_s(time: str) -> int:
    """Slurm's minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS in seconds."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    without_days = {1: [0, *parts, 0], 2: [0, *parts]}.get(len(parts), parts)
    hours, minutes, seconds = (parts + [0, 0])[:3] if dash else without_days
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def flag_value(flag: str, words: tuple[str, ...]) -> Optional[str]:
    """The last value of a flag; None if it is not given."""
    value = None
    for word, following in itertools.zip_longest(words, words[1:]):
        if word == flag:
            value = following
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def save_and_load(save: Optional[str], load: Optional[str]) -> str:
    """Both folders of a run as flags: `--save runs/a and no --load`."""
    flags = {"--save": save, "--load": load}
    return " and ".join(f"no {flag}" if folder is None else f"{flag} {folder}" for flag, folder in flags.items())


def name_problems(name: str) -> list[str]:
    """Problems of a job name."""
    return [] if JOB_NAME.fullmatch(name) else [f"name: {name!r}: letters, digits and . _ + - only"]


def check_job(job: Job, needs_save: bool = True) -> None:
    """Check that the fields of a job are valid and consistent.

    Args:
        needs_save: refuse a run without --save, which cannot resume.

    Raises:
        ConfigError: with all problems.
    """
    problems = [
        f"{name}: {value}: at least {least}"
        for name, least in (("nodes", 1), ("gpus_per_node", 0), ("ranks_per_node", 1), ("cpus_per_node", 1),
                            ("time_to_save_s", 1), ("max_restarts", 0), ("max_requeues", 0), ("array_limit", 1),
                            ("parts", 1))
        if (value := getattr(job, name)) is not None and value < least
    ]  # fmt: skip
    problems += name_problems(job.name)
    for each in dataclasses.fields(job):
        # `setup` is shell code with several lines.
        problems += control_problems(each.name, getattr(job, each.name), allowed="\n\t" if each.name == "setup" else "")
    if job.time is not None and not TIME_LIMIT.fullmatch(job.time):
        problems.append(f"time: {job.time!r}: minutes, HH:MM:SS or D-HH:MM:SS")
    elif job.time is not None and not job.preprocess and time_limit_s(job.time) <= reserved_time_s(job):
        check = fix = ""
        if job.check_nodes:
            check = f", and the node check may take {NODE_CHECK_TIMEOUT_S} s before training starts"
            fix = ", or set check_nodes to false (--no-check-nodes)"
        problems.append(
            f"time: {job.time} with time_to_save_s {job.time_to_save_s}: the signal is sent {signal_lead_s(job)} s "
            f"before the end, and Slurm may send it {SLURM_EARLY_S} s early{check}, so no time is left for training. "
            f"Use more than {reserved_time_s(job)} s{fix}"
        )
    problems += [f"environment: {name!r} is not a valid variable name" for name in job.environment if not
                 VARIABLE_NAME.fullmatch(name)]  # fmt: skip
    problems += [f"sbatch: {name}: set by the launcher or by a field of the job; remove it" for name in job.sbatch
                 if name in RESERVED_OPTIONS]  # fmt: skip
    problems += [f"sbatch: {name!r} is not the long name of an option" for name in job.sbatch if not
                 SBATCH_OPTION.fullmatch(name)]  # fmt: skip
    if job.gpus_per_node and job.ranks_per_node not in (None, job.gpus_per_node):
        problems.append(f"ranks_per_node: {job.ranks_per_node}, gpus_per_node: {job.gpus_per_node}: must be equal")
    if job.endpoint is not None and not ENDPOINT.fullmatch(job.endpoint):
        problems.append(f"endpoint: {job.endpoint!r}: must be HOST:PORT")
    if job.array_limit and not job.runs and not job.preprocess:
        problems.append(f"array_limit: {job.array_limit}: has no effect without `runs` or `preprocess`")
    if job.mounts and not job.container:
        problems.append("mounts: have no effect without a container")
    problems += _preprocess_problems(job) if job.preprocess else _training_problems(job, needs_save)
    if (job.runs or job.preprocess) and not job.logs:
        problems.append("logs: missing; a job array needs a folder for its output")
    if problems:
        raise ConfigError(problems)


def _training_problems(job: Job, needs_save: bool) -> list[str]:
    """Problems of the folders of runs, and fields that have no effect on them."""
    problems = []
    if job.parts is not None:
        problems.append(f"parts: {job.parts}: has no effect without `preprocess`")
    saves = [flag_value("--save", words) for words in job.commands]
    for save, words in zip(saves, job.commands, strict=True):
        load = flag_value("--load", words)
        if save is None and not needs_save:
            continue
        if save is None or save != load:
            problems.append(f"{save_and_load(save, load)}: must be the same folder, so that a requeued job resumes")
    counts = Counter(save for save in saves if save is not None)
    problems += [f"--save {save}: used by {count} runs; each run needs its own folder"
                 for save, count in sorted(counts.items()) if count > 1]  # fmt: skip
    return problems


def _preprocess_problems(job: Job) -> list[str]:
    """Fields that have no effect on a job of preprocessing, and those that it needs."""
    problems = [
        f"{name}: {' '.join(map(str, value)) if isinstance(value, tuple) else value}: {reason}"
        for name, value, is_wrong, reason in (
            ("training", job.training, job.training, "a job either trains or preprocesses"),
            ("runs", job.runs, job.runs, "belong to training; preprocessing is divided by `parts`"),
            ("gpus_per_node", job.gpus_per_node, job.gpus_per_node, "preprocessing runs on CPUs; set 0"),
            ("nodes", job.nodes, job.nodes != 1, "each part runs on one node; set `parts`"),
        )
        if is_wrong
    ]
    if job.parts is None:
        problems.append("parts: missing; the number of parts of the input, each a task of the array")
    problems += [f"preprocess: {flag}: set by the launcher; remove it" for flag in
                 ("--part", "--merge-parts", "--show-parts") if flag in job.preprocess]  # fmt: skip
    return problems


def read_job(
    text: str,
    given: Mapping[str, Any],
    training: Sequence[str] = (),
    default: Optional[Mapping[str, str]] = None,
    path: object = "the job file",
) -> Job:
    """Read a job from the text of a job file (YAML) and from flags. `check_job` checks it.

    All values are read as text: YAML's usual readers make 86400 of `24:00:00`, and true of `on`.

    Args:
        given: fields that override the file's; mappings are merged.
        training: flags of training to append.
        default: fields that the file overrides.
        path: of the file, for messages.

    Raises:
        ConfigError: the text is no YAML, or its fields are unknown, of another type or missing.
    """
    try:
        plain = parse_yaml(text, as_written=True) or {}
    except UnreadableFile as error:
        raise ConfigError(error.located(path)) from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: must be a mapping of fields, such as nodes: 8")
    lines = {keys[0]: line for keys, line in key_lines(text).items() if len(keys) == 1}
    if unknown := unknown_keys(lines, FIELDS, path):
        raise ConfigError(unknown)
    merged = {**(default or {}), **plain, **given}
    for name in plain.keys() & given.keys():
        if isinstance(plain[name], dict) and isinstance(given[name], dict):
            merged[name] = plain[name] | given[name]
    return build_job(merged, training)


def build_job(plain: Mapping[str, Any], training: Sequence[str] = ()) -> Job:
    """Build a job from the fields of a job file, and flags to append. `check_job` checks it.

    Raises:
        ConfigError: fields are unknown, of another type or missing.
    """
    problems = unknown_keys(dict.fromkeys(plain), FIELDS)
    if "name" not in plain:
        problems.append("name: missing")
    values: dict[str, Any] = {"training": ()}
    for name in plain.keys() & FIELDS.keys():
        try:
            values[name] = parse_field(FIELDS[name], plain[name])
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ConfigError(problems)
    flags = "preprocess" if values.get("preprocess") else "training"
    return Job(**values | {flags: (*values[flags], *training)})


def parse_field(kind: str, value: Any) -> Any:
    """Convert a value of a job file to the type of a field, given its annotation.

    Raises:
        ValueError: with the expected type.
    """
    if kind == "tuple[str, ...]":
        return split_words(value)
    if kind.startswith("tuple[tuple"):
        return tuple(split_words(run) for run in (value if isinstance(value, list) else value.splitlines()))
    if kind.startswith("Mapping"):
        if not isinstance(value, Mapping):
            raise ValueError(f"{value!r}: must be a mapping of names to values")
        return {key: str(item) for key, item in value.items()}
    if not isinstance(value, str):
        raise ValueError(f"{value!r}: must be a string")
    if kind == "bool":
        if value not in ("true", "false"):
            raise ValueError(f"{value!r}: must be true or false")
        return value == "true"
    if kind in ("int", "Optional[int]"):
        if not INTEGER.fullmatch(value):  # int() would accept line breaks around it
            raise ValueError(f"{value!r}: must be an integer")
        return int(value)
    return value


def split_words(value: Any) -> tuple[str, ...]:
    """Words from a list, or from lines of shell.

    Raises:
        ValueError: a quotation is not closed, or an item is not a text.
    """
    if isinstance(value, str):
        return tuple(shlex.split(value, comments=True))
    if not all(isinstance(word, str) for word in value):
        raise ValueError(f"{value!r}: must be a list of words")
    return tuple(value)
