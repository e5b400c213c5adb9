"""The command line of the subcommands that start a job: a job file, options that override it, and training flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from megafp8.cli.command_flags import add_flags, argument, switch
from megafp8.cli.common import build_command_parser
from megafp8.config import flags, rules
from megafp8.errors import ConfigError
from megafp8.launch.job import Job, read_job, unused_fields
from megafp8.utils import strict_yaml
from megafp8.utils.files import UnreadableFile, path_text, read_text

TEXTS = (
    ("--name", "NAME", "name of the job"),
    ("--nodes", "N", "number of machines (default: 1)"),
    ("--gpus-per-node", "N", "GPUs per machine, one rank each (default: 8, for megafp8 torchrun all; 0: CPUs)"),
    ("--ranks-per-node", "N", "ranks per machine without GPUs"),
    ("--cpus-per-node", "N", "cores to request, for shared nodes"),
    ("--time", "LIMIT", "time limit in Slurm's format: HH:MM:SS or D-HH:MM:SS"),
    ("--time-to-save-s", "S", "seconds before the time limit at which the run is signaled to save; enough for a step "
     "and a checkpoint (default: 300)"),
    ("--partition", "NAME", "Slurm partition"),
    ("--account", "NAME", "Slurm account"),
    ("--project", "DIR", "folder of the checkout, the same on all nodes (default: this one)"),
    ("--setup", "SHELL", "shell commands to run first, such as 'module load cuda'"),
    ("--venv", "DIR", "virtual environment to activate"),
    ("--container", "IMAGE", "container image of the ranks: .sif files run with Apptainer, others with Pyxis"),
    ("--max-restarts", "N", "maximum number of consecutive restarts without progress in an allocation (default: 3; "
     "no restarts on several machines without Slurm)"),
    ("--max-requeues", "N", "maximum number of requeues (default: 100)"),
    ("--parts", "N", "for preprocessing: parts of the input, each a task of a job array"),
    ("--array-limit", "N", "for job arrays: runs or parts at the same time"),
    ("--logs", "DIR", "folder for output of the job and its ranks (default: logs/ in --save)"),
    ("--image", "IMAGE", "Kubernetes: image of the pods, which has the package"),
    ("--claim", "NAME", "Kubernetes: PersistentVolumeClaim to mount at --project, unless --save is a URL"),
    ("--namespace", "NAME", "Kubernetes: namespace (default: that of kubectl)"),
    ("--gpu-resource", "NAME", "Kubernetes: resource name of a GPU (default: nvidia.com/gpu)"),
    ("--endpoint", "HOST:PORT", "address of the first machine, for several machines without Slurm (megafp8 torchrun)"),
)  # fmt: skip
TABLES = (
    ("--environment", "NAME=VALUE", "environment variables of all ranks"),
    ("--sbatch", "OPTION=VALUE", "other options of sbatch, such as qos=high or constraint=h200"),
    ("--rdma", "RESOURCE=N", "Kubernetes: RDMA devices of a pod, such as rdma/ib=8"),
    ("--node-selector", "LABEL=VALUE", "Kubernetes: labels that the nodes must have"),
)
DRY_RUN = switch("--dry-run", "print the script and start nothing")


def build_job_parser(description: Optional[str]) -> argparse.ArgumentParser:
    """Build the parser of a subcommand with this docstring."""
    parser = build_command_parser(
        description, argument_default=argparse.SUPPRESS, usage="%(prog)s [JOB.yaml] [options] [-- TRAINING FLAGS]"
    )
    parser.add_argument(
        "job_file", nargs="?", type=path_text, metavar="JOB.yaml", help="YAML file with the same options, with _ for -"
    )
    for flag, metavar, text in TEXTS:
        parser.add_argument(flag, type=path_text if metavar == "DIR" else str, metavar=metavar, help=text)
    for flag, metavar, text in TABLES:
        parser.add_argument(flag, metavar=metavar, nargs="+", action="extend", help=text)
    return add_flags(
        parser,
        argument("--mounts", "folders to mount in the container, besides --project", type=path_text, metavar="DIR",
                 nargs="+"),
        argument("--shared-nodes", "share nodes with other jobs", dest="exclusive", action="store_const",
                 const="false"),
        argument("--no-check-nodes", "do not check the nodes before training", dest="check_nodes", action="store_const",
                 const="false"),
    )  # fmt: skip


def read_arguments(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    default: Optional[Mapping[str, str]] = None,
) -> tuple[argparse.Namespace, Job]:
    """Parse the options, and build the job from them and the job file. `check_job` and `check_training` check it.

    Args:
        default: fields that neither of them has to give.

    Raises:
        ConfigError: with what cannot be read.
    """
    own, training = list(argv), list[str]()
    if "--" in own:
        separator = own.index("--")
        own, training = own[:separator], own[separator + 1 :]
    arguments = parser.parse_args(own)
    given: dict[str, Any] = {
        name: value for name, value in vars(arguments).items() if name not in ("job_file", "output", "dry_run", "kind")
    }
    tables = {flag: flag.removeprefix("--").replace("-", "_") for flag, _, _ in TABLES}
    wrong = [f"{flag} {pair}: {form}" for flag, form, _ in TABLES if flag != "--sbatch"  # has options without a value
             for pair in given.get(tables[flag], ()) if "=" not in pair]  # fmt: skip
    if wrong:
        raise ConfigError(wrong)
    for name in tables.values():
        if name in given:
            given[name] = dict(pair.partition("=")[::2] for pair in given[name])
    text, path = "", getattr(arguments, "job_file", "")
    if path:
        try:
            text = read_text(path, strict_yaml.MAX_BYTES)
        except UnreadableFile as error:
            raise ConfigError(f"{path}: cannot be read: {error.reason}") from None
    return arguments, read_job(text, given, training, default, path)


def warn_of_unused(job: Job, names: Sequence[str], where: str) -> None:
    """Print a notice of the fields `names` that the job sets, and that have no effect `where` it runs."""
    if unused := unused_fields(job, names):
        print(f"notice: not used {where}: {', '.join(unused)}", file=sys.stderr, flush=True)


def check_training(job: Job) -> None:
    """Check the flags of training or preprocessing before the job is queued.

    Raises:
        ConfigError: with all problems. Files are not checked: they may be on the nodes only.
    """
    if job.preprocess:
        from megafp8.cli import preprocess

        preprocess.read_job(preprocess.build_parser().parse_args(job.preprocess))
        return
    problems: list[str] = []
    for words in job.commands:
        parsed, wrong = flags.parse_with_problems(words)
        wrong += flags.drop_follow_ups(parsed, rules.setting_problems(parsed.config, job.world_size), wrong)
        if "--dry-run" in words:
            wrong = [*wrong, "--dry-run among the flags of training: the job would not train; give it before --"]
        problems += [text for text in wrong if text not in problems]
    if problems:
        raise ConfigError(problems)
