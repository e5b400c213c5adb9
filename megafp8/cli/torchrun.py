"""Train with torchrun on the GPUs of this machine, from the same job files and flags as `megafp8 slurm`.

    megafp8 torchrun -- FLAGS
    megafp8 torchrun --gpus-per-node 0 --ranks-per-node 2 -- FLAGS       two ranks on the CPU
    megafp8 torchrun JOB.yaml --dry-run                       prints the script and starts nothing

On several machines, without Slurm, the same command on each of them:

    megafp8 torchrun JOB.yaml --nodes 4 --endpoint first-machine:29500

FLAGS are those of megafp8 pretrain. They come after the job file's, and the last one wins. With --save and --load of
one folder a run on one machine is restarted after crashes; without --save it is not. Neither is it on several machines,
which need the folder: the same command on all of them resumes from the newest checkpoint. The ranks run in the Python
that runs this command, unless --venv or --setup name another one. Exit status: that of the run, 64 for a wrong job or
wrong flags.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megafp8.cli.command_flags import add_flags
from megafp8.cli.common import returns_exit_status
from megafp8.cli.job_options import DRY_RUN, build_job_parser, check_training, read_arguments, warn_of_unused
from megafp8.launch import torchrun
from megafp8.launch.job import check_job

DEFAULT_NAME = "pretrain"


def build_parser() -> argparse.ArgumentParser:
    return add_flags(build_job_parser(__doc__), DRY_RUN)


@returns_exit_status()
def main(argv: Sequence[str]) -> int:
    """Become the shell that runs the job's script, or print the script; return the exit status."""
    from megafp8.launch.study_execution import visible_gpus

    default = {"name": DEFAULT_NAME, "gpus_per_node": str(len(visible_gpus()))}
    arguments, job = read_arguments(build_parser(), argv, default)
    check_job(job, needs_save=job.nodes > 1)
    check_training(job)
    text = torchrun.script(job)
    warn_of_unused(job, torchrun.UNUSED_FIELDS, "without Slurm")
    if "dry_run" not in arguments:
        # The script runs `python3`.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        os.execvpe("bash", ["bash", "-c", text], os.environ | {"PATH": path})
    print(text, end="")
    return 0
