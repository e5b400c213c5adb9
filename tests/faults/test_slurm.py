"""A real Slurm of two nodes on this machine: jobs of the launcher are preempted, lose a node, or exceed their time.
Each finishes by itself, with the result of a run without faults, bitwise."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_run import STEPS, FaultyRun
from slurm_cluster import NODES, Cluster, slurm_cluster, wait_until, why_not

from megafp8.launch import slurm
from megafp8.launch.job import Job
from megafp8.launch.supervisor import RESTARTS_FILE
from megafp8.resilience import fault_injection
from megafp8.resilience.run_state import current_state, last_recorded_step, read_run_state

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="slurm_") as name, slurm_cluster(Path(name)) as cluster:
        yield cluster
    assert list(cluster.processes()) == []


def submit(cluster: Cluster, options: str, words: list[str], **variables: str) -> int:
    """Submit a job to Slurm through the launcher; returns its number."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    command = [
        sys.executable, "launcher/slurm.py", *options.split(), "--gpus-per-node", "0", "--time-to-save-s", "20",
        "--setup", f"export PATH={Path(sys.executable).parent}:$PATH",
        "--environment", *(f"{name}={value}" for name, value in environment.items()), "--", *words,
    ]  # fmt: skip
    told = subprocess.run(command, cwd=ROOT, env=cluster.environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    return int(re.search(r": job (\d+)$", told.stdout.strip())[1])


class SlurmRun:
    """A run of two ranks as a job of two nodes, slow enough to be interrupted."""

    def __init__(self, cluster: Cluster, folder: Path, cache: Path, options: str = "--no-check-nodes", pause_s=0.3):
        self.cluster, self.run = cluster, FaultyRun("dp2", folder / "run", cache)
        words = f"{self.run.text(None)} --num-threads 1".split()
        plan = {fault_injection.FAULTS_VARIABLE: f"sleep:seconds={pause_s},at=step.begin,times=9",
                fault_injection.FIRED_VARIABLE: str(self.run.fired)}  # fmt: skip
        self.job = submit(cluster, f"--name hit --nodes 2 {options}", words, **plan)

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: last_recorded_step(self.run.folder) >= step, f"step {step}",
                   lambda: self.cluster.output(self.job))  # fmt: skip

    def ends(self) -> list[str]:
        """The final states of the starts whose supervisor could record them."""
        lines = (self.run.folder / RESTARTS_FILE).read_text().splitlines()
        return [json.loads(line)["state"] for line in lines]

    def assert_done_like(self, unbroken: FaultyRun) -> None:
        assert self.cluster.wait_for_state(self.job, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", (
            self.cluster.output(self.job)
        )
        state = current_state(self.run.folder)
        assert state is not None and state.state == "done"
        assert self.run.fingerprint(STEPS) == unbroken.fingerprint(STEPS)
        assert self.run.losses() == unbroken.losses()


@pytest.mark.slow
def test_text_is_preprocessed_by_an_array_and_merged(cluster: Cluster, tmp_path: Path) -> None:
    """Four parts on two nodes, and a job that waits for them: the bytes of one machine."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"document {n} " * (n % 50)}) + "\n" for n in range(5000)))
    flags = f"--input {text} --append-eod --tokenizer-type ByteLevelTokenizer --workers 1"
    file = tmp_path / "job.yaml"
    file.write_text(
        f"name: text\ngpus_per_node: 0\ncpus_per_node: 2\nexclusive: false\nlogs: {tmp_path}/logs\nparts: 4\n"
        f"preprocess: {flags} --output-prefix {tmp_path}/parts/text\nproject: {ROOT}\n"
        f"setup: export PATH={Path(sys.executable).parent}:$PATH\nenvironment: {{PYTHONPATH: {ROOT}}}\n"
    )
    command = [sys.executable, "-m", "megafp8.cli.main"]
    options = {"cwd": ROOT, "env": cluster.environment, "capture_output": True, "text": True}
    told = subprocess.run([*command, "slurm", str(file)], **options)
    merge = re.search(r"merge of the parts: job (\d+), after job (\d+)$", told.stdout.strip())
    assert told.returncode == 0 and merge, told.stdout + told.stderr
    log = tmp_path / f"logs/{merge[1]}_0.log"
    wait_until(lambda: "text_document: 5000" in (log.read_text() if log.exists() else "").replace(",", ""), "the merge",
               lambda: "".join(path.read_text() for path in (tmp_path / "logs").glob("*.log")))  # fmt: skip
    for number in range(1, 5):
        assert f"part {number}/4 is complete" in (tmp_path / f"logs/{merge[2]}_{number}.log").read_text()
    subprocess.run([*command, "preprocess", *flags.split(), "--output-prefix", f"{tmp_path}/one/text"], check=True,
                   **options)  # fmt: skip
    for suffix in (".bin", ".idx"):
        parts, one = (tmp_path / f"{name}/text_text_document{suffix}" for name in ("parts", "one"))
        assert parts.read_bytes() == one.read_bytes()


@pytest.mark.slow
def test_a_preempted_job_resumes_bitwise(
    cluster: Cluster, tmp_path: Path, cache: Path, unbroken_command: FaultyRun
) -> None:
    """Slurm sends SIGTERM to srun's processes on both nodes. The job saves and is requeued."""
    hit = SlurmRun(cluster, tmp_path, cache)
    hit.wait_for_step(3)
    cluster.ask("scancel", "--signal=TERM", str(hit.job))
    cluster.wait_for_requeue(hit.job)
    assert hit.ends() == ["preempted"] and STEPS > hit.run.newest >= 3
    hit.assert_done_like(unbroken_command)
    assert hit.ends() == ["preempted", "done"]
    told = cluster.output(hit.job)
    assert f"requeueing job {hit.job}" in told and "step 16/16" in told
    logs = list((hit.run.folder / "logs/ranks").rglob("std*.log"))
    assert {path.relative_to(hit.run.folder / "logs/ranks").parts[0] for path in logs} == {*NODES}


