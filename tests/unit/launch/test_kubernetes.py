"""Manifests of Kubernetes: their fields, what a pod runs, and values that try to break out of them."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import subprocess
from typing import Any, Optional

import pytest
import yaml
from kubernetes_pods import container, documents, expand, jobset_spec, pod_variables

from megafp8.errors import ConfigError
from megafp8.launch.job import Job, build_job, check_job
from megafp8.launch.kubernetes import DEFAULTS, JOBSET, TRAINJOB, escape, manifests
from megafp8.launch.study import read_study

SAVE = ("--save", "runs/a", "--load", "runs/a")
RUNS = tuple(("--seed", str(seed), "--save", f"runs/{seed}", "--load", f"runs/{seed}") for seed in (1, 2, 3))
ONE = Job(name="first", training=SAVE, image="registry.example.com/megafp8:1", claim="shared", **DEFAULTS)
TWO = dataclasses.replace(
    ONE, nodes=2, cpus_per_node=64, time_to_save_s=600, namespace="training", gpu_resource="amd.com/gpu",
    rdma={"rdma/ib": "8"}, node_selector={"zone": "a", "nvidia.com/gpu.product": "NVIDIA-H200"},
    environment={"NCCL_IB_HCA": "mlx5"}, setup="echo $(hostname) $$",
)  # fmt: skip
ARRAY = dataclasses.replace(ONE, training=("--lr", "1"), runs=RUNS, logs="logs", array_limit=2)
PREPROCESS = dataclasses.replace(
    ONE, training=(), gpus_per_node=0, cpus_per_node=4, parts=4, logs="logs",
    preprocess=("--input", "text.jsonl", "--output-prefix", "data/text"),
)  # fmt: skip
JOBS = {"one node": ONE, "two nodes": TWO, "array": ARRAY, "preprocessing": PREPROCESS}


def objects(job: Job, kind: Optional[str] = None) -> dict[str, dict[str, Any]]:
    check_job(job)
    return documents(manifests(job, kind))


def job_spec(found: dict[str, dict[str, Any]], index: int = 0) -> dict[str, Any]:
    return jobset_spec(found)["replicatedJobs"][index]["template"]["spec"]


# ---- fields ----------------------------------------------------------------------------------------------------------

# Of the CRDs of Kubeflow Trainer 2.3 and JobSet 0.12, and of Kubernetes' API.
OBJECT = {"apiVersion", "kind", "metadata", "spec"}
FIELDS = {
    "TrainJob": OBJECT, "TrainingRuntime": OBJECT, "JobSet": OBJECT, "metadata": {"name", "namespace", "labels"},
    "TrainJob.spec": {"runtimeRef", "trainer"}, "runtimeRef": {"apiGroup", "kind", "name"},
    "trainer": {"numNodes", "numProcPerNode"}, "TrainingRuntime.spec": {"mlPolicy", "template"},
    "mlPolicy": {"numNodes", "torch"}, "torch": set(), "JobSet.spec": {"network", "failurePolicy", "replicatedJobs"},
    "network": {"enableDNSHostnames", "publishNotReadyAddresses"}, "failurePolicy": {"maxRestarts", "rules"},
    "failurePolicy.rules": {"name", "action", "onJobFailureReasons"},
    "replicatedJobs": {"name", "replicas", "template", "dependsOn"}, "dependsOn": {"name", "status"},
    "Job.spec": {"completionMode", "completions", "parallelism", "backoffLimit", "backoffLimitPerIndex",
                 "podFailurePolicy", "template"},
    "podFailurePolicy": {"rules"}, "podFailurePolicy.rules": {"action", "onExitCodes"},
    "onExitCodes": {"containerName", "operator", "values"},
    "Pod.spec": {"restartPolicy", "terminationGracePeriodSeconds", "nodeSelector", "containers", "volumes"},
    "containers": {"name", "image", "command", "workingDir", "env", "resources", "securityContext", "volumeMounts"},
    "env": {"name", "value", "valueFrom"}, "valueFrom": {"fieldRef"}, "fieldRef": {"fieldPath"},
    "resources": {"limits", "requests"}, "securityContext": {"capabilities"}, "capabilities": {"add"},
    "volumeMounts": {"name", "mountPath"}, "volumes": {"name", "emptyDir", "persistentVolumeClaim"},
    "emptyDir": {"medium"}, "persistentVolumeClaim": {"claimName"},
}  # fmt: skip
TEXTS_BY_NAME = {"labels", "nodeSelector", "limits", "requests"}
# The kind of a `spec` or `template`, by that of the object around it.
INNER = {
    ("TrainingRuntime.spec", "template"): "runtime template", ("runtime template", "spec"): "JobSet.spec",
    ("replicatedJobs", "template"): "Job", ("Job", "spec"): "Job.spec", ("Job.spec", "template"): "Pod",
    ("Pod", "spec"): "Pod.spec", ("failurePolicy", "rules"): "failurePolicy.rules",
    ("podFailurePolicy", "rules"): "podFailurePolicy.rules",
    **{(kind, "spec"): f"{kind}.spec" for kind in ("TrainJob", "TrainingRuntime", "JobSet")},
}  # fmt: skip
FIELDS |= {"runtime template": {"spec"}, "Job": {"metadata", "spec"}, "Pod": {"spec"}}


def unknown_fields(value: Any, kind: str) -> list[str]:
    """Fields that an object of Kubernetes does not have."""
    if isinstance(value, list):
        return [name for each in value for name in unknown_fields(each, kind)]
    if not isinstance(value, dict) or kind in TEXTS_BY_NAME:
        return []
    found = [f"{kind}.{name}" for name in value.keys() - FIELDS[kind]]
    return found + [
        name for key, inner in value.items() if isinstance(inner, (dict, list)) and key in FIELDS[kind]
        for name in ([] if all(isinstance(each, (str, int)) for each in inner) and isinstance(inner, list)
                     else unknown_fields(inner, INNER.get((kind, key), key)))
    ]  # fmt: skip


CASES = [(name, kind) for name in JOBS for kind in (TRAINJOB, JOBSET) if kind == JOBSET or name in list(JOBS)[:2]]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_fields_are_those_of_kubernetes(name: str, kind: str) -> None:
    found = objects(JOBS[name], kind)
    assert {*found} == ({"JobSet"} if kind == JOBSET else {"TrainingRuntime", "TrainJob"})
    assert [unknown_fields(each, each["kind"]) for each in found.values()] == [[]] * len(found)
    assert unknown_fields({"metadata": {}, "spec": {"network": {"subdomain": "a"}}}, "JobSet") == ["network.subdomain"]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_models_of_kubeflow_keep_every_field(name: str, kind: str) -> None:
    """They drop the fields that they do not know, and check types and required fields."""
    models = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob",
              "TrainingRuntime": "TrainerV1alpha1TrainingRuntime"}  # fmt: skip
    package = pytest.importorskip("kubeflow_trainer_api.models")
    for kind_of_object, each in objects(JOBS[name], kind).items():
        model = getattr(importlib.import_module(package.__name__), models[kind_of_object])
        assert model.from_dict(each).to_dict() == each


def test_the_pods_of_a_job() -> None:
    found = objects(TWO)
    assert [found[kind]["metadata"] for kind in found] == [{"name": "first", "namespace": "training"}] * 2
    assert found["TrainJob"]["spec"] == {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "first"},
        "trainer": {"numNodes": 2, "numProcPerNode": 8},
    }
    spec = job_spec(found)
    assert (spec["completionMode"], spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (
        "Indexed", 2, 2, 0
    )  # fmt: skip
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] == 660
    assert pod["nodeSelector"] == TWO.node_selector
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert {"name": "project", "persistentVolumeClaim": {"claimName": "shared"}} in pod["volumes"]
    node = container(found)
    assert node["volumeMounts"] == [
        {"name": "shm", "mountPath": "/dev/shm"}, {"name": "project", "mountPath": "/workspace"}
    ]  # fmt: skip
    assert node["resources"] == {"limits": {"amd.com/gpu": 8, "rdma/ib": 8}, "requests": {"cpu": 64}}
    assert node["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}


@pytest.mark.parametrize("kind", [TRAINJOB, JOBSET])
def test_pods_meet_at_the_host_name_of_the_first(kind: str) -> None:
    """Both kinds set the same variables. Trainer refuses a TrainJob that sets its own."""
    found = objects(TWO, kind)
    variables = pod_variables(found, 1)
    assert variables | {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_MASTER_PORT": "29500",
                        "PET_MASTER_ADDR": "first-node-0-0.first", "JOBSET_UID": "uid-1"} == variables  # fmt: skip
    reserved = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
    own = {each["name"] for each in container(found)["env"]}
    assert own & reserved == (reserved if kind == JOBSET else set())
    assert jobset_spec(found)["network"]["enableDNSHostnames"]


def test_exit_statuses_that_end_a_job() -> None:
    found = objects(dataclasses.replace(ONE, max_requeues=7))
    (rule,) = job_spec(found)["podFailurePolicy"]["rules"]
    assert rule == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "node", "operator": "In", "values": [1, 64, 65, 66, 73, 74]},
    }
    (several,) = job_spec(objects(dataclasses.replace(ONE, nodes=2)))["podFailurePolicy"]["rules"]
    assert several["onExitCodes"]["values"] == [64, 65, 66, 73, 74]  # 1 may be a node that was lost
    policy = jobset_spec(found)["failurePolicy"]
    assert policy["maxRestarts"] == 7
    assert [rule["action"] for rule in policy["rules"]] == ["FailJobSet"]


def test_runs_of_one_node_are_an_indexed_job() -> None:
    found = objects(ARRAY)
    spec = job_spec(found)
    assert [*found] == ["JobSet"] and (spec["completions"], spec["parallelism"]) == (3, 2)
    assert spec["backoffLimitPerIndex"] == 100 and "backoffLimit" not in spec
    assert spec["podFailurePolicy"]["rules"][0]["action"] == "FailIndex"
    text = container(found)["command"][-1]
    assert "case $JOB_COMPLETION_INDEX in" in text and "  2) training+=(--seed 3 --save runs/3 --load runs/3)" in text


def test_each_run_of_several_nodes_is_a_jobset() -> None:
    job = dataclasses.replace(ARRAY, nodes=2, array_limit=None)
    found = list(yaml.safe_load_all(manifests(job)))
    assert [each["metadata"]["name"] for each in found] == ["first-0", "first-1", "first-2"]
    texts = [container({"JobSet": each})["command"][-1] for each in found]
    assert all(f"--seed {index} --save runs/{index}" in text for index, text in enumerate(texts, 1))


def test_the_merge_of_parts_follows_them() -> None:
    found = objects(PREPROCESS)
    parts, merge = jobset_spec(found)["replicatedJobs"]
    assert parts["template"]["spec"]["completions"] == 4
    assert merge["dependsOn"] == [{"name": "parts", "status": "Complete"}]
    texts = [expand(container(found, index)["command"][-1], {}) for index in (0, 1)]
    assert texts[0].endswith('"${preprocess[@]}" --part "$((JOB_COMPLETION_INDEX + 1))/4"\n')
    assert texts[1].endswith('"${preprocess[@]}" --merge-parts\n')


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed (Debian: shellcheck)")
@pytest.mark.parametrize("name", JOBS)
def test_scripts_pass_shellcheck(name: str) -> None:
    text = "#!/usr/bin/env bash\n" + expand(container(objects(JOBS[name]))["command"][-1], {})
    command = ["shellcheck", "--exclude=SC1091,SC2016,SC2046,SC2086", "-"]
    ended = subprocess.run(command, input=text, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_a_run_in_object_storage_needs_no_claim() -> None:
    url = ("--save", "s3://bucket/run", "--load", "s3://bucket/run")
    found = objects(dataclasses.replace(ONE, training=url, claim=None))
    assert [volume["name"] for volume in job_spec(found)["template"]["spec"]["volumes"]] == ["shm"]
    assert "--log-dir logs/first/ranks/" in container(found)["command"][-1]  # not in the cache of this machine


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image": None}, "image: missing"),
        ({"image": "two words"}, "is no name of an image"),
        ({"claim": None}, "claim: missing; --save runs/a is lost with the pod"),
        ({"training": ("--save", "/tmp/a", "--load", "/tmp/a")}, "--save /tmp/a: is not on the claim"),
        ({"training": ("--save", "../a", "--load", "../a")}, "--save ../a: is not on the claim"),
        ({"claim": "Shared"}, "claim: 'Shared'"),
        ({"name": "a_b"}, "name: 'a_b': at most 48 lower-case letters"),
        ({"name": "a" * 49}, "at most 48 lower-case letters"),
        ({"name": "First"}, "name: 'First'"),
        ({"name": "1st"}, "first a letter"),
        ({"namespace": "a.b"}, "namespace: 'a.b'"),
        ({"gpu_resource": "gpu"}, "gpu_resource: 'gpu': must be a name such as nvidia.com/gpu"),
        ({"rdma": {"rdma/ib": "all"}}, "rdma: rdma/ib: 'all'"),
        ({"node_selector": {"a b": "c"}}, "node_selector: 'a b'"),
        ({"node_selector": {"a": "c d"}}, "node_selector: a: 'c d'"),
        ({"project": "here"}, "project: 'here': must be an absolute path"),
        ({"nodes": 2, "max_restarts": 3}, "max_restarts: 3: the pods of several nodes restart together"),
    ],
)
def test_fields_that_kubernetes_refuses(change: dict, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        objects(dataclasses.replace(ONE, **change))
    assert words in str(refused.value)


def test_an_array_is_no_trainjob() -> None:
    with pytest.raises(ConfigError, match="--kind jobset"):
        manifests(ARRAY, TRAINJOB)
    with pytest.raises(ConfigError, match="array_limit: 2: each run of several nodes"):
        manifests(dataclasses.replace(ARRAY, nodes=2))


def test_a_study_has_fields_for_kubernetes(tmp_path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("grid: {seed: [1]}\nkubernetes: {image: a}\n")
    assert read_study(path).kubernetes == {"image": "a"}
    path.write_text("grid: {seed: [1]}\nkubernetes: a\n")
    with pytest.raises(ConfigError, match="kubernetes: 'a' must be a mapping"):
        read_study(path)


# ---- values that try to break out ------------------------------------------------------------------------------------

ATTACKS = {
    "a field after a line break": "a\nspec: {}",
    "a document": "a\n---\nkind: Pod",
    "quotes": 'a", "privileged": "yes\' b',
    "a tag": "!!python/object/apply:os.system [id]",
    "an anchor and an alias": "&a *a",
    "a comment": "a # b: c",
    "a number or a boolean": "0o17",
    "Kubernetes' expansion": "$(JOBSET_UID)",
    "an escaped expansion": "$$(JOBSET_UID) $$$",
    "the shell's expansion": "${HOME} `id` $(id)",
    "a flow mapping": "{a: b}, [c]",
    "a byte order mark and a next line": "\ufeffa\u2028b",
    "an upper-case name": "Privileged",
    "a long name": "a" * 400,
    "an empty name": "",
    "a path upwards": "../../etc",
}
PLACES = {
    "name": lambda text: {"name": text},
    "image": lambda text: {"image": text},
    "claim": lambda text: {"claim": text},
    "namespace": lambda text: {"namespace": text},
    "gpu_resource": lambda text: {"gpu_resource": f"nvidia.com/{text}"},
    "rdma": lambda text: {"rdma": {f"rdma/{text}": "1"}},
    "rdma's number": lambda text: {"rdma": {"rdma/ib": text}},
    "node_selector": lambda text: {"node_selector": {text: "a"}},
    "node_selector's value": lambda text: {"node_selector": {"zone": text}},
    "project": lambda text: {"project": f"/workspace/{text}"},
    "environment": lambda text: {"environment": {"TAG": text}},
    "training": lambda text: {"training": [*SAVE, "--data-path", text]},
    "save": lambda text: {"training": ["--save", f"a{text}", "--load", f"a{text}"]},
}


def shape(value: Any) -> Any:
    """The fields of a manifest without their values; a pod's own names are fields."""
    if isinstance(value, dict):
        return {"*" if "/" in key or key in ("zone", "Privileged") else key: shape(each) for key, each in value.items()}
    return [shape(each) for each in value] if isinstance(value, list) else type(value)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_value_becomes_another_field(attack: str, place: str) -> None:
    """A value is refused, or read back as it was."""
    plain = {"name": "first", "image": "a", "claim": "b", "project": "/workspace", "training": [*SAVE]}
    change = PLACES[place](ATTACKS[attack])
    harmless = PLACES[place]("1" if place == "rdma's number" else "a")
    try:
        job = build_job(plain | change)
        check_job(job)
        text = manifests(job, JOBSET)
    except ConfigError as error:
        # Shell and YAML have a way to write all of these but line breaks.
        assert place not in ("environment", "training") or "control characters" in str(error)
        return
    (found,), (expected,) = (
        list(yaml.safe_load_all(each)) for each in (text, manifests(build_job(plain | harmless), JOBSET))
    )
    if "node_selector" not in place:
        assert shape(found) == shape(expected)
    node = container({"JobSet": found})
    words = run_words(node, pod_variables({"JobSet": found}, 0))
    if place == "environment":
        assert words["TAG"] == ATTACKS[attack]
    elif place == "training":
        assert words["words"][-1] == ATTACKS[attack]
    elif place == "project":
        assert words["cwd"] == node["workingDir"] == change["project"]


