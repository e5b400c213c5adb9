"""A study's runs as job arrays of Slurm: their shape and their script. Nothing is submitted twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafp8.config import flags
from megafp8.errors import ConfigError
from megafp8.launch import slurm
from megafp8.launch.job import PROJECT
from megafp8.launch.study import expand
from megafp8.launch.study_execution import build_jobs, is_due, queued_ids, run_progress, submit

GRID = "grid: {lr: [1e-3, 2e-3], hidden_size: [32], train_iters: [3], gpus: [%s]}"
SHARED = "\nslurm: {cpus_per_node: 8}"


def jobs_of(study):
    return build_jobs(study, expand(study))


def test_all_runs_of_as_many_gpus_are_one_array(write_study) -> None:
    study = write_study(
        GRID % "1, 16" + "\nslurm: {time: 4:00:00, partition: gpu, gpus_per_node: 8, array_limit: 2, "
        "cpus_per_node: 8, sbatch: {mem: 64G}}",
    )
    runs = expand(study)
    small, large = jobs_of(study)
    assert (small.name, small.nodes, small.gpus_per_node, small.exclusive) == ("small-1", 1, 1, False)
    assert (large.name, large.nodes, large.gpus_per_node, large.exclusive) == ("small-16", 2, 8, True)
    assert (small.time, small.partition, small.array_limit) == ("4:00:00", "gpu", 2)
    for job in (small, large):
        mine = [run for run in runs if run.world_size == job.world_size]
        assert [flags.parse_with_problems(words)[0].config for words in job.commands] == [run.config for run in mine]
    lines = slurm.script(small).splitlines()
    assert {"#SBATCH --array=0-1%2", "#SBATCH --cpus-per-task=8", "#SBATCH --mem=64G"} <= {*lines}


def test_ranks_on_cpus(write_study) -> None:
    (job,) = jobs_of(write_study(GRID % "4" + "\nslurm: {gpus_per_node: 0}"))
    assert (job.nodes, job.gpus_per_node, job.ranks, job.world_size) == (1, 0, 4, 4)


@pytest.mark.parametrize(
    ("gpus", "fields", "told"),
    [
        ("12", "gpus_per_node: 8", "gpus: 12 is not a multiple of the 8 of a node"),
        ("1", "nodes: 2", "slurm: nodes: set by the study"),
        ("1", "gpus_per_node: eight", "gpus_per_node: 'eight' must be an integer"),
        ("1", "time: 1:00:00", "runs of 1 GPUs or ranks share a node, and Slurm's default is one core"),
        ("1", "partitoin: gpu", "unknown key 'partitoin'; did you mean partition?"),
    ],
)
def test_wrong_jobs(write_study, gpus: str, fields: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        jobs_of(write_study(GRID % gpus + f"\nslurm: {{{fields}}}"))
    assert told in str(refused.value)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch) -> Path:
    """sbatch and squeue that answer from files. The folder has `queue`, the output of squeue."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "sbatch").write_text(f'#!/bin/sh\necho 7\ncp "$2" {folder}/script\n')
    (folder / "squeue").write_text(f"#!/bin/sh\ncat {folder}/queue\n")
    for name in ("sbatch", "squeue"):
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


def test_queued_runs_are_not_due(write_study, cluster: Path, monkeypatch) -> None:
    monkeypatch.chdir(PROJECT)
    study = write_study(GRID % "1" + SHARED)
    runs = expand(study)
    assert queued_ids(study.folder) == set()
    (told,) = submit(study, runs)
    assert "job 7, 2 runs" in told
    assert (cluster / "script").read_text() == slurm.script(build_jobs(study, runs)[0])
    assert json.loads((study.folder / "submitted.jsonl").read_text()) == {"job": 7, "runs": [run.id for run in runs]}
    (cluster / "queue").write_text("3_0\n7_1\n70_0\n")
    queued = queued_ids(study.folder)
    assert queued == {runs[1].id}
    states = [run_progress(run, queued) for run in runs]
    assert [one.state for one in states] == ["waiting", "queued"] and list(map(is_due, states)) == [True, False]


def test_a_failing_squeue_is_reported(write_study, cluster: Path, monkeypatch) -> None:
    monkeypatch.chdir(PROJECT)
    study = write_study(GRID % "1" + SHARED)
    submit(study, expand(study))
    with pytest.raises(ConfigError, match="squeue: cat: "):
        queued_ids(study.folder)


@pytest.mark.parametrize("line", ["[" * 10_000, '{"job": 3}', "[]", '{"job": 3, "ru'])
def test_a_damaged_list_of_jobs(write_study, line: str) -> None:
    study = write_study(GRID % "1" + SHARED)
    study.folder.mkdir(parents=True, exist_ok=True)
    (study.folder / "submitted.jsonl").write_text(line)
    with pytest.raises(ConfigError, match="submitted.jsonl is damaged"):
        queued_ids(study.folder)


def test_submitting_from_elsewhere_is_refused(write_study, cluster: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = write_study(GRID % "1" + SHARED)
    with pytest.raises(ConfigError, match="start this command in that folder"):
        submit(study, expand(study))
    assert not (cluster / "script").exists()
