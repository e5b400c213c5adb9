"""Pods as processes of this machine: the command of a manifest's container, as a node of Kubernetes would start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
# Kubeflow Trainer sets them in the pods of a TrainJob (pkg/runtime/framework/plugins/torch/torch.go).
TRAINER_PORT = "29500"


def documents(text: str) -> dict[str, dict[str, Any]]:
    """The objects of a manifest by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def jobset_spec(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The spec of the JobSet, or of that which Kubeflow Trainer would make."""
    if "JobSet" in objects:
        return objects["JobSet"]["spec"]
    return objects["TrainingRuntime"]["spec"]["template"]["spec"]


def container(objects: dict[str, dict[str, Any]], replicated: int = 0) -> dict[str, Any]:
    """The container of the pods of a replicated job."""
    template = jobset_spec(objects)["replicatedJobs"][replicated]["template"]["spec"]["template"]
    (found,) = template["spec"]["containers"]
    return found


def expand(text: str, variables: dict[str, str]) -> str:
    """What Kubernetes makes of a word of a command: `$(NAME)` is a variable, and `$$` is `$`.

    After Kubernetes' third_party/forked/golang/expansion/expand.go.
    """
    result, position = "", 0
    while position < len(text):
        char, following = text[position], text[position + 1 : position + 2]
        if char == "$" and following == "$":
            result, position = result + "$", position + 2
            continue
        end = text.find(")", position) if following == "(" else -1
        if char == "$" and end > 0:
            name = text[position + 2 : end]
            result, position = result + variables.get(name, f"$({name})"), end + 1
            continue
        result, position = result + char, position + 1
    return result


def pod_variables(objects: dict[str, dict[str, Any]], index: int) -> dict[str, str]:
    """The environment of a pod of the first replicated job."""
    job_spec = jobset_spec(objects)["replicatedJobs"][0]["template"]["spec"]
    name = next(iter(objects.values()))["metadata"]["name"]
    fields = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        "metadata.labels['jobset.sigs.k8s.io/jobset-uid']": "uid-1",
    }
    variables = {"HOSTNAME": f"{name}-node-0-{index}", "JOB_COMPLETION_INDEX": str(index)}
    for each in container(objects)["env"]:
        value = each["value"] if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        variables[each["name"]] = expand(value, variables)
    if "TrainJob" in objects:
        trainer = objects["TrainJob"]["spec"]["trainer"]
        variables |= {
            "PET_NNODES": str(job_spec["completions"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index), "PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": TRAINER_PORT,
        }  # fmt: skip
    return variables


def start_pod(objects: dict[str, dict[str, Any]], index: int, port: int) -> subprocess.Popen:
    """Start a pod. Its first pod's host name is that of this machine, and the port is free on it."""
    variables = pod_variables(objects, index)
    if "PET_MASTER_ADDR" in variables:
        variables |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(port)}
    image = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "HOME": os.environ["HOME"],
    }
    command = [expand(word, variables) for word in container(objects)["command"]]
    return subprocess.Popen(
        command, cwd=container(objects)["workingDir"], env=image | variables, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
