"""A job as a script for one machine, or for several without Slurm: the same flags, environment and logs."""

from __future__ import annotations

import shlex

from megafp8.errors import ConfigError
from megafp8.launch.job import Job, array, environment_lines, script_of, training_lines

SLURM_FIELDS = ("cpus_per_node", "exclusive", "time", "partition", "account", "sbatch", "max_requeues", "check_nodes")


def unused_fields(job: Job) -> tuple[str, ...]:
    """Names of fields that the job has given and that only Slurm knows what to do with."""
    plain = Job(name=job.name, training=())
    return tuple(name for name in SLURM_FIELDS if getattr(job, name) != getattr(plain, name))


def script(job: Job) -> str:
    """The script that is run on each of the machines.

    On one machine the run is supervised. Supervisors on several would judge each other's starts, and torchrun's own
    restarts do not ask why a run ended.

    Raises:
        ConfigError: the job is an array or in a container, or has several machines and no endpoint, or restarts.
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
        ["#!/usr/bin/env bash", "# Written by launcher/torchrun.sh; edit it as you like.", "set -euo pipefail"],
        environment_lines(job),
        training_lines(job),
        start_lines(job),
    ]
    return script_of(parts)


def start_lines(job: Job) -> list[str]:
    """torchrun, under the supervisor where that can be."""
    meeting, start = "--standalone", [f"exec python3 launcher/supervise.py --max-restarts {job.restarts} -- \\"]
    if job.nodes > 1:
        meeting = f"--nnodes {job.nodes} --rdzv-backend c10d --rdzv-endpoint {job.endpoint} --rdzv-id {job.name}"
        start = []
    return [
        "# What a rank writes goes to files of its own under",
        f"# {job.log_folder}/ranks/NODE, and that of this machine's first rank also here.",
        *array(
            "torchrun",
            [
                f"python3 -m torch.distributed.run --nproc-per-node {job.ranks} --redirects 3 --tee 0:3",
                meeting,
                f'--log-dir {shlex.quote(job.log_folder)}/ranks/"$(hostname)"',
            ],
        ),
        *start,
        f'{"  " if start else "exec "}"${{torchrun[@]}}" pretrain_gpt.py "${{training[@]}}"',
    ]
