"""The command line of the subcommands that start a job: a job file, options that override it, and training flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from megafp8.cli.common import build_command_parser
from megafp8.config import flags, rules
from megafp8.errors import ConfigError
from megafp8.launch.job import Job, read_job
from megafp8.utils import strict_yaml
from megafp8.utils.files import UnreadableFile, path_text, read_text

TEXTS = (
    ("--name", "NAME", "of the job"),
    ("--nodes", "N", "machines (default 1)"),
    ("--gpus-per-node", "N", "GPUs of each, one rank a GPU (default 8, under torchrun those of this machine; 0: CPUs)"),
    ("--ranks-per-node", "N", "ranks of each machine without GPUs"),
    ("--cpus-per-node", "N", "cores to ask for, where nodes are shared"),
    ("--time", "LIMIT", "time limit, as Slurm writes it: HH:MM:SS or D-HH:MM:SS"),
    ("--time-to-save-s", "S", "for a step and a checkpoint: the run hears so long before that its time is over "
     "(default 300)"),
    ("--partition", "NAME", "of the cluster"),
    ("--account", "NAME", "that pays"),
    ("--project", "DIR", "the checkout, the same on all nodes (default: this one)"),
    ("--setup", "SHELL", "said before all else, such as 'module load cuda'"),
    ("--venv", "DIR", "virtual environment to activate"),
    ("--container", "IMAGE", "for the ranks: a .sif file is Apptainer's, another image Pyxis's"),
    ("--max-restarts", "N", "in an allocation, in a row, without progress (default 3; none on several machines "
     "without Slurm, which have no supervisor)"),
    ("--max-requeues", "N", "how often the job comes out of the queue again (default 100)"),
    ("--array-limit", "N", "of an array, runs at a time"),
    ("--logs", "DIR", "for output of the job and its ranks (default: logs/ in --save)"),
    ("--endpoint", "HOST:PORT", "of the first machine, for several without Slurm (megafp8 torchrun)"),
)  # fmt: skip
TABLES = (
    ("--environment", "NAME=VALUE", "variables for all ranks"),
    ("--sbatch", "OPTION=VALUE", "more options of sbatch, such as qos=high or constraint=h200"),
)


def build_job_parser(description: Optional[str]) -> argparse.ArgumentParser:
    """Build the parser of a subcommand with this docstring."""
    parser = build_command_parser(
        description, argument_default=argparse.SUPPRESS, usage="%(prog)s [JOB.yaml] [options] [-- TRAINING FLAGS]"
    )
    parser.add_argument(
        "job_file", nargs="?", type=path_text, metavar="JOB.yaml", help="fields as the options, with _ for -"
    )
    for flag, metavar, text in TEXTS:
        parser.add_argument(flag, type=path_text if metavar == "DIR" else str, metavar=metavar, help=text)
    for flag, metavar, text in TABLES:
        parser.add_argument(flag, metavar=metavar, nargs="+", action="extend", help=text)
    parser.add_argument(
        "--mounts", type=path_text, metavar="DIR", nargs="+", help="folders that the container sees, besides --project"
    )
    parser.add_argument(
        "--shared-nodes", dest="exclusive", action="store_const", const="false", help="nodes may have other jobs"
    )
    parser.add_argument(
        "--no-check-nodes", dest="check_nodes", action="store_const", const="false",
        help="start without looking at the nodes",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the script and start nothing")
    return parser


def read_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str], default: Optional[Mapping[str, str]] = None
) -> tuple[argparse.Namespace, Job]:
    """Parse the options, and build the job from them and the job file.

    Args:
        default: fields that neither of them has to give.

    Raises:
        ConfigError: with everything that is wrong.
    """
    own, training = list(argv), list[str]()
    if "--" in own:
        place = own.index("--")
        own, training = own[:place], own[place + 1 :]
    arguments = parser.parse_args(own)
    given: dict[str, Any] = {
        name: value for name, value in vars(arguments).items() if name not in ("job_file", "output", "dry_run")
    }
    wrong = [f"--environment {pair}: NAME=VALUE" for pair in given.get("environment", ()) if "=" not in pair]
    if wrong:
        raise ConfigError(wrong)
    for name in ("environment", "sbatch"):
        if name in given:
            given[name] = dict(pair.partition("=")[::2] for pair in given[name])
    text = ""
    if "job_file" in arguments:
        try:
            text = read_text(arguments.job_file, strict_yaml.MAX_BYTES)
        except UnreadableFile as error:
            raise ConfigError(f"{arguments.job_file}: cannot be read: {error.reason}") from None
    job = read_job(text, given, training, default)
    check_training(job)
    return arguments, job


def check_training(job: Job) -> None:
    """Check the flags of training before the job is queued.

    Raises:
        ConfigError: with all problems. Files are not checked: they may be on the nodes only.
    """
    problems: list[str] = []
    for words in job.commands:
        invocation, wrong = flags.parse_with_problems(words)
        wrong += rules.setting_problems(invocation.config, job.world_size)
        if "--dry-run" in words:
            wrong = [*wrong, "--dry-run among the flags of training: the job would not train; give it before --"]
        problems += [text for text in wrong if text not in problems]
    if problems:
        raise ConfigError(problems)
