"""In a Slurm job: what the supervisor leaves to the queue, and when a job may be requeued. Slurm's commands are
stand-ins here. `tests/faults/test_slurm.py` uses the real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Optional

import pytest
from test_supervisor import command

from megafp8.launch import slurm

STANDIN = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "{folder}/said"
case "$(basename "$0") $*" in
  squeue*"--jobs 17 "*%e) printf '%s\n' {others} "{end}" ;;
  squeue*"--jobs 17 "*) printf '%s\n' {others} "{state} {excluded}" ;;
  squeue*"--jobs 17_3 "*%e) echo "{end}" ;;
  squeue*"--jobs 17_3 "*) echo "{state} {excluded}" ;;
  *) exit {status} ;;
esac
"""


class Job:
    """A Slurm job as its batch script sees it."""

    def __init__(
        self, folder: Path, state: str = "RUNNING", restarts: int = 0, status: int = 0, excluded: str = "(null)",
        left_s: Optional[float] = None, is_task: bool = False,
    ):  # fmt: skip
        end = "N/A" if left_s is None else datetime.fromtimestamp(time.time() + left_s).isoformat(timespec="seconds")
        self.folder = folder
        for name in ("squeue", "scontrol"):
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            others = "'PENDING (null)' 'RUNNING (null)'" if is_task else ""  # of its array
            path.write_text(
                STANDIN.format(folder=folder, state=state, status=status, excluded=excluded, end=end, others=others)
            )
            path.chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(restarts),
        }  # fmt: skip
        if is_task:  # the last one, which has the array's number
            self.environment |= {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}

    def supervise(self, ends: str, *options: str) -> tuple[int, str]:
        """Exit status and messages."""
        words = command(self.folder / "run", ends, "--requeue", *options)
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60, env=self.environment)
        assert "Traceback" not in ended.stderr, ended.stderr
        return ended.returncode, ended.stderr

    @property
    def requeued(self) -> bool:
        said = self.folder / "said"
        return said.exists() and "scontrol requeue 17\n" in said.read_text()


def test_a_run_ended_by_slurm_is_requeued_and_not_restarted(tmp_path: Path) -> None:
    job = Job(tmp_path, restarts=2)
    status, told = job.supervise("preempted:40:40 done:60:60")
    assert status == 75 and job.requeued
    assert (tmp_path / "run/starts").read_text() == "1"
    assert "requeueing job 17 (requeue number 3)" in told


def test_crashes_are_restarted_here_before_a_requeue(tmp_path: Path) -> None:
    job = Job(tmp_path)
    status, _ = job.supervise("70:40:40 71:40:40 died:40:40", "--max-restarts", "2")
    assert (tmp_path / "run/starts").read_text() == "3"
    assert status == 70 and job.requeued


@pytest.mark.parametrize(("ends", "status"), [("done:60:60", 0), ("64:0:0", 64), ("65:40:40", 65), ("nothing", 3)])
def test_failures_that_a_requeue_cannot_fix_are_not_requeued(tmp_path: Path, ends: str, status: int) -> None:
    job = Job(tmp_path)
    assert job.supervise(ends)[0] == status
    assert not job.requeued


def test_a_refused_start_of_a_finished_run_is_not_requeued(tmp_path: Path) -> None:
    """It leaves the state unchanged. The command of an unfinished run has trained, and may do so elsewhere."""
    for before, is_mended in (("done", False), ("preempted", True)):
        folder = tmp_path / before
        folder.mkdir()
        job = Job(folder)
        job.supervise(f"{before}:60:60 nothing")
        (folder / "said").unlink(missing_ok=True)
        assert job.supervise(f"{before}:60:60 nothing")[0] == (70 if is_mended else 3)
        assert job.requeued == is_mended


def test_a_cancelled_job_is_not_requeued(tmp_path: Path) -> None:
    job = Job(tmp_path, state="COMPLETING")
    status, told = job.supervise("preempted:40:40")
    assert status == 75 and not job.requeued
    assert "job 17 is COMPLETING: not requeued" in told


def test_nothing_is_started_after_the_warning_of_the_end(tmp_path: Path) -> None:
    """It arrives once. A run that starts afterwards would be killed and lose its unsaved steps."""
    job = Job(tmp_path, left_s=100)
    status, told = job.supervise("70:40:40", "--least-time-s", "360")
    assert status == 75 and job.requeued and not (tmp_path / "run/starts").exists()
    assert " s are left: too little time to start" in told


@pytest.mark.parametrize("left_s", [1000, None])
def test_a_run_starts_with_time_left(tmp_path: Path, left_s: Optional[float]) -> None:
    assert Job(tmp_path, left_s=left_s).supervise("done:60:60", "--least-time-s", "360")[0] == 0


def test_requeues_are_limited(tmp_path: Path) -> None:
    job = Job(tmp_path, restarts=5)
    _, told = job.supervise("preempted:40:40", "--max-requeues", "5")
    assert not job.requeued and "already requeued 5 times" in told
    assert Job(tmp_path, restarts=4).supervise("preempted:40:40", "--max-requeues", "5")[0] == 75
    assert job.requeued


