"""A job as a batch script for Slurm.

The script is the whole of it: it can be read, edited and handed to sbatch without this package's help. In it the nodes
are looked at, then one torchrun starts on each of them, under the supervisor (`supervise.py`), which starts the run
again after crashes, and puts the job back into the queue when a signal ended the run: the warning before the time
limit, or that of a preemption. Slurm sends both to what srun started, and torchrun passes them on. When a node dies,
Slurm itself puts the job back (`--requeue`).
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Optional

from megafp8.errors import INTERNAL, ConfigError
from megafp8.launch.job import SLURM_EARLY_S, Job, warning_s
from megafp8.launch.nodes import PATIENCE_S, PORTS
from megafp8.launch.shell import array, environment_lines, quoted, script_of, training_lines

OUTPUT = re.compile(r"^#SBATCH --output=(?:'([^']+)'|(\S+))$", re.MULTILINE)
# Below the ports that the kernel gives to connections: each job meets on one of so many, and its check has `PORTS` of
# as many others to itself, so that neither meets a job of one of the next numbers on a node that they share.
MEETING_PORT, CHECK_PORT, NUM_PORTS = 10000, 20000, 10000


def script(job: Job) -> str:
    """The batch script of a job, or of a job array when it has `runs`."""
    parts = [
        ["#!/usr/bin/env bash", *directives(job)],
        ["# Written by launcher/slurm.py; edit it as you like.", "set -euo pipefail", *limit_lines(job),
         *environment_lines(job)],
        training_lines(job),
        each_node_lines(job),
        check_lines(job) if job.check_nodes else [],
        start_lines(job),
    ]
    return script_of(parts)


def directives(job: Job) -> list[str]:
    """The options of sbatch."""
    array = None
    if job.runs:
        array = f"0-{len(job.runs) - 1}" + (f"%{job.array_limit}" if job.array_limit else "")
    options: dict[str, Optional[str]] = {
        "job-name": job.name,
        "partition": job.partition,
        "account": job.account,
        "array": array,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(job.gpus_per_node) if job.gpus_per_node else None,
        "cpus-per-task": str(job.cpus_per_node) if job.cpus_per_node else None,
        "exclusive": "" if job.exclusive else None,
        "mem": "0" if job.exclusive else None,
        "time": job.time,
        "signal": f"USR1@{warning_s(job)}",
        "requeue": "",
        "open-mode": "append",
        "output": f"{Path(job.project, job.log_folder)}/{'%A_%a' if job.runs else '%j'}.log",
    }
    options |= job.sbatch
    return [
        f"#SBATCH --{name}={shlex.quote(value)}" if value else f"#SBATCH --{name}"
        for name, value in options.items() if value is not None
    ]  # fmt: skip


def limit_lines(job: Job) -> list[str]:
    """The end of a job that Slurm itself, after nodes that died, has put back too often."""
    return [
        f'[ "${{SLURM_RESTART_COUNT:-0}}" -le {job.max_requeues} ] || '
        f'{{ echo "the job came out of the queue again more than {job.max_requeues} times" >&2; exit {INTERNAL}; }}'
    ]


def each_node_lines(job: Job) -> list[str]:
    """`on_each_node`: the beginning of a command that runs once on each node, in the container if there is one."""
    options = ["--cpu-bind=none", "--kill-on-bad-exit=0"]
    if job.cpus_per_node:
        options.append(f"--cpus-per-task={job.cpus_per_node}")
    lines = [shlex.join(["srun", *options])]
    folders = [job.project, *job.mounts]
    if job.container and job.container.endswith(".sif"):
        binds = [f"--bind={folder}" for folder in folders]
        lines.append(shlex.join(["apptainer", "exec", "--nv", *binds, f"--pwd={job.project}", job.container]))
    elif job.container:
        mounts = ",".join(f"{folder}:{folder}" for folder in folders)
        options = [f"--container-image={job.container}", f"--container-workdir={job.project}"]
        lines += [shlex.join(options), quoted(f"--container-mounts={mounts}")]
    names = ['mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")']
    addresses = [
        "# Where Slurm itself reaches them (NodeAddr): a node's name in Slurm need not be a host name.",
        'mapfile -t addresses < <(scontrol show node --oneliner "$SLURM_JOB_NODELIST" |',
        r"  sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p')",
        '[ "${#addresses[@]}" = "${#nodes[@]}" ] || addresses=("${nodes[@]}")',
        'export NODE_ADDRESSES="${addresses[*]}"',
    ]
    return [
        "# Once on every node. When it has ended on one of them, the others have SLURM_WAIT seconds.",
        *array("on_each_node", lines),
        *(names if job.nodes > 1 or job.check_nodes else ()),
        *(addresses if job.nodes > 1 else ()),
    ]


def check_lines(job: Job) -> list[str]:
    """Every node is looked at, and a bad one named and left out."""
    reports = f'{shlex.quote(job.log_folder)}/nodes/"$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"'
    port = f"$(({CHECK_PORT} + SLURM_JOB_ID % {NUM_PORTS // PORTS} * {PORTS}))"
    return [
        "# Look at the nodes. If one is bad, it is named, and the job goes back into the queue without it.",
        *array("check", [
            f'{reports} --gpus {job.gpus_per_node}',
            f'--port "{port}" --nodes "${{nodes[@]}}"',
            *(['--addresses "${addresses[@]}"'] if job.nodes > 1 else ()),
        ]),
        f'SLURM_WAIT={PATIENCE_S} \\',
        '  "${on_each_node[@]}" python3 launcher/check_nodes.py measure "${check[@]}" || true',
        f'python3 launcher/check_nodes.py judge "${{check[@]}}" --requeue --max-requeues {job.max_requeues}',
    ]


def start_lines(job: Job) -> list[str]:
    """One torchrun on each node, under the supervisor."""
    torchrun, meeting, find, place = ["--standalone"], list[str](), "", ""
    if job.nodes > 1:
        meeting = ["# They meet at the first node, which is that of number 0, on a port of the job's own."]
        find = "addresses=($NODE_ADDRESSES); "
        place = "PET_LOCAL_ADDR=${addresses[SLURM_NODEID]} PET_RDZV_CONF=is_host=$((SLURM_NODEID == 0)) "
        torchrun = [
            '--nnodes "$SLURM_NNODES" --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID"',
            f'--rdzv-endpoint "${{addresses[0]}}:$(({MEETING_PORT} + SLURM_JOB_ID % {NUM_PORTS}))"',
        ]
    task, shown = ("${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID/", "ARRAY_TASK/") if job.runs else ("", "")
    on_each = f'{find}PET_LOG_DIR={shlex.quote(job.log_folder)}/ranks/{task}$SLURMD_NODENAME {place}exec "$@"'
    return [
        "# One torchrun a node. What a rank writes goes to files of its own under",
        f"# {job.log_folder}/ranks/{shown}NODE, and that of a node's first rank also here.",
        *meeting,
        *array(
            "torchrun",
            [f"python3 -m torch.distributed.run --nproc-per-node {job.ranks} --redirects 3 --tee 0:3", *torchrun],
        ),
        "",
        "# Started again after crashes; the run's state says whether the job comes out of the queue again.",
        f"export SLURM_WAIT={warning_s(job)}",
        f"exec python3 launcher/supervise.py --max-restarts {job.restarts} --requeue "
        f"--max-requeues {job.max_requeues} --least-time-s {warning_s(job) + SLURM_EARLY_S} -- \\",
        '  "${on_each_node[@]}" \\',
        f"  bash -c {shlex.quote(on_each)} torchrun \\",
        '  "${torchrun[@]}" pretrain_gpt.py "${training[@]}"',
    ]


def submit(path: Path) -> int:
    """Hand a script to sbatch; the job's number.

    The folder of its output is made first: Slurm ends a job without a word when it is not there.

    Raises:
        ConfigError: sbatch is not there, or refuses the script.
    """
    found = OUTPUT.search(path.read_text(encoding="utf-8"))
    if found:
        Path(found[1] or found[2]).parent.mkdir(parents=True, exist_ok=True)
    try:
        answer = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("there is no sbatch here: submit on a login node of a Slurm cluster") from None
    if answer.returncode:
        raise ConfigError(f"sbatch {path}: {answer.stderr.strip()}")
    return int(answer.stdout.split(";")[0])
