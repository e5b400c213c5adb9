"""Execution of studies: runs as Slurm job arrays or as local processes, and their progress.

One job array has all runs with the same number of GPUs. Locally, a pool of processes runs several at a time, each with
its own GPUs if there are any. Progress is read from the run state of each run.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.config import iterations
from megafp8.device.gpus import Gpu
from megafp8.errors import INTERNAL, PREEMPTED, ConfigError, RunFolderInUse
from megafp8.launch import kubernetes, slurm
from megafp8.launch.job import Job, build_job, check_job
from megafp8.launch.process_pool import OUTPUT_FILE, PooledRun, ProcessPool, RunOutcome, training_command
from megafp8.launch.study import Study, StudyRun, labels_text
from megafp8.planning.planned_run import PlannedRun, documents_of
from megafp8.planning.step_time import step_time
from megafp8.resilience.run_state import RunState, current_state, last_recorded_step
from megafp8.resources.automatic import with_choices
from megafp8.utils.files import UnreadableFile, atomic_write_json, atomic_write_text, read_text
from megafp8.utils.strict_json import parse_json

SUBMITTED_FILE = "submitted.jsonl"
GPUS_PER_NODE = 8


def build_jobs(study: Study, runs: Sequence[StudyRun], launcher: str = "slurm") -> list[Job]:
    """Build the job arrays of these runs.

    Args:
        launcher: the study's key with the fields of the jobs, `slurm` or `kubernetes`.

    Raises:
        ConfigError: fields are unknown or set by the study itself, GPUs do not fill nodes, or runs that share a node do
            not request CPUs.
    """
    given: Mapping[str, Any] = getattr(study, launcher)
    if own := [name for name in ("name", "training", "runs", "nodes", "ranks_per_node") if name in given]:
        raise ConfigError(f"{launcher}: {', '.join(own)}: set by the study; remove them")
    default = kubernetes.DEFAULTS if launcher == "kubernetes" else {}
    sizes = list(dict.fromkeys(run.world_size for run in runs))
    jobs = []
    for size in sizes:
        name = study.name if len(sizes) == 1 else f"{study.name}-{size}"
        fields = {
            **default, "name": name, "logs": str(study.folder / "logs" / name), **given,
            **job_shape(given, launcher, size),
            "runs": [list(run.flags[len(study.common.flags) :]) for run in runs if run.world_size == size],
        }  # fmt: skip
        job = build_job(fields, study.common.flags)
        check_job(job)
        if launcher == "slurm" and not job.exclusive and not job.cpus_per_node:
            memory, exclusive = "sbatch: {mem: 64G}", "exclusive: true"
            if study.slurm_flag:
                memory, exclusive = (f"{study.slurm_flag} {text}" for text in ("sbatch.mem=64G", "exclusive=true"))
            raise ConfigError(
                f"slurm: runs of {job.world_size} GPUs or ranks share a node, and Slurm's default is one core: set "
                f"cpus_per_node for one run, and its memory if the cluster's default is too small ({memory}); or use "
                f"{exclusive}"
            )
        jobs.append(job)
    return jobs


def job_shape(given: Mapping[str, Any], launcher: str, world_size: int) -> dict[str, str]:
    """Fields of a job for the nodes and GPUs, or ranks, of a run. Runs smaller than a node share it.

    Raises:
        ConfigError: the run is larger than a node, but not a multiple of it.
    """
    try:
        per_node = int(given.get("gpus_per_node", GPUS_PER_NODE))
    except ValueError:
        raise ConfigError(f"{launcher}: gpus_per_node: {given['gpus_per_node']!r} must be an integer") from None
    if per_node == 0:
        return {"gpus_per_node": "0", "ranks_per_node": str(world_size)}
    if world_size <= per_node:
        is_shared = launcher == "slurm" and world_size < per_node and "exclusive" not in given
        return {"gpus_per_node": str(world_size)} | ({"exclusive": "false"} if is_shared else {})
    if world_size % per_node:
        raise ConfigError(
            f"gpus: {world_size} is not a multiple of the {per_node} of a node ({launcher}: gpus_per_node)"
        )
    return {"gpus_per_node": str(per_node), "nodes": str(world_size // per_node)}


def submit(study: Study, runs: Sequence[StudyRun]) -> list[str]:
    """Write the job scripts to the study's folder, submit them to Slurm, and return a line for each.

    Raises:
        ConfigError: as `build_jobs`; or the working directory is not the project, or Slurm refuses a script.
    """
    jobs = build_jobs(study, runs)
    if away := [job.project for job in jobs if Path(job.project).resolve() != Path.cwd()]:
        raise ConfigError(
            f"jobs run in {away[0]}, and the study's paths are relative to it: start this command in that folder"
        )
    lines = []
    for job in jobs:
        path = Path(job.log_folder, f"{job.name}.sbatch")
        atomic_write_text(path, slurm.script(job))
        number = slurm.submit(path)
        ids = [run.id for run in runs if run.world_size == job.world_size]
        with open(study.folder / SUBMITTED_FILE, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"job": number, "runs": ids}) + "\n")
        lines.append(f"{path}: job {number}, {len(ids)} runs")
    return lines


def queued_ids(folder: Path) -> set[str]:
    """Ids of the study's runs that are pending or running in Slurm; empty without squeue.

    Raises:
        ConfigError: squeue fails, or the list of submitted jobs is damaged, so that runs could be submitted twice.
    """
    path = folder / SUBMITTED_FILE
    try:
        submitted = [(job["job"], job["runs"]) for job in map(parse_json, read_text(path).splitlines())]
    except (UnreadableFile, TypeError, KeyError) as error:
        if isinstance(error, UnreadableFile) and error.is_missing:
            return set()
        raise ConfigError(f"{path} is damaged ({error}); if no job of this study is in the queue, delete it") from error
    try:
        answer = subprocess.run(
            ["squeue", "--me", "--noheader", "--array", "--format=%i"], capture_output=True, text=True
        )  # fmt: skip
    except FileNotFoundError:
        return set()
    if answer.returncode:
        raise ConfigError(f"squeue: {answer.stderr.strip()}")
    tasks = set(answer.stdout.split())
    return {run for job, runs in submitted for task, run in enumerate(runs) if f"{job}_{task}" in tasks}


def train_command(run: StudyRun, script: Path) -> list[str]:
    """The command that trains a run on this machine."""
    return [*training_command(script, run.world_size, run.flags)]


def visible_gpus() -> tuple[str, ...]:
    """Entries for CUDA_VISIBLE_DEVICES on this machine; empty without GPUs."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        parts = [part.strip() for part in chosen.split(",") if part.strip()]
        return tuple(itertools.takewhile(lambda part: not part.startswith("-"), parts))  # as in CUDA, -1 ends the list
    if shutil.which("nvidia-smi") is None:
        return ()
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return tuple(str(number) for number, _ in enumerate(re.findall(r"^GPU ", listed, re.MULTILINE)))


