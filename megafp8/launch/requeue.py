"""In a Slurm job: put it back into the queue."""

from __future__ import annotations

import datetime
import itertools
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional

from megafp8.launch.process import SLURM_JOB

RESTARTS = "SLURM_RESTART_COUNT"
# In the run's folder: a line for each time that a job was put back, with the saved step.
REQUEUES_FILE = "requeues.log"
# In a row, without a newly saved step.
MAX_FRUITLESS = 3
ARRAY, TASK = "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"
# For a controller that is away a moment, which is restarted or busy.
PATIENCE_S, PAUSE_S = 30.0, 2.0


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
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode == 0 or time.monotonic() + PAUSE_S > deadline:
            return answer
        time.sleep(PAUSE_S)
