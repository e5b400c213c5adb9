#!/usr/bin/env python3
"""Run a training command until its run is done, and start it again whenever it was preempted, died or hung.

    python launcher/supervise.py --max-restarts 10 -- torchrun --nproc-per-node 8 pretrain_gpt.py \\
      --save runs/first --load runs/first FLAGS

The run's state is the judge (run_state.json in --save). Wrong flags, data or checkpoints, numbers that stay bad and a
folder in use are not tried again. Restarts without progress are counted and pause longer and longer. A SIGTERM, SIGINT,
SIGHUP or SIGUSR1 is passed on; when the run has saved, this ends with status 75. One line is printed for each restart,
and restarts.jsonl in the run's folder has lost steps and the time to recover. Exit status: 0 done, else the run's own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

from megafp8.config import flags
from megafp8.config.rules.data import write_fault
from megafp8.errors import HUNG, INTERNAL, PREEMPTED, ConfigError
from megafp8.launch.slurm import is_fruitless, requeue, this_job, time_left_s
from megafp8.launch.supervisor import Limits, Supervisor, saved_step
from megafp8.resilience.run_state import read_run_state
from megafp8.utils.best_effort import best_effort, optional_write
from megafp8.utils.files import path_argument

SCRIPTS = ("pretrain_gpt.py", "pretrain-gpt")
MENDED_BY_A_NEW_START = (PREEMPTED, INTERNAL, HUNG)
DEFAULTS = Limits(grace_s=float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=DEFAULTS.max_restarts,
        metavar="N",
        help="restarts in a row without progress (default %(default)s)",
    )
    parser.add_argument(
        "--min-progress-steps",
        type=int,
        default=DEFAULTS.min_progress_steps,
        metavar="N",
        help="saved steps that count as progress; 0: every restart counts (default %(default)s)",
    )
    parser.add_argument(
        "--retry-bad-numbers",
        action="store_true",
        help="start again also after numbers that are not finite (status 65), which a fault of the hardware may have "
        "made; counts as a restart without progress",
    )
    parser.add_argument(
        "--backoff-s",
        type=float,
        default=DEFAULTS.backoff_s,
        metavar="S",
        help="pause before a restart, doubled for each one without progress (default %(default)g)",
    )
    parser.add_argument(
        "--grace-s",
        type=float,
        default=DEFAULTS.grace_s,
        metavar="S",
        help="time to save after a signal, for torchrun and its ranks; then they are killed (default %(default)g, "
        "or TORCH_ELASTIC_SHUTDOWN_TIMEOUT)",
    )
    parser.add_argument(
        "--requeue",
        action="store_true",
        help="in a Slurm job: put the job back into the queue when a signal ended the run, or when restarts did not "
        "help and other nodes may",
    )
    parser.add_argument(
        "--max-requeues", type=int, default=100, metavar="N", help="how often, in all (default %(default)s)"
    )
    parser.add_argument(
        "--least-time-s",
        type=float,
        default=0.0,
        metavar="S",
        help="with --requeue: start nothing in the last S seconds of the job, whose warning has come already",
    )
    parser.add_argument(
        "--run-folder", type=path_argument, metavar="DIR", help="the run's --save, if the command hides it"
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --: the whole training command")
    return parser


def run_folder(command: Sequence[str]) -> Path:
    """What the training command has as --save.

    Raises:
        ConfigError: it cannot be told, or its flags are wrong.
    """
    place = next((index for index, word in enumerate(command) if Path(word).name in SCRIPTS), None)
    if place is None:
        raise ConfigError(f"the command names none of {', '.join(SCRIPTS)}: give --run-folder")
    invocation, problems = flags.read(list(command[place + 1 :]))
    checkpoint = invocation.config.checkpoint
    if checkpoint.save is None or checkpoint.load != checkpoint.save:
        problems = [
            *problems,
            f"--save {checkpoint.save} and --load {checkpoint.load}: a run goes on where it stopped if both name one "
            "folder; weights to start from are given with --pretrained-checkpoint",
        ]
    if problems:
        raise ConfigError(problems)
    return Path(invocation.config.checkpoint.save or "")


def check_start(command: Sequence[str], folder: Path) -> None:
    """
    Raises:
        ConfigError: there is no such command, or its run could not write to its folder.
    """
    problems = []
    if shutil.which(command[0]) is None:
        problems.append(f"{command[0]}: no such command; give its path, or activate the environment that has it")
    if fault := write_fault(str(folder)):
        problems.append(f"the run's folder {folder}: {fault}; choose another folder (--save, --run-folder)")
    if problems:
        raise ConfigError(problems)


def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    sys.stderr = best_effort(sys.stderr)  # the terminal may be closed
    try:
        folder = arguments.run_folder or run_folder(arguments.command)
        check_start(arguments.command, folder)
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return error.exit_status
    with optional_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
    limits = Limits(
        max_restarts=arguments.max_restarts, min_progress_steps=arguments.min_progress_steps,
        retry_bad_numbers=arguments.retry_bad_numbers, backoff_s=arguments.backoff_s, grace_s=arguments.grace_s,
        ends_when_preempted=arguments.requeue, least_time_s=arguments.least_time_s,
    )  # fmt: skip
    left = {"time_left_s": time_left_s} if arguments.requeue else {}
    status = Supervisor(arguments.command, folder, limits, tell, **left).run()
    if arguments.requeue and status in MENDED_BY_A_NEW_START:
        if this_job() and is_fruitless(folder, saved_step(read_run_state(folder)), tell):
            return INTERNAL
        requeue(arguments.max_requeues, tell)
    return status


def tell(text: str) -> None:
    """One line to standard error."""
    print(f"supervise: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
