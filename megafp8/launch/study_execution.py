"""A study's runs as job arrays of Slurm: one array for all runs of as many GPUs.

A study's runs as processes of this machine, some at a time, each with GPUs of its own where there are any.

How far a study is, and how long the rest will take. The run-state file of each run is the judge.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.config import derived
from megafp8.device.gpus import Gpu
from megafp8.errors import INTERNAL, PREEMPTED, ConfigError, RunFolderInUse
from megafp8.launch import slurm
from megafp8.launch.job import Job, build_job
from megafp8.launch.process_pool import OUTPUT_FILE, Batch, BatchRun, Outcome
from megafp8.launch.study import Study, StudyRun, labels_text
from megafp8.planning.planned_run import PlannedRun
from megafp8.planning.step_time import step_time
from megafp8.resilience.run_state import RunState, current_state, last_recorded_step
from megafp8.utils.files import UnreadableFile, read_text
from megafp8.utils.strict_json import parse_json

SUBMITTED_FILE = "submitted.jsonl"
GPUS_PER_NODE = 8


def build_jobs(study: Study, runs: Sequence[StudyRun]) -> list[Job]:
    """The job arrays of these runs. The study's `slurm` has the fields of a job; `gpus_per_node` is the size of a node.

    Raises:
        ConfigError: fields that a job does not have or that a study gives, GPUs that do not fill nodes, or runs that
            share a node and do not say how many of its cores they need.
    """
    if own := [name for name in ("name", "training", "runs", "nodes", "ranks_per_node") if name in study.slurm]:
        raise ConfigError(f"slurm: {', '.join(own)}: follow from the study; remove them")
    sizes = list(dict.fromkeys(run.world_size for run in runs))
    jobs = []
    for size in sizes:
        name = study.name if len(sizes) == 1 else f"{study.name}-{size}"
        fields = {
            "name": name, "logs": str(study.folder / "logs" / name), **study.slurm, **shape_of(study, size),
            "runs": [list(run.flags[len(study.common.flags) :]) for run in runs if run.world_size == size],
        }  # fmt: skip
        jobs.append(build_job(fields, study.common.flags))
        check_share(jobs[-1])
    return jobs


def shape_of(study: Study, world_size: int) -> dict[str, str]:
    """Nodes and GPUs, or ranks, of a run. Less than a node shares it.

    Raises:
        ConfigError: more than a node, and not a multiple of it.
    """
    try:
        per_node = int(study.slurm.get("gpus_per_node", GPUS_PER_NODE))
    except ValueError:
        raise ConfigError(f"slurm: gpus_per_node: {study.slurm['gpus_per_node']!r} is no whole number") from None
    if per_node == 0:
        return {"gpus_per_node": "0", "ranks_per_node": str(world_size)}
    if world_size <= per_node:
        shared = {"exclusive": "false"} if world_size < per_node and "exclusive" not in study.slurm else {}
        return {"gpus_per_node": str(world_size)} | shared
    if world_size % per_node:
        raise ConfigError(f"gpus: {world_size} are no multiple of a node's {per_node} (slurm: gpus_per_node)")
    return {"gpus_per_node": str(per_node), "nodes": str(world_size // per_node)}


def check_share(job: Job) -> None:
    """
    Raises:
        ConfigError: a job that shares its node, and would get one core of it.
    """
    if not job.exclusive and not job.cpus_per_node:
        raise ConfigError(
            f"slurm: runs of {job.world_size} GPUs or ranks share a node, and Slurm gives one core unless it is asked: "
            "give cpus_per_node for one run, and its memory if the cluster's default for these is too little (sbatch: "
            "{mem: 64G}); or exclusive: true"
        )


def submit(study: Study, runs: Sequence[StudyRun]) -> list[str]:
    """Write the scripts into the study's folder and hand them to Slurm; a line for each.

    Raises:
        ConfigError: as `build_jobs`, not from the project's folder, or Slurm refuses a script.
    """
    jobs = build_jobs(study, runs)
    if away := [job.project for job in jobs if Path(job.project).resolve() != Path.cwd()]:
        raise ConfigError(f"jobs run in {away[0]}, which the study's paths are relative to: start this from there")
    told = []
    for job in jobs:
        path = Path(job.log_folder, f"{job.name}.sbatch")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(slurm.script(job), encoding="utf-8")
        number = slurm.submit(path)
        ids = [run.id for run in runs if run.world_size == job.world_size]
        with open(study.folder / SUBMITTED_FILE, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"job": number, "runs": ids}) + "\n")
        told.append(f"{path}: job {number}, {len(ids)} runs")
    return told


def queued_ids(folder: Path) -> set[str]:
    """Runs of a study that Slurm still has, waiting or running; none where there is no squeue.

    Raises:
        ConfigError: squeue fails or the list of jobs is damaged, so that runs might be submitted twice.
    """
    path = folder / SUBMITTED_FILE
    try:
        submitted = [(job["job"], job["runs"]) for job in map(parse_json, read_text(path).splitlines())]
    except (UnreadableFile, TypeError, KeyError) as error:
        if isinstance(error, UnreadableFile) and error.is_missing:
            return set()
        raise ConfigError(f"{path} is damaged ({error}): delete it if no job of this study is in the queue") from error
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


def command_of(run: StudyRun, script: Path) -> list[str]:
    """The command that trains a run on this machine."""
    python = [sys.executable]
    if run.world_size > 1:
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.world_size)]
    return [*python, str(script), *run.flags]


def visible_gpus() -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES may name on this machine; empty without GPUs."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        parts = [part.strip() for part in chosen.split(",") if part.strip()]
        return tuple(itertools.takewhile(lambda part: not part.startswith("-"), parts))  # as CUDA: -1 ends the list
    if shutil.which("nvidia-smi") is None:
        return ()
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return tuple(str(number) for number, _ in enumerate(re.findall(r"^GPU ", listed, re.MULTILINE)))


def check_gpus(runs: Sequence[StudyRun], gpus: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: a run needs more GPUs than there are.
    """
    if large := [run.label for run in runs if gpus and run.world_size > len(gpus)]:
        raise ConfigError(f"{labels_text(large)}: more GPUs (gpus) than the {len(gpus)} of this machine")


