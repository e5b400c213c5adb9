"""Submit training to Slurm from a job file, flags or both; writes a batch script that you can read and edit.

    megafp8 slurm --name first --nodes 4 --time 24:00:00 --partition gpu --dry-run -- FLAGS
    megafp8 slurm JOB.yaml --account mine

A job file with `preprocess` tokenizes text as an array of CPU jobs, and merges the parts in a last one.

FLAGS are those of megafp8 pretrain, with --save and --load on one folder. They come after the job file's, and the last
one wins. Everything is checked before anything is submitted. The script checks every node, starts one torchrun on
each, and restarts the run after crashes. Before the time limit and at a preemption the run saves, and the job is
requeued until the run is done. Exit status: 64 for a wrong job or wrong flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megafp8.cli.command_flags import add_flags, path_flag
from megafp8.cli.common import returns_exit_status
from megafp8.cli.job_options import DRY_RUN, build_job_parser, check_training, read_arguments, warn_of_unused
from megafp8.errors import ConfigError
from megafp8.launch import slurm
from megafp8.launch.job import KUBERNETES_FIELDS, check_job
from megafp8.utils.formatting import control_problems


def build_parser() -> argparse.ArgumentParser:
    output = path_flag("--output", "path of the script to write (default: in --logs)", metavar="FILE")
    return add_flags(build_job_parser(__doc__), DRY_RUN, output)


@returns_exit_status()
def main(argv: Sequence[str]) -> int:
    """Submit the job, or print its script; return the exit status."""
    arguments, job = read_arguments(build_parser(), argv)
    check_job(job)
    check_training(job)
    warn_of_unused(job, KUBERNETES_FIELDS, "by Slurm")
    if problems := control_problems("--output", vars(arguments).get("output")):
        raise ConfigError(problems)
    text = slurm.script(job)
    if "dry_run" in arguments:
        print(text, end="")
        return 0
    path = arguments.output if "output" in arguments else Path(job.project, job.log_folder, f"{job.name}.sbatch")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}: choose another --output or --logs") from error
    number = slurm.submit(path)
    print(f"{path}: job {number}")
    if job.preprocess:
        print(f"merge of the parts: job {slurm.submit_merge(path, number)}, after job {number}")
    return 0