def check_gpus(runs: Sequence[StudyRun], gpus: Sequence[str]) -> None:
    """Check that every run fits on this machine.

    Raises:
        ConfigError: a run needs more GPUs than there are.
    """
    if large := [run.label for run in runs if gpus and run.world_size > len(gpus)]:
        raise ConfigError(f"{labels_text(large)}: needs more GPUs (gpus) than the {len(gpus)} of this machine")


def run_here(
    runs: Sequence[StudyRun],
    script: Path,
    parallel: Optional[int],
    gpus: Sequence[str],
    report: Callable[[str], None],
    results: Collection[int] = (),
) -> int:
    """Run all runs that are due on this machine, until none is left or a stop signal arrives.

    Args:
        script: pretrain_gpt.py.
        parallel: number of runs at a time; None: as many as the GPUs allow, or one without GPUs.
        gpus: the GPUs of this machine, enough for every run (`check_gpus`).
        report: prints a line.
        results: exit statuses of runs that failed and yet have the result that the caller wants.

    Returns:
        0 if all are done, `PREEMPTED` after a signal, else the exit status of the first failed run.
    """
    statuses: list[int] = []
    runs_by_folder = {run.folder: run for run in runs}

    def is_still_due(run: PooledRun) -> bool:
        progress = run_progress(runs_by_folder[run.folder])
        if not is_due(progress):  # another process has started it in the meantime
            report(f"{progress.state:<10} {run.name}")
        return is_due(progress)

    def on_start(run: PooledRun, gpus: Sequence[str]) -> None:
        report(f"{'starts':<10} {run.name}" + (f" on GPU {','.join(gpus)}" if gpus else ""))

    def on_end(outcome: RunOutcome) -> None:
        status = outcome_status(outcome)
        statuses.append(0 if status in results else status)
        report(outcome_text(outcome))

    pool = ProcessPool(parallel or len(gpus) or 1, gpus, on_start=on_start, on_end=on_end, is_due=is_still_due)
    pool.run([
        PooledRun(name=run.label, command=tuple(train_command(run, script)), folder=run.folder, gpus=run.world_size)
        for run in runs
    ])  # fmt: skip
    if pool.is_stopping:
        return PREEMPTED
    return next((status for status in statuses if status), 0)


def outcome_status(outcome: RunOutcome) -> int:
    """Exit status of a run for the study: 0 also if its flags stopped it, or if it was started elsewhere."""
    ended_well = outcome.state is not None and outcome.state.state in (DONE, STOPPED)
    return 0 if ended_well or is_started_elsewhere(outcome) else outcome.exit_status or INTERNAL