def run_here(
    runs: Sequence[StudyRun], script: Path, parallel: Optional[int], gpus: Sequence[str], tell: Callable[[str], None]
) -> int:
    """Run what is due until nothing is left or a signal came.

    Args:
        script: pretrain_gpt.py.
        parallel: runs at a time; None: as many as the GPUs hold, and one without GPUs.
        gpus: of this machine; enough for every run (`check_gpus`).
        tell: shows a line.

    Returns:
        0 when all are done, `PREEMPTED` after a signal, else the first failed run's exit status.
    """
    statuses: list[int] = []
    of_folder = {run.folder: run for run in runs}

    def is_still_due(run: BatchRun) -> bool:
        now = progress_of(of_folder[run.folder])
        if not is_due(now):  # someone else started it meanwhile
            tell(f"{now.state:<10} {run.name}")
        return is_due(now)

    def tell_start(run: BatchRun, gpus: Sequence[str]) -> None:
        tell(f"{'starts':<10} {run.name}" + (f" on GPU {','.join(gpus)}" if gpus else ""))

    def tell_end(outcome: Outcome) -> None:
        statuses.append(status_of(outcome))
        tell(end_text(outcome))

    batch = Batch(parallel or len(gpus) or 1, gpus, tell_start=tell_start, tell_end=tell_end, is_due=is_still_due)
    batch.run([
        BatchRun(name=run.label, command=tuple(command_of(run, script)), folder=run.folder, gpus=run.world_size)
        for run in runs
    ])  # fmt: skip
    if batch.is_asked_to_stop:
        return PREEMPTED
    return next((status for status in statuses if status), 0)


def status_of(outcome: Outcome) -> int:
    """What a run's end means for the study; 0 also for one that its flags stopped, or that someone else has."""
    ended_well = outcome.state is not None and outcome.state.state in (DONE, STOPPED)
    return 0 if ended_well or is_elsewhere(outcome) else outcome.exit_status or INTERNAL


