"""Submit training to Slurm: from a job file, from flags or from both, to a batch script that you can read and edit.

    python launcher/slurm.py --name first --nodes 4 --time 24:00:00 --partition gpu --dry-run -- FLAGS
    python launcher/slurm.py examples/jobs/llama3_8b_multi_node.yaml --account mine

FLAGS are those of pretrain_gpt.py, with --save and --load on one folder. They come after the job file's, and the last
one wins. Everything is checked before anything is submitted. The script looks at every node, starts one torchrun on
each, and starts the run again after crashes; before the time limit and at a preemption the run saves, and the job comes
out of the queue again until the run is done. Exit status 64: the job or its flags are wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megafp8.cli.common import build_command_parser, returns_exit_status
from megafp8.config import flags, rules
from megafp8.errors import ConfigError
from megafp8.launch import slurm, torchrun
from megafp8.launch.job import Job, read_job
from megafp8.utils import strict_yaml
from megafp8.utils.files import UnreadableFile, path_argument, path_text, read_text
from megafp8.utils.formatting import control_problems

TEXTS = (
    ("--name", "NAME", "of the job"),
    ("--nodes", "N", "machines (default 1)"),
    ("--gpus-per-node", "N", "GPUs of each, one rank a GPU (default 8; 0: CPUs)"),
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
    ("--endpoint", "HOST:PORT", "of the first machine, for several without Slurm (torchrun.sh)"),
)  # fmt: skip
TABLES = (
    ("--environment", "NAME=VALUE", "variables for all ranks"),
    ("--sbatch", "OPTION=VALUE", "more options of sbatch, such as qos=high or constraint=h200"),
)


def build_parser() -> argparse.ArgumentParser:
    parser = build_command_parser(
        __doc__, argument_default=argparse.SUPPRESS, usage="%(prog)s [JOB.yaml] [options] [-- FLAGS of pretrain_gpt.py]"
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
    parser.add_argument(
        "--output", type=path_argument, metavar="FILE", help="where to write the script (default: in --logs)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")
    parser.add_argument("--torchrun", action="store_true", help=argparse.SUPPRESS)  # torchrun.sh
    return parser


def read_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, Job]:
    """Parse the options, and build the job from them and the job file.

    Raises:
        ConfigError: with everything that is wrong.
    """
    own, training = list(argv), list[str]()
    if "--" in own:
        place = own.index("--")
        own, training = own[:place], own[place + 1 :]
    arguments = build_parser().parse_args(own)
    given: dict[str, Any] = {
        name: value for name, value in vars(arguments).items()
        if name not in ("job_file", "output", "dry_run", "torchrun")
    }  # fmt: skip
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
    if problems := control_problems("--output", vars(arguments).get("output")):
        raise ConfigError(problems)
    job = read_job(text, given, training)
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


@returns_exit_status()
def main(argv: Sequence[str]) -> int:
    """Submit the job, or print its script; return the exit status."""
    arguments, job = read_arguments(argv)
    is_torchrun = "torchrun" in arguments
    text = (torchrun if is_torchrun else slurm).script(job)
    if is_torchrun and (unused := torchrun.unused_fields(job)):
        print(f"notice: not used without Slurm: {', '.join(unused)}", file=sys.stderr, flush=True)
    if "dry_run" in arguments:
        print(text, end="")
        return 0
    if is_torchrun:
        os.execvp("bash", ["bash", "-c", text])
    path = arguments.output if "output" in arguments else Path(job.project, job.log_folder, f"{job.name}.sbatch")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}: choose another --output or --logs") from error
    print(f"{path}: job {slurm.submit(path)}")
    return 0
