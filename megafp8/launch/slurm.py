"""Slurm: batch scripts of jobs and job arrays, their submission, and putting a running job back into the queue.

A script is complete: it can be read, edited and submitted with sbatch. It checks the nodes, then starts one torchrun
per node under the supervisor (`supervise.py`). The supervisor restarts the run after crashes, and requeues the job when
a signal ended the run: the warning before the time limit, or a preemption. Slurm sends both to the processes of srun,
and torchrun forwards them. When a node fails, Slurm itself requeues the job (`--requeue`).
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

from megafp8.device.node_check_ranks import NUM_CHECK_PORTS
from megafp8.errors import INTERNAL, ConfigError
from megafp8.launch.job import (
    CHECK_NODES,
    PRETRAIN,
    SLURM_EARLY_S,
    SUPERVISE,
    Job,
    bash_array,
    environment_lines,
    join_script,
    quote_word,
    signal_lead_s,
    training_lines,
)
from megafp8.launch.node_check import NODE_CHECK_TIMEOUT_S
from megafp8.utils.process import SLURM_JOB_VARIABLE

OUTPUT_DIRECTIVE = re.compile(r"^#SBATCH --output=(?:'([^']+)'|(\S+))$", re.MULTILINE)
# Below the kernel's ephemeral ports. The rendezvous of a job has one of NUM_PORTS ports, its node check a block of
# NUM_CHECK_PORTS out of NUM_PORTS others, so that jobs with consecutive ids can share a node.
RENDEZVOUS_PORT, CHECK_PORT, NUM_PORTS = 10000, 20000, 10000


def script(job: Job) -> str:
    """The batch script of a job, or of a job array if it has `runs`."""
    parts = [
        ["#!/usr/bin/env bash", *directives(job)],
        [
            "# Written by megafp8 slurm; edit it as you like.",
            "set -euo pipefail",
            # Slurm itself requeues a job after node failures.
            f'[ "${{SLURM_RESTART_COUNT:-0}}" -le {job.max_requeues} ] || '
            f'{{ echo "the job came out of the queue again more than {job.max_requeues} times" >&2; '
            f"exit {INTERNAL}; }}",
            *environment_lines(job),
        ],
        training_lines(job),
        node_command_lines(job),
        node_check_lines(job) if job.check_nodes else [],
        torchrun_lines(job),
    ]
    return join_script(parts)


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
        "signal": f"USR1@{signal_lead_s(job)}",
        "requeue": "",
        "open-mode": "append",
        "output": f"{Path(job.project, job.log_folder)}/{'%A_%a' if job.runs else '%j'}.log",
    }
    options |= job.sbatch
    return [
        f"#SBATCH --{name}={shlex.quote(value)}" if value else f"#SBATCH --{name}"
        for name, value in options.items() if value is not None
    ]  # fmt: skip


def node_command_lines(job: Job) -> list[str]:
    """The array `on_each_node`: a command prefix that runs once per node, in the container if there is one."""
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
        lines += [shlex.join(options), quote_word(f"--container-mounts={mounts}")]
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
        *bash_array("on_each_node", lines),
        *(names if job.nodes > 1 or job.check_nodes else ()),
        *(addresses if job.nodes > 1 else ()),
    ]


def node_check_lines(job: Job) -> list[str]:
    """Check every node, and requeue the job without bad ones."""
    reports = f'{shlex.quote(job.log_folder)}/nodes/"$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"'
    port = f"$(({CHECK_PORT} + SLURM_JOB_ID % {NUM_PORTS // NUM_CHECK_PORTS} * {NUM_CHECK_PORTS}))"
    return [
        "# Look at the nodes. If one is bad, it is named, and the job goes back into the queue without it.",
        *bash_array(
            "check",
            [
                f"{reports} --gpus {job.gpus_per_node}",
                f'--port "{port}" --nodes "${{nodes[@]}}"',
                *(['--addresses "${addresses[@]}"'] if job.nodes > 1 else ()),
            ],
        ),
        f"SLURM_WAIT={NODE_CHECK_TIMEOUT_S} \\",
        f'  "${{on_each_node[@]}}" python3 {CHECK_NODES} measure "${{check[@]}}" || true',
        f'python3 {CHECK_NODES} judge "${{check[@]}}" --requeue --max-requeues {job.max_requeues}',
    ]


def torchrun_lines(job: Job) -> list[str]:
    """Start one torchrun per node, under the supervisor."""
    torchrun, meeting, find, place = ["--standalone"], list[str](), "", ""
    if job.nodes > 1:
        meeting = ["# They meet at the first node, which is that of number 0, on a port of the job's own."]
        find = "addresses=($NODE_ADDRESSES); "
        place = "PET_LOCAL_ADDR=${addresses[SLURM_NODEID]} PET_RDZV_CONF=is_host=$((SLURM_NODEID == 0)) "
        torchrun = [
            '--nnodes "$SLURM_NNODES" --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID"',
            f'--rdzv-endpoint "${{addresses[0]}}:$(({RENDEZVOUS_PORT} + SLURM_JOB_ID % {NUM_PORTS}))"',
        ]
    task, shown = ("${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID/", "ARRAY_TASK/") if job.runs else ("", "")
    on_each = f'{find}PET_LOG_DIR={shlex.quote(job.log_folder)}/ranks/{task}$SLURMD_NODENAME {place}exec "$@"'
    return [
        "# One torchrun a node. What a rank writes goes to files of its own under",
        f"# {job.log_folder}/ranks/{shown}NODE, and that of a node's first rank also here.",
        *meeting,
        *bash_array(
            "torchrun",
            [f"python3 -m torch.distributed.run --nproc-per-node {job.ranks} --redirects 3 --tee 0:3", *torchrun],
        ),
        "",
        "# Started again after crashes; the run's state says whether the job comes out of the queue again.",
        f"export SLURM_WAIT={signal_lead_s(job)}",
        f"exec python3 {SUPERVISE} --max-restarts {job.restarts} --requeue "
        f"--max-requeues {job.max_requeues} --least-time-s {signal_lead_s(job) + SLURM_EARLY_S} -- \\",
        '  "${on_each_node[@]}" \\',
        f"  bash -c {shlex.quote(on_each)} torchrun \\",
        f'  "${{torchrun[@]}}" {PRETRAIN} "${{training[@]}}"',
    ]


def submit(path: Path) -> int:
    """Submit a script with sbatch and return the job id.

    The folder of its output is created first, because Slurm ends a job silently if that does not exist.

    Raises:
        ConfigError: there is no sbatch, or it refuses the script.
    """
    found = OUTPUT_DIRECTIVE.search(path.read_text(encoding="utf-8"))
    if found:
        Path(found[1] or found[2]).parent.mkdir(parents=True, exist_ok=True)
    try:
        answer = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("there is no sbatch here: submit on a login node of a Slurm cluster") from None
    if answer.returncode:
        raise ConfigError(f"sbatch {path}: {answer.stderr.strip()}")
    return int(answer.stdout.split(";")[0])


RESTART_COUNT = "SLURM_RESTART_COUNT"
# In the run's folder: one line per requeue, with the saved step.
REQUEUES_FILE = "requeues.log"
# Requeues in a row without a newly saved step.
MAX_REQUEUES_WITHOUT_PROGRESS = 3
ARRAY_JOB_ID, ARRAY_TASK_ID = "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"
# For a Slurm controller that is restarting or busy.
REQUEUE_TIMEOUT_S, RETRY_INTERVAL_S = 30.0, 2.0


def slurm_job_id() -> Optional[str]:
    """The id of this job as Slurm's commands take it; None outside of Slurm.

    For a task of an array it is ARRAY_TASK, because the job id of the last task is also that of the whole array.
    """
    if ARRAY_JOB_ID in os.environ and ARRAY_TASK_ID in os.environ:
        return f"{os.environ[ARRAY_JOB_ID]}_{os.environ[ARRAY_TASK_ID]}"
    return os.environ.get(SLURM_JOB_VARIABLE)


def is_requeued_without_progress(folder: Path, saved_step: int, report: Callable[[str], None]) -> bool:
    """Whether this job was requeued `MAX_REQUEUES_WITHOUT_PROGRESS` times in a row without saving a new step.

    If not, this requeue is counted in the run's folder.

    Args:
        saved_step: step of the newest checkpoint; 0 without one.
    """
    path, line = folder / REQUEUES_FILE, f"job {slurm_job_id()} saved_step {saved_step}"
    try:
        with open(path, "a+", encoding="utf-8", errors="replace") as stream:
            stream.seek(0)
            count = sum(1 for _ in itertools.takewhile(line.__eq__, reversed(stream.read().splitlines())))
            if count < MAX_REQUEUES_WITHOUT_PROGRESS:
                stream.write(f"{line}\n")
    except OSError as error:
        report(f"{path}: requeues are not counted: {error.strerror}")
        return False
    if count < MAX_REQUEUES_WITHOUT_PROGRESS:
        return False
    report(
        f"job {slurm_job_id()} came out of the queue {count} times in a row and saved nothing after step {saved_step}: "
        "it ends here. Its output says what took the time: give it a longer time limit, a shorter time_to_save_s or "
        "--no-check-nodes, or fix what ended the run; then submit it again"
    )
    return True


def requeue(max_requeues: int, report: Callable[[str], None], exclude: Sequence[str] = ()) -> bool:
    """Requeue this job, unless it was requeued too often or somebody has cancelled it.

    Slurm then ends the job, including this process, and runs its script from the beginning once it has nodes.

    Args:
        max_requeues: limit on all requeues, as Slurm counts them; includes those after node failures.
        exclude: nodes that the job must not get again.

    Returns:
        Whether the job was requeued.
    """
    job, restarts = slurm_job_id(), int(os.environ.get(RESTART_COUNT, "0"))
    if job is None:
        report("this is no Slurm job: nothing to put back into the queue")
        return False
    if restarts >= max_requeues:
        report(f"job {job} came out of the queue again {restarts} times already: it ends here (--max-requeues)")
        return False
    answer = run_slurm_command("squeue", "--noheader", "--jobs", job, "--format", "%T %x")
    state, _, excluded = answer.stdout.strip().partition(" ")
    if state != "RUNNING":
        # scontrol requeue would also restart a cancelled job.
        report(f"job {job} is {state or 'unknown to Slurm'}: it is not put back into the queue")
        return False
    # The requeue ends this job: SIGTERM at once, SIGKILL after Slurm's KillWait. Nodes are excluded in between.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    report(f"job {job} goes back into the queue, the {restarts + 1}. time")
    answer = run_slurm_command("scontrol", "requeue", job)
    if answer.returncode:
        report(f"scontrol requeue {job}: {answer.stderr.strip()}")
        return False
    if exclude:
        nodes = ",".join([*exclude] if excluded in ("", "(null)") else [excluded, *exclude])
        answer = run_slurm_command("scontrol", "update", f"JobId={job}", f"ExcNodeList={nodes}")
        report(f"without {nodes}" if answer.returncode == 0 else f"ExcNodeList={nodes}: {answer.stderr.strip()}")
    return True


def time_left_s() -> float:
    """Time until this job's time limit; infinite without one."""
    end = run_slurm_command("squeue", "--noheader", "--jobs", slurm_job_id() or "", "--format", "%e").stdout.strip()
    try:
        return datetime.datetime.fromisoformat(end).timestamp() - time.time()
    except ValueError:
        return math.inf  # N/A


def run_slurm_command(*command: str) -> subprocess.CompletedProcess:
    """Run a Slurm command, and repeat it for `REQUEUE_TIMEOUT_S` if it fails."""
    deadline = time.monotonic() + REQUEUE_TIMEOUT_S
    while True:
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode == 0 or time.monotonic() + RETRY_INTERVAL_S > deadline:
            return answer
        time.sleep(RETRY_INTERVAL_S)