@pytest.mark.parametrize("value", ["0o17", "089", "1e3", "y", "n", "off", "null", "1_0"])
def test_texts_that_other_readers_take_for_numbers_or_booleans_are_quoted(value: str) -> None:
    plain = {"name": "first", "image": "a", "claim": "b", "project": "/workspace", "training": [*SAVE]}
    text = manifests(build_job(plain | {"node_selector": {"kind": value}}), JOBSET)
    assert f'"{value}"' in text or f"'{value}'" in text


def run_words(node: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """What the command of a container would start, with stand-ins for `cd` and Python."""
    standins = 'cd() { CWD=$1; }; exec() { printf "%s\\0" "$CWD" "${TAG-}" "$@"; }; '
    *bash, text = (expand(word, variables) for word in node["command"])
    ended = subprocess.run(
        [*bash, standins + text], env=variables | {"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    cwd, tag, *words, _ = ended.stdout.split("\0")
    return {"cwd": cwd, "TAG": tag, "words": words}


@pytest.mark.parametrize("text", ["$(A)", "$$(A)", "$$$(A)", "$$", "$", "$A ${A} $((A)) $(A", "a$"])
def test_kubernetes_expands_nothing(text: str) -> None:
    assert expand(escape(text), {"A": "expanded"}) == text
    assert text in ("$", "a$") or expand(text, {"A": "expanded"}) != text or "$(A" in text
