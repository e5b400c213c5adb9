"""A study's runs as job arrays of Slurm: one array for all runs of as many GPUs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from megafp8.errors import ConfigError
from megafp8.launch import slurm
from megafp8.launch.job import Job, build_job
from megafp8.studies.runs import StudyRun
from megafp8.studies.study import Study
from megafp8.utils.small_files import UnreadableFile, read_text
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
