"""Restart a training command after preemptions, crashes and hangs until its run is done.

    megafp8 supervise --max-restarts 10 -- torchrun --nproc-per-node 8 -m megafp8.cli.pretrain \\
      --save runs/first --load runs/first FLAGS

Whether to restart is decided from run_state.json in --save. Wrong flags, data or checkpoints, persistent non-finite
numbers and a folder in use are not retried. Restarts without progress are limited, and the pause before each doubles.
SIGTERM, SIGINT, SIGHUP and SIGUSR1 are passed on; after the run has saved, the exit status is 75. One line is printed
for each restart. restarts.jsonl in the folder of the run has the lost steps and the time to recover. Exit status: 0
when the run is done, else that of the run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from megafp8.cli.command_flags import add_flags, argument, float_flag, int_flag, path_flag, switch
from megafp8.cli.common import build_command_parser, returns_exit_status, stderr_log
from megafp8.config import flags
from megafp8.config.rules.paths import write_problem
from megafp8.errors import HUNG, INTERNAL, PREEMPTED, ConfigError
from megafp8.launch.job import save_and_load
from megafp8.launch.slurm import is_requeued_without_progress, requeue, slurm_job_id, time_left_s
from megafp8.launch.supervisor import RestartPolicy, Supervisor, saved_step
from megafp8.resilience.run_state import read_run_state
from megafp8.utils.best_effort import best_effort, optional_write
from megafp8.utils.object_store import local_path

TRAINING_COMMANDS = ("pretrain_gpt.py", "pretrain-gpt", "megafp8.cli.pretrain")
REQUEUED_STATUSES = (PREEMPTED, INTERNAL, HUNG)
DEFAULTS = RestartPolicy(grace_s=float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")))
log = stderr_log("supervise: ")


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_command_parser(__doc__),
        int_flag("--max-restarts", "maximum number of consecutive restarts without progress (default: %(default)s)",
                 default=DEFAULTS.max_restarts),
        int_flag("--min-progress-steps", "saved steps that count as progress; 0: every restart counts (default: "
                 "%(default)s)", default=DEFAULTS.min_progress_steps),
        switch("--retry-bad-numbers", "also restart after non-finite numbers (status 65), which faulty hardware may "
               "cause; counts as a restart without progress"),
        float_flag("--backoff-s", "pause before a restart, in seconds; doubled after each restart without progress "
                   "(default: %(default)g)", default=DEFAULTS.backoff_s, metavar="S"),
        float_flag("--grace-s", "seconds to save after a signal, before torchrun and its ranks are killed (default: "
                   "%(default)g, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT)", default=DEFAULTS.grace_s, metavar="S"),
        switch("--requeue", "in a Slurm job: requeue the job after a signal, or if restarts failed and other nodes may "
               "help"),
        int_flag("--max-requeues", "maximum number of requeues (default: %(default)s)", default=100),
        float_flag("--least-time-s", "with --requeue: do not restart in the last S seconds of the job, after its "
                   "warning signal", default=0.0, metavar="S"),
        path_flag("--run-folder", "the --save of the run, if it is not in the command", metavar="DIR"),
        argument("command", "after --: the training command", nargs="+", metavar="COMMAND"),
    )  # fmt: skip


def run_folder(command: Sequence[str]) -> Path:
    """Return the --save of the training command.

    Raises:
        ConfigError: the command is not recognized, or its flags are wrong.
    """
    names = [Path(word).name for word in command]
    positions = (
        index for index, name in enumerate(names)
        if name in TRAINING_COMMANDS or names[max(index - 1, 0) : index + 1] == ["megafp8", "pretrain"]
    )  # fmt: skip
    position = next(positions, None)
    if position is None:
        raise ConfigError(f"the command names none of {', '.join(TRAINING_COMMANDS)}: give --run-folder")
    parsed, problems = flags.parse_with_problems(list(command[position + 1 :]))
    checkpoint = parsed.config.checkpoint
    if checkpoint.save is None or checkpoint.load != checkpoint.save:
        problems = [
            *problems,
            f"{save_and_load(checkpoint.save, checkpoint.load)}: a run resumes where it stopped if both name one "
            "folder; weights to start from are given with --pretrained-checkpoint",
        ]
    if problems:
        raise ConfigError(problems)
    return local_path(parsed.config.checkpoint.save or "")


def check_start(command: Sequence[str], folder: Path) -> None:
    """Check the command and the run's folder.

    Raises:
        ConfigError: there is no such command, or the folder cannot be written to.
    """
    problems = []
    if shutil.which(command[0]) is None:
        problems.append(f"{command[0]}: no such command; give its path, or activate the environment that has it")
    if problem := write_problem(str(folder)):
        problems.append(f"the run's folder {folder}: {problem}; choose another folder (--save, --run-folder)")
    if problems:
        raise ConfigError(problems)


@returns_exit_status()
def main(argv: Sequence[str]) -> int:
    """Supervise the command until its run is done; return its exit status."""
    arguments = build_parser().parse_args(argv)
    sys.stderr = best_effort(sys.stderr)  # the terminal may be closed
    folder = arguments.run_folder or run_folder(arguments.command)
    check_start(arguments.command, folder)
    with optional_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
    limits = RestartPolicy(
        max_restarts=arguments.max_restarts, min_progress_steps=arguments.min_progress_steps,
        retry_bad_numbers=arguments.retry_bad_numbers, backoff_s=arguments.backoff_s, grace_s=arguments.grace_s,
        ends_when_preempted=arguments.requeue, least_time_s=arguments.least_time_s,
    )  # fmt: skip
    left = {"time_left_s": time_left_s} if arguments.requeue else {}
    status = Supervisor(arguments.command, folder, limits, log, **left).run()
    if arguments.requeue and status in REQUEUED_STATUSES:
        if slurm_job_id() and is_requeued_without_progress(folder, saved_step(read_run_state(folder)), log):
            return INTERNAL
        requeue(arguments.max_requeues, log)
    return status