def outcome_text(outcome: RunOutcome) -> str:
    """The outcome of a run as a line."""
    label, state = outcome.run.name, "preempted" if outcome.is_stopped else "failed"
    if outcome.state is not None:
        state = outcome.state.state
    if is_started_elsewhere(outcome):
        return f"{RUNNING:<10} {label}, started by another process"
    if state in (DONE, STOPPED):
        return f"{state:<10} {label} in {outcome.seconds:.0f} s"
    reason = outcome.reason.splitlines()[0]
    return f"{state:<10} {label}: {reason}; output in {outcome.run.folder / OUTPUT_FILE}"


def is_started_elsewhere(outcome: RunOutcome) -> bool:
    """Whether another process has the run. torchrun hides this exit status, but the run state is still `running`."""
    is_running = outcome.state is not None and outcome.state.state == RUNNING
    return is_running or outcome.exit_status == RunFolderInUse.exit_status


STUDY_FILE = "study.json"
WAITING, QUEUED, RUNNING, DONE, STOPPED = "waiting", "queued", "running", "done", "stopped"


@dataclass(frozen=True, kw_only=True)
class StudyProgress:
    """The progress of one run.

    Attributes:
        state: as in `run_state.py`, or `waiting` for a run that never started, or `queued` for one that Slurm has.
        step: last step done.
    """

    run: StudyRun
    state: str
    step: int
    reason: str = ""
    found: Optional[RunState] = None

    @property
    def steps(self) -> int:
        """Number of steps of the complete run."""
        return iterations.train_iters(self.run.config, self.run.world_size)

    @property
    def seconds(self) -> Optional[float]:
        """Duration of the complete run; None unless it was done in a single start."""
        if self.state != DONE or self.found is None or self.found.starts > 1:
            return None
        return self.found.updated_at - self.found.started_at


def run_progress(run: StudyRun, queued: Collection[str] = ()) -> StudyProgress:
    """Read the progress of a run from its folder.

    Args:
        queued: ids of runs that are pending or running in Slurm.
    """
    found = current_state(run.folder)
    state = WAITING if found is None else found.state
    if run.id in queued and state not in (DONE, RUNNING):
        state = QUEUED
    if found is None:
        return StudyProgress(run=run, state=state, step=0)
    step = found.step if state == DONE else max(found.step, last_recorded_step(run.folder))
    return StudyProgress(run=run, state=state, step=step, reason=found.reason, found=found)


def is_due(progress: StudyProgress) -> bool:
    """Whether a run should be started: it is neither done, nor running, nor queued."""
    return progress.state not in (DONE, RUNNING, QUEUED)


def predicted_seconds(run: StudyRun, finished: Sequence[StudyProgress], gpu: Optional[Gpu]) -> Optional[float]:
    """Predicted duration of a complete run.

    With a GPU, the planner's prediction. Otherwise it is extrapolated from the finished run with the same recipe and
    number of ranks whose FLOPs are closest; None without such a run.
    """
    if run.flops is None or run.padded_vocab is None:
        return None
    if gpu is not None:
        config = with_choices(run.config, gpu, run.world_size)
        planned = PlannedRun(
            config=config, gpu=gpu, world_size=run.world_size, padded_vocab=run.padded_vocab,
            document_length=documents_of(config, run.world_size).length,
        )  # fmt: skip
        # Of a batch schedule the planner predicts the last size: a smaller step takes its share of that time.
        num_steps = iterations.trained_samples(run.config, run.world_size) / iterations.global_batch_size(
            run.config, run.world_size
        )
        return step_time(planned).seconds * num_steps
    run_flops = run.flops
    similar = [
        (other.run.flops, other.seconds) for other in finished
        if other.run.flops and other.seconds
        and (other.run.recipe, other.run.world_size) == (run.recipe, run.world_size)
    ]  # fmt: skip
    if not similar:
        return None
    flops, seconds = min(similar, key=lambda pair: abs(pair[0] - run_flops))
    return run_flops * seconds / flops


def status_text(every: Sequence[StudyProgress]) -> str:
    """One line per run, and the number of runs in each state."""
    width = max(len(progress.run.label) for progress in every)
    lines = [
        f"{each.state:<10} {each.run.label:<{width}}  {each.run.id}  step {each.step:,} of {each.steps:,}"
        + (f"  {each.reason.splitlines()[0]}" if each.reason and each.state != DONE else "")
        for each in every
    ]
    counts = Counter(progress.state for progress in every)
    return "\n".join([*lines, ", ".join(f"{count} {state}" for state, count in counts.items())])


def write_study_file(study: Study, runs: Sequence[StudyRun]) -> Path:
    """Write the list of runs to the study's folder. Reports read it in addition to the runs' records."""
    content: dict[str, Any] = {
        "name": study.name,
        "runs": [
            {"id": run.id, "label": run.label, "folder": run.folder.name, "choice": dict(run.choice)} for run in runs
        ],
    }
    path = study.folder / STUDY_FILE
    atomic_write_json(path, content)
    return path