@pytest.mark.long
def test_a_dead_node_loses_only_the_last_steps(
    cluster: Cluster, tmp_path: Path, cache: Path, unbroken_command: FaultyRun
) -> None:
    hit = SlurmRun(cluster, tmp_path, cache)
    hit.wait_for_step(3)
    cluster.cut_power(NODES[1])
    cluster.wait_for_requeue(hit.job)
    cluster.boot(NODES[1])
    hit.assert_done_like(unbroken_command)


@pytest.mark.long
def test_a_job_saves_before_its_time_limit(
    cluster: Cluster, tmp_path: Path, cache: Path, unbroken_command: FaultyRun
) -> None:
    """Its limit is three minutes. The warning comes 80 to 140 s before the end; nine of its steps take ten seconds."""
    hit = SlurmRun(cluster, tmp_path, cache, "--no-check-nodes --time 3", pause_s=10)
    cluster.wait_for_requeue(hit.job)
    assert hit.ends() == ["preempted"] and STEPS > hit.run.newest > 0
    hit.assert_done_like(unbroken_command)


@pytest.mark.long
def test_nodes_are_checked_first(cluster: Cluster, tmp_path: Path, cache: Path) -> None:
    hit = SlurmRun(cluster, tmp_path, cache, "", pause_s=0)
    assert cluster.wait_for_state(hit.job, "COMPLETED", "FAILED") == "COMPLETED"
    assert "nodes: 2 nodes passed" in cluster.output(hit.job)