def end_text(outcome: Outcome) -> str:
    """What became of a run, in a line."""
    never = "preempted" if outcome.is_stopped else "failed"
    label, state = outcome.run.name, never if outcome.state is None else outcome.state.state
    if is_elsewhere(outcome):
        return f"{RUNNING:<10} {label}, started by someone else"
    if state in (DONE, STOPPED):
        return f"{state:<10} {label} in {outcome.seconds:.0f} s"
    reason = outcome.reason.splitlines()[0]
    return f"{state:<10} {label}: {reason}; see {outcome.run.folder / OUTPUT_FILE}"


def is_elsewhere(outcome: Outcome) -> bool:
    """Whether someone else has the folder: torchrun does not say it, but then the state is of a run that goes on."""
    is_running = outcome.state is not None and outcome.state.state == RUNNING
    return is_running or outcome.exit_status == RunFolderInUse.exit_status


STUDY_FILE = "study.json"
WAITING, QUEUED, RUNNING, DONE, STOPPED = "waiting", "queued", "running", "done", "stopped"


@dataclass(frozen=True, kw_only=True)
class StudyProgress:
    """One run now.

    Attributes:
        state: as in `run_state.py`; `waiting` for a run that never began, `queued` for one that Slurm will start.
        step: last step done.
    """

    run: StudyRun
    state: str
    step: int
    reason: str = ""
    found: Optional[RunState] = None

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return derived.train_iters(self.run.config, self.run.world_size)

    @property
    def seconds(self) -> Optional[float]:
        """That the whole run took; None unless it was done in one start."""
        if self.state != DONE or self.found is None or self.found.starts > 1:
            return None
        return self.found.updated_at - self.found.started_at


def progress_of(run: StudyRun, queued: Collection[str] = ()) -> StudyProgress:
    """Look at a run's folder.

    Args:
        queued: ids of runs that Slurm has.
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
    """Whether a run is to be started: neither done, nor running, nor about to be."""
    return progress.state not in (DONE, RUNNING, QUEUED)


def predicted_seconds(run: StudyRun, finished: Sequence[StudyProgress], gpu: Optional[Gpu]) -> Optional[float]:
    """How long a whole run takes.

    By the planner for a kind of GPU; else at the FLOP/s of the finished run of the same recipe and ranks whose FLOPs
    are nearest; None without one.
    """
    if run.flops is None or run.padded_vocab is None:
        return None
    if gpu is not None:
        planned = PlannedRun(config=run.config, gpu=gpu, world_size=run.world_size, padded_vocab=run.padded_vocab)
        return step_time(planned).seconds * derived.train_iters(run.config, run.world_size)
    alike = [
        (one.run.flops, one.seconds) for one in finished
        if one.run.flops and one.seconds and (one.run.recipe, one.run.world_size) == (run.recipe, run.world_size)
    ]  # fmt: skip
    if not alike:
        return None
    flops, seconds = min(alike, key=lambda pair: abs(pair[0] - run.flops))
    return run.flops * seconds / flops


def status_text(every: Sequence[StudyProgress]) -> str:
    """A line for each run, and how many are in which state."""
    width = max(len(one.run.label) for one in every)
    lines = [
        f"{one.state:<10} {one.run.label:<{width}}  {one.run.id}  step {one.step:,} of {one.steps:,}"
        + (f"  {one.reason.splitlines()[0]}" if one.reason and one.state != DONE else "")
        for one in every
    ]
    counts = Counter(one.state for one in every)
    return "\n".join([*lines, ", ".join(f"{count} {state}" for state, count in counts.items())])


def write_study_file(study: Study, runs: Sequence[StudyRun]) -> Path:
    """Write into the study's folder which runs it has: what a report reads beside their records."""
    content: dict[str, Any] = {
        "name": study.name,
        "runs": [
            {"id": run.id, "label": run.label, "folder": run.folder.name, "choice": dict(run.choice)} for run in runs
        ],
    }
    study.folder.mkdir(parents=True, exist_ok=True)
    path = study.folder / STUDY_FILE
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path
