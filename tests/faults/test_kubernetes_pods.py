"""Manifests of Kubernetes, with a process of this machine for each pod. There is no cluster here: these tests take over
what Kubernetes, JobSet and Kubeflow Trainer do, as `tests/kubernetes_pods.py` says."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
from pathlib import Path
from typing import Any, Optional

import pytest
from kubernetes_pods import documents, jobset_spec, start_pod
from slurm_cluster import wait_until

from benchmarks.ports import free_ports
from megafp8.errors import INTERNAL, PREEMPTED
from megafp8.launch.job import build_job, check_job
from megafp8.launch.kubernetes import JOBSET, manifests
from megafp8.resilience import fault_injection
from megafp8.resilience.run_lock import LOCK_FILE
from megafp8.resilience.run_state import last_recorded_step, read_run_state
from megafp8.utils.process import Process

pytestmark = pytest.mark.slow
MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 63 "
    "--num-threads 1"
)
SAVE = "--save run --load run"
DATA = "--mock-data"


def pods(folder: Path, flags: str = "", kind: Optional[str] = None, **fields: Any) -> dict[str, dict[str, Any]]:
    """The objects of a job of two nodes without GPUs, whose claim is a folder of this machine."""
    plain = {
        "name": "tiny", "nodes": "2", "gpus_per_node": "0", "image": "megafp8", "claim": "shared",
        "project": str(folder), "time_to_save_s": "20", "training": f"{MODEL} {SAVE} {flags}", **fields,
    }  # fmt: skip
    job = build_job(plain)
    check_job(job)
    return documents(manifests(job, kind))


def start(objects: dict[str, dict[str, Any]], count: int = 2) -> list[subprocess.Popen]:
    (port,) = free_ports(1)
    return [start_pod(objects, index, port) for index in range(count)]


def statuses(started: list[subprocess.Popen]) -> list[int]:
    told = [process.communicate(timeout=240)[0] for process in started]
    print("\n".join(told))
    return [process.returncode for process in started]


def test_two_pods_of_a_jobset_train(tmp_path: Path) -> None:
    objects = pods(tmp_path, f"{DATA} --train-iters 3", JOBSET)
    assert statuses(start(objects)) == [0, 0]
    state = read_run_state(tmp_path / "run")
    assert (state.state, state.step, state.world_size) == ("done", 3, 2)
    assert state.process.job == "uid-1"
    logs = tmp_path / "run/logs/ranks"
    assert {path.name for path in logs.iterdir()} == {"tiny-node-0-0", "tiny-node-0-1"}


def test_a_preempted_pod_of_a_trainjob_saves_and_new_pods_resume(tmp_path: Path) -> None:
    slow = {fault_injection.FAULTS_VARIABLE: "sleep:seconds=0.5,at=step.begin,times=99"}
    training = f"{DATA} --train-iters 12"
    started = start(pods(tmp_path, training, environment=slow))
    try:
        wait_until(lambda: last_recorded_step(tmp_path / "run") >= 1, "a step")
        started[1].send_signal(signal.SIGTERM)
        first, second = statuses(started)
    finally:
        for process in started:
            process.kill()
    assert (first, second) == (PREEMPTED, INTERNAL)
    saved = read_run_state(tmp_path / "run").saved_step
    assert saved and 1 <= saved < 12
    assert statuses(start(pods(tmp_path, training))) == [0, 0]
    state = read_run_state(tmp_path / "run")
    assert (state.state, state.step) == ("done", 12)


def test_another_pod_waits_for_the_first_one_to_report(tmp_path: Path) -> None:
    """Before the run has a state its status is that of torchrun."""
    objects = pods(tmp_path, "--data-path absent --split 1,0,0 --train-iters 3")
    started = start(objects)
    assert started[0].wait(240) == 1
    assert started[1].poll() is None  # it waits for the end of the job
    started[1].send_signal(signal.SIGTERM)
    assert statuses(started)[1] == INTERNAL
    (job,) = jobset_spec(objects)["replicatedJobs"]
    (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [64, 65, 66, 73, 74]


def test_the_first_pod_removes_the_lock_of_an_earlier_one(tmp_path: Path) -> None:
    """Whose processes it does not know, so that it would wait for 5 minutes of silence."""
    earlier = Process(host="tiny-node-0-0", place="another pod", pid=17, started=1, job="uid-1")
    lock = tmp_path / "run" / LOCK_FILE
    lock.parent.mkdir()
    lock.write_text(json.dumps(dataclasses.asdict(earlier)))
    assert statuses(start(pods(tmp_path, f"{DATA} --train-iters 2", nodes="1"), 1)) == [0]


def test_a_pod_of_an_array_trains_its_run(tmp_path: Path) -> None:
    runs = "--seed 1 --save a --load a\n--seed 2 --save b --load b\n"
    training = f"{MODEL} {DATA} --train-iters 2"
    objects = pods(tmp_path, nodes="1", training=training, runs=runs, logs="logs")
    assert statuses([start_pod(objects, 1, port=0)]) == [0]
    assert read_run_state(tmp_path / "b").state == "done" and not (tmp_path / "a").exists()