@pytest.mark.long
def test_a_study_of_four_runs_is_a_job_array(cluster: Cluster, tmp_path: Path) -> None:
    path, folder = tmp_path / "four.yaml", tmp_path / "runs"
    path.write_text(
        f"""
flags: >
  --num-layers 1 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 --bf16
  --hidden-size 32 --mock-data --tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 16
  --eval-iters 1 --num-workers 0 --num-threads 1 --no-save-optim --train-iters 3
grid: {{lr: [1e-3, 2e-3], seed: [1, 2]}}
slurm:
  gpus_per_node: 0
  check_nodes: false
  time_to_save_s: 20
  setup: export PATH={Path(sys.executable).parent}:$PATH
  environment: {{PYTHONPATH: {ROOT}}}
""",
        encoding="utf-8",
    )

    def launch(*options: str) -> list[str]:
        command = [sys.executable, "launcher/scaling_study.py", str(path), "--folder", str(folder), *options]
        told = subprocess.run(command, cwd=ROOT, env=cluster.environment, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        return told.stdout.splitlines()

    assert re.search(r": job \d+, 4 runs$", launch()[-1])
    assert "4 runs, 0 to start" in launch()[-1]
    wait_until(lambda: not cluster.ask("squeue", "--noheader"), "the array to end")
    assert launch("--status")[-1] == "4 done"


# ---- runs that do not train: Slurm and the scripts -----------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout whose training ends immediately."""
    (tmp_path / "launcher").symlink_to(ROOT / "launcher")
    (tmp_path / "pretrain_gpt.py").symlink_to(ROOT / "tests/standin_training.py")
    return tmp_path


def job_of(project: Path, **fields) -> Job:
    of_all = {
        "name": "standin", "training": (), "project": str(project), "gpus_per_node": 0, "exclusive": False,
        "setup": f"export PATH={Path(sys.executable).parent}:$PATH", "environment": {"PYTHONPATH": str(ROOT)},
    }  # fmt: skip
    return Job(**of_all | {"check_nodes": False} | fields)


def seen(folder: Path) -> dict:
    """What rank 0 of a stand-in recorded."""
    return json.loads((folder / "seen0").read_text())


def submit_job(cluster: Cluster, job: Job, monkeypatch: pytest.MonkeyPatch) -> int:
    path = Path(job.project, "job.sbatch")
    path.write_text(slurm.script(job))
    monkeypatch.setenv("SLURM_CONF", str(cluster.configuration))
    return slurm.submit(path)


@pytest.mark.slow
def test_an_array_runs_each_of_its_runs(cluster: Cluster, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four, two at a time, each in the folder and with the flags of its line."""
    runs = tuple(("--lr", f"{index}e-3", "--save", f"runs/{index}", "--load", f"runs/{index}") for index in range(4))
    array = submit_job(cluster, job_of(project, runs=runs, array_limit=2, logs="runs/logs"), monkeypatch)
    wait_until(lambda: cluster.ask("squeue", "-h", "-j", str(array)) == "", "the array to end")
    for index, run in enumerate(runs):
        log = (project / f"runs/logs/{array}_{index}.log").read_text()
        assert seen(project / f"runs/{index}")["words"] == list(run), log
        assert "done at step 1; finished" in log
    states = {line.split()[1] for line in cluster.ask("squeue", "-h", "-t", "all", "-r", "-o", "%i %T").splitlines()
              if line.startswith(f"{array}_")}  # fmt: skip
    assert states == {"COMPLETED"}


@pytest.mark.long
def test_a_job_is_requeued_without_its_bad_node(
    cluster: Cluster, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first node's GPU has memory errors."""
    tool = project / "bad/nvidia-smi"
    tool.parent.mkdir()
    errors = "case $1 in --query-gpu=index,*) echo '0, H200, 9, 0, 2, Not Active' ;; *) exit 1 ;; esac"
    tool.write_text(f"#!/bin/sh\n{errors}\n")
    tool.chmod(0o755)
    broken = f'\n[ "$SLURMD_NODENAME" != {NODES[0]} ] || export PATH={tool.parent}:$PATH'
    job = job_of(
        project, training=("--save", "run", "--load", "run"), check_nodes=True, sbatch={"nodelist": NODES[0]}
    )  # fmt: skip
    number = submit_job(cluster, dataclasses.replace(job, setup=f"{job.setup}{broken}"), monkeypatch)
    cluster.wait_for_requeue(number)
    told = cluster.output(number)
    assert f"nodes: {NODES[0]}: GPU 0: 2 uncorrected errors" in told and f"nodes: without {NODES[0]}" in told
    cluster.ask("scontrol", "update", f"JobId={number}", "ReqNodeList=")  # so that there is another one
    assert cluster.wait_for_state(number, "COMPLETED", "FAILED") == "COMPLETED", cluster.output(number)
    assert seen(project / "run")["node"] == NODES[1]


@pytest.mark.long
def test_a_preempting_partition_takes_and_returns_the_nodes(
    cluster: Cluster, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"PYTHONPATH": str(ROOT), "STANDIN_WAITS": "1"}
    fields = {"training": ("--save", "run", "--load", "run"), "exclusive": True, "environment": environment}
    number = submit_job(cluster, job_of(project, **fields), monkeypatch)
    wait_until((project / "run/seen0").exists, "the run to begin", lambda: cluster.output(number))
    options = ["--partition=urgent", "--nodes=2", "--exclusive", f"--output={project}/urgent", "--wrap=true"]
    urgent = cluster.ask("sbatch", "--parsable", *options)
    cluster.wait_for_state(int(urgent), "COMPLETED")
    assert read_run_state(project / "run").state == "preempted"
    assert cluster.job(number)["Restarts"] == "1"
    cluster.wait_for_requeue(number)
    (project / "run/seen0").unlink()
    wait_until((project / "run/seen0").exists, "the run to go on", lambda: cluster.output(number))
    cluster.ask("scancel", str(number))


@pytest.mark.slow
def test_a_cancelled_job_stays_cancelled(cluster: Cluster, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the run a cancellation is the same as a preemption."""
    environment = {"PYTHONPATH": str(ROOT), "STANDIN_WAITS": "1"}
    job = job_of(project, training=("--save", "run", "--load", "run"), environment=environment)
    number = submit_job(cluster, job, monkeypatch)
    wait_until((project / "run/seen0").exists, "the run to begin", lambda: cluster.output(number))
    cluster.ask("scancel", str(number))
    wait_until(lambda: cluster.ask("squeue", "-h", "-j", str(number)) == "", "the job to end")
    assert read_run_state(project / "run").state == "preempted"
    assert f"job {number} is COMPLETING: not requeued" in (project / f"run/logs/{number}.log").read_text()
    assert cluster.job(number)["JobState"] == "CANCELLED"