def test_a_job_that_repeatedly_starts_nothing_is_not_requeued(tmp_path: Path) -> None:
    """Each time so late in its time limit that a start would be too late. Three times in a row is enough."""
    said = tmp_path / "said"
    for _ in range(3):
        status, _ = (job := Job(tmp_path, left_s=100)).supervise("preempted:40:40", "--least-time-s", "360")
        assert status == 75 and job.requeued
        said.unlink()
    status, told = job.supervise("preempted:40:40", "--least-time-s", "360")
    assert status == 70 and not job.requeued
    assert "job 17 was requeued 3 times in a row without a checkpoint after step 0" in told


def test_requeues_after_which_the_run_saved_are_not_fruitless(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for step in (10, 20, 30, 40, 50):
        (tmp_path / "run/starts").unlink(missing_ok=True)
        assert job.supervise(f"preempted:{step}:{step}")[0] == 75 and job.requeued
        (tmp_path / "said").unlink()


def test_another_job_restarts_the_count(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / slurm.REQUEUES_FILE).write_text("job 16 saved_step 0\n" * 3)
    job = Job(tmp_path, left_s=100)
    assert job.supervise("preempted:40:40", "--least-time-s", "360")[0] == 75 and job.requeued


def test_requeues_that_cannot_be_counted_are_still_made(tmp_path: Path) -> None:
    (tmp_path / "run" / slurm.REQUEUES_FILE).mkdir(parents=True)
    job = Job(tmp_path, left_s=100)
    status, told = job.supervise("preempted:40:40", "--least-time-s", "360")
    assert status == 75 and job.requeued and "cannot count requeues: Is a directory" in told


def test_the_last_array_task_is_not_the_complete_array(tmp_path: Path) -> None:
    status, told = Job(tmp_path, left_s=100, is_task=True).supervise("70:40:40", "--least-time-s", "360")
    assert status == 75 and not (tmp_path / "run/starts").exists(), told
    said = (tmp_path / "said").read_text()
    assert "scontrol requeue 17_3\n" in said and "17 " not in said and "17\n" not in said


def put_back(job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, list[str]]:
    """Whether it was requeued, and the messages; in this process, where only its pauses make time pass."""
    for name, value in job.environment.items():
        monkeypatch.setenv(name, value)
    now = [0.0]
    monkeypatch.setattr(slurm.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(slurm.time, "sleep", lambda pause_s: now.__setitem__(0, now[0] + pause_s))
    monkeypatch.setattr(slurm.signal, "signal", lambda *_: None)
    told: list[str] = []
    return slurm.requeue(5, told.append), told


def test_a_refused_requeue_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_back, told = put_back(Job(tmp_path, status=1), monkeypatch)
    assert not is_back and told[-1].startswith("scontrol requeue 17: ")
    assert (tmp_path / "said").read_text().count("scontrol requeue") > 1


def test_a_requeue_waits_for_an_unavailable_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    for name in ("squeue", "scontrol"):
        path = tmp_path / "bin" / name
        away = f'[ -e "{tmp_path}/{name}-was-away" ] || {{ touch "{tmp_path}/{name}-was-away"; exit 1; }}\n'
        path.write_text(path.read_text().replace("bash\n", f"bash\n{away}", 1))
    assert put_back(job, monkeypatch)[0] and job.requeued


def decide_nodes(job: Job, *nodes: str) -> subprocess.CompletedProcess:
    script = Path(__file__).resolve().parents[3] / "launcher/check_nodes.py"
    words = [sys.executable, str(script), "judge", str(job.folder), "--requeue", "--nodes", *nodes]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, env=job.environment)


@pytest.mark.parametrize(("before", "after"), [("(null)", "n2"), ("n[7-9]", "n[7-9],n2")])
def test_a_job_is_requeued_without_its_bad_nodes(tmp_path: Path, before: str, after: str) -> None:
    job = Job(tmp_path, excluded=before)
    (tmp_path / "n1.json").write_text(
        '{"node": "n1", "problems": [], "software": "", "gpus": [], "clock_s": 0, "groups": []}'
    )
    ended = decide_nodes(job, "n1", "n2")
    assert ended.returncode == 70 and job.requeued, ended.stderr
    assert "nodes: n2: no report in time" in ended.stderr and "n1:" not in ended.stderr
    assert f"scontrol update JobId=17 ExcNodeList={after}\n" in (tmp_path / "said").read_text()


def test_an_error_of_every_node_is_not_requeued(tmp_path: Path) -> None:
    job = Job(tmp_path)
    ended = decide_nodes(job, "n1", "n2")
    assert ended.returncode == 70 and not job.requeued
    assert "wrong with every node" in ended.stderr


@pytest.mark.parametrize("num_errors", [0, 2])
def test_a_single_node_is_replaced_only_for_gpu_errors(tmp_path: Path, num_errors: int) -> None:
    gpu = (
        '{"index": 0, "name": "H200", "total_bytes": 9, "used_bytes": 0, "is_slowed": false, '
        f'"uncorrected_errors": {num_errors}}}'
    )
    (tmp_path / "n1.json").write_text(
        f'{{"node": "n1", "problems": ["torch: is not installed"], "software": "", "gpus": [{gpu}], "clock_s": 0, '
        '"groups": []}'
    )
    job = Job(tmp_path)
    assert decide_nodes(job, "n1").returncode == 70 and job.requeued == bool(num_errors)
