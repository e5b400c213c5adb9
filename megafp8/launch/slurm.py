"""A job as a batch script for Slurm.

The script is the whole of it: it can be read, edited and handed to sbatch without this package's help. In it the nodes
are looked at, then one torchrun starts on each of them, under the supervisor (`supervise.py`), which starts the run
again after crashes, and puts the job back into the queue when a signal ended the run: the warning before the time
limit, or that of a preemption. Slurm sends both to what srun started, and torchrun passes them on. When a node dies,
Slurm itself puts the job back (`--requeue`).

In a Slurm job: put it back into the queue.
"""

from __future__ import annotations

import datetime
import itertools
import math
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional

from megafp8.errors import INTERNAL, ConfigError
from megafp8.launch.job import (
    SLURM_EARLY_S,
    Job,
    array,
    environment_lines,
    quoted,
    script_of,
    training_lines,
    warning_s,
)
from megafp8.launch.node_check import NODE_CHECK_TIMEOUT_S, PORTS
from megafp8.utils.process import SLURM_JOB

OUTPUT = re.compile(r"^#SBATCH --output=(?:'([^']+)'|(\S+))$", re.MULTILINE)
# Below the ports that the kernel gives to connections: each job meets on one of so many, and its check has `PORTS` of
# as many others to itself, so that neither meets a job of one of the next numbers on a node that they share.
MEETING_PORT, CHECK_PORT, NUM_PORTS = 10000, 20000, 10000


def script(job: Job) -> str:
    """The batch script of a job, or of a job array when it has `runs`."""
    parts = [
        ["#!/usr/bin/env bash", *directives(job)],
        [
            "# Written by launcher/slurm.py; edit it as you like.",
            "set -euo pipefail",
            *limit_lines(job),
            *environment_lines(job),
        ],
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
        *array(
            "check",
            [
                f"{reports} --gpus {job.gpus_per_node}",
                f'--port "{port}" --nodes "${{nodes[@]}}"',
                *(['--addresses "${addresses[@]}"'] if job.nodes > 1 else ()),
            ],
        ),
        f"SLURM_WAIT={NODE_CHECK_TIMEOUT_S} \\",
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


RESTARTS = "SLURM_RESTART_COUNT"
# In the run's folder: a line for each time that a job was put back, with the saved step.
REQUEUES_FILE = "requeues.log"
# In a row, without a newly saved step.
MAX_FRUITLESS = 3
ARRAY, TASK = "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"
# For a controller that is away a moment, which is restarted or busy.
REQUEUE_TIMEOUT_S, PAUSE_S = 30.0, 2.0


def this_job() -> Optional[str]:
    """As Slurm's commands take it; None outside of Slurm. A task of an array is ARRAY_TASK: the number of its last task
    is also that of the whole array, so that a command with it would mean all tasks."""
    if ARRAY in os.environ and TASK in os.environ:
        return f"{os.environ[ARRAY]}_{os.environ[TASK]}"
    return os.environ.get(SLURM_JOB)


def is_fruitless(folder: Path, saved_step: int, tell: Callable[[str], None]) -> bool:
    """Whether this job should stay out of the queue: it came out of it `MAX_FRUITLESS` times and saved nothing since.

    Otherwise it is counted, in the run's folder.

    Args:
        saved_step: of the newest checkpoint; 0 without one.
    """
    path, line = folder / REQUEUES_FILE, f"job {this_job()} saved_step {saved_step}"
    try:
        with open(path, "a+", encoding="utf-8", errors="replace") as stream:
            stream.seek(0)
            count = len([*itertools.takewhile(line.__eq__, reversed(stream.read().splitlines()))])
            if count < MAX_FRUITLESS:
                stream.write(f"{line}\n")
    except OSError as error:
        tell(f"{path}: requeues are not counted: {error.strerror}")
        return False
    if count < MAX_FRUITLESS:
        return False
    tell(
        f"job {this_job()} came out of the queue {count} times in a row and saved nothing after step {saved_step}: it "
        "ends here. Its output says what took the time: give it a longer time limit, a shorter time_to_save_s or "
        "--no-check-nodes, or mend what ended the run; then submit it again"
    )
    return True


def requeue(max_requeues: int, tell: Callable[[str], None], exclude: Sequence[str] = ()) -> bool:
    """Put this job back into the queue, unless it came from there too often, or somebody has cancelled it.

    Slurm ends the job then, this process included, and starts its script from the beginning when there are nodes.

    Args:
        max_requeues: how often in all; Slurm counts them, those after a node's end too.
        exclude: nodes that it shall not get again.

    Returns:
        Whether it was.
    """
    job, restarts = this_job(), int(os.environ.get(RESTARTS, "0"))
    if job is None:
        tell("this is no Slurm job: nothing to put back into the queue")
        return False
    if restarts >= max_requeues:
        tell(f"job {job} came out of the queue again {restarts} times already: it ends here (--max-requeues)")
        return False
    answer = slurm("squeue", "--noheader", "--jobs", job, "--format", "%T %x")
    state, _, excluded = answer.stdout.strip().partition(" ")
    if state != "RUNNING":
        # A job that was cancelled would come again, too.
        tell(f"job {job} is {state or 'unknown to Slurm'}: it is not put back into the queue")
        return False
    # What comes now ends this job: SIGTERM at once, SIGKILL after Slurm's KillWait. Nodes can be excluded in between.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(f"job {job} goes back into the queue, the {restarts + 1}. time")
    answer = slurm("scontrol", "requeue", job)
    if answer.returncode:
        tell(f"scontrol requeue {job}: {answer.stderr.strip()}")
        return False
    if exclude:
        nodes = ",".join([*([] if excluded in ("", "(null)") else [excluded]), *exclude])
        answer = slurm("scontrol", "update", f"JobId={job}", f"ExcNodeList={nodes}")
        tell(f"without {nodes}" if answer.returncode == 0 else f"ExcNodeList={nodes}: {answer.stderr.strip()}")
    return True


def time_left_s() -> float:
    """Seconds until this job's time limit; infinite without one."""
    end = slurm("squeue", "--noheader", "--jobs", this_job() or "", "--format", "%e").stdout.strip()
    try:
        return datetime.datetime.fromisoformat(end).timestamp() - time.time()
    except ValueError:
        return math.inf  # N/A


def slurm(*command: str) -> subprocess.CompletedProcess:
    """One of Slurm's commands; one that fails is said again for `PATIENCE_S`."""
    deadline = time.monotonic() + REQUEUE_TIMEOUT_S
    while True:
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode == 0 or time.monotonic() + PAUSE_S > deadline:
            return answer
        time.sleep(PAUSE_S)
