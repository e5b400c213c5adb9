"""Launch scripts for one machine, or for several without Slurm, with the same flags, environment and logs."""

from __future__ import annotations

import shlex

from megafp8.errors import ConfigError
from megafp8.launch.job import PRETRAIN, SUPERVISE, Job, bash_array, environment_lines, join_script, training_lines

SLURM_FIELDS = ("cpus_per_node", "exclusive", "time", "partition", "account", "sbatch", "max_requeues", "check_nodes")


def unused_fields(job: Job) -> tuple[str, ...]:
    """Names of the fields that the job sets and that have an effect under Slurm only."""
    default = Job(name=job.name, training=())
    return tuple(name for name in SLURM_FIELDS if getattr(job, name) != getattr(default, name))


def script(job: Job) -> str:
    """The script to run on each machine.

    On one machine the run has a supervisor. On several it has none: supervisors would read each other's starts from the
    run state, and torchrun's own restarts do not depend on why a run ended.

    Raises:
        ConfigError: the job is an array, has a container, or has several machines without an endpoint or with restarts.
    """
    problems = []
    if job.runs:
        problems.append(f"runs: {len(job.runs)}: an array is Slurm's; here a job is one run")
    if job.container:
        problems.append(f"container: {job.container}: start this inside of it")
    if job.nodes > 1 and not job.endpoint:
        problems.append(f"nodes: {job.nodes}: they meet at an endpoint, HOST:PORT of the first one: none is given")
    if job.nodes > 1 and job.max_restarts:
        problems.append(
            f"max_restarts: {job.max_restarts}: no supervisor starts a run again on {job.nodes} machines without "
            "Slurm; give --max-restarts 0, and the same command on all of them when it has ended"
        )
    if problems:
        raise ConfigError(problems)
    parts = [
        ["#!/usr/bin/env bash", "# Written by megafp8 torchrun; edit it as you like.", "set -euo pipefail"],
        environment_lines(job),
        training_lines(job),
        torchrun_lines(job),
    ]
    return join_script(parts)


def torchrun_lines(job: Job) -> list[str]:
    """Start torchrun, under the supervisor on one machine."""
    meeting, start = "--standalone", [f"exec python3 {SUPERVISE} --max-restarts {job.restarts} -- \\"]
    if job.nodes > 1:
        meeting = f"--nnodes {job.nodes} --rdzv-backend c10d --rdzv-endpoint {job.endpoint} --rdzv-id {job.name}"
        start = []
    return [
        "# What a rank writes goes to files of its own under",
        f"# {job.log_folder}/ranks/NODE, and that of this machine's first rank also here.",
        *bash_array(
            "torchrun",
            [
                f"python3 -m torch.distributed.run --nproc-per-node {job.ranks} --redirects 3 --tee 0:3",
                meeting,
                f'--log-dir {shlex.quote(job.log_folder)}/ranks/"$(hostname)"',
            ],
        ),
        *start,
        f'{"  " if start else "exec "}"${{torchrun[@]}}" {PRETRAIN} "${{training[@]}}"',
    ]
