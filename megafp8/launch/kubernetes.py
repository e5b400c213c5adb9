"""Kubernetes: manifests of jobs as a TrainJob of Kubeflow Trainer, or as JobSets.

A manifest is built as dictionaries and written as YAML, so that no value of a job can add a field. Every pod runs a
script of shell like that of a Slurm job. A TrainJob comes with the TrainingRuntime that it refers to, whose template is
the same JobSet: the cluster's own runtimes have neither shared memory, nor claims, nor a failure policy.

- One node: the supervisor restarts the run in its pod, as under Slurm.
- Several nodes: an Indexed Job, whose pods have the host names of JobSet's headless service. torchrun exits with 1
  whatever ended the run, so the supervisor in the first pod, which restarts nothing, reports the run's exit status.
  Another pod that fails waits for it.
- An array with runs of one node: an Indexed Job with a pod for each run, which is restarted on its own. Runs of several
  nodes are a JobSet each.

Exit statuses: those of the supervisor's `PERMANENT_ERRORS` end the job (`podFailurePolicy`). So does 1 of a run that
never began to train, but with several nodes, where one that was lost looks the same. After all others, such as 75 of a
preempted run, JobSet recreates the pods, at most `max_requeues` times, and the run resumes.

Fields, limits of names and variables are those of:
    github.com/kubeflow/trainer v2.3.0: manifests/base/crds/trainer.kubeflow.org_{trainjobs,trainingruntimes}.yaml,
        pkg/webhooks/trainingruntime_webhook.go, pkg/runtime/framework/plugins/torch/torch.go (PET_ variables)
    github.com/kubernetes-sigs/jobset v0.12: config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml,
        pkg/webhooks/jobset_webhook.go (lengths of names), api/jobset/v1alpha2/jobset_types.go (labels)
    kubernetes.io/docs: concepts/workloads/controllers/job (podFailurePolicy, backoffLimitPerIndex),
        concepts/overview/working-with-objects/names
    github.com/kubernetes/kubernetes: third_party/forked/golang/expansion/expand.go ($(VAR) and $$)
"""

from __future__ import annotations

import dataclasses
import os.path
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import yaml

from megafp8.errors import INTERNAL, ConfigError
from megafp8.launch.job import PREPROCESS, PRETRAIN_MODULE, SUPERVISE_MODULE, Job, flag_value, signal_lead_s
from megafp8.launch.shell_lines import (
    bash_array,
    environment_lines,
    fill_lines,
    join_script,
    preprocess_words,
    torchrun_array,
    training_lines,
)
from megafp8.launch.supervisor import PERMANENT_ERRORS
from megafp8.utils.object_store import is_url
from megafp8.utils.process import JOBSET_VARIABLE

TRAINJOB, JOBSET = "trainjob", "jobset"
# Of the image's Dockerfile; the claim is mounted there.
PROJECT_IN_POD = "/workspace"
DEFAULTS: Mapping[str, str] = {"project": PROJECT_IN_POD}
UNUSED_FIELDS = ("exclusive", "time", "partition", "account", "sbatch", "container", "mounts", "endpoint")

TRAINER_API, JOBSET_API = "trainer.kubeflow.org/v1alpha1", "jobset.x-k8s.io/v1alpha2"
# Kubeflow Trainer expects these names of the replicated job and its container, and this port.
NODE, PORT = "node", 29500
PARTS, MERGE = "parts", "merge"
TASK = "JOB_COMPLETION_INDEX"  # set in the pods of Indexed Jobs
INDEX_ANNOTATION = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
UID_LABEL = "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"
# Pods may wait for free nodes while others run. torchrun's own timeout is 10 minutes.
RENDEZVOUS_TIMEOUT_S = 24 * 3600
# Of a supervisor whose command failed before the run began, and of a script's own commands, such as `setup`.
NOT_STARTED = 1
# Time that the first pod has to report why the run ended, before another one fails.
REPORT_S = 60

MAX_LABEL = 63
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035
DNS_SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_VALUE = re.compile(r"(?=.{0,63}\Z)([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
IMAGE = re.compile(r"(?=.{1,500}\Z)[A-Za-z0-9][\w.:/@-]*", re.ASCII)
COUNT = re.compile(r"[1-9][0-9]{0,3}")


def manifests(job: Job, kind: Optional[str] = None) -> str:
    """The YAML documents of a job, for `kubectl apply`.

    Args:
        job: checked by `check_job`.
        kind: `TRAINJOB` or `JOBSET`; None: a JobSet for an array or for preprocessing, else a TrainJob.

    Raises:
        ConfigError: with all fields that Kubernetes does not take.
    """
    if job.preprocess and not job.logs or not job.logs and is_url(flag_value("--save", job.training) or ""):
        job = dataclasses.replace(job, logs=f"logs/{job.name}")  # not in the cache of this machine
    is_array = bool(job.runs or job.preprocess)
    problems = job_problems(job)
    if is_array and kind == TRAINJOB:
        problems.append("--kind trainjob: `runs` and `preprocess` need --kind jobset")
    if problems:
        raise ConfigError(problems)
    if job.runs and job.nodes > 1:
        documents = [api_object(JOBSET_API, "JobSet", run, jobset_spec(run)) for run in single_jobs(job)]
    elif is_array or kind == JOBSET:
        documents = [api_object(JOBSET_API, "JobSet", job, jobset_spec(job))]
    else:
        documents = train_job(job)
    return yaml.dump_all(documents, Dumper=ManifestDumper, sort_keys=False, allow_unicode=True, width=116)


def single_jobs(job: Job) -> list[Job]:
    """A job for each run of an array."""
    return [
        dataclasses.replace(job, name=f"{job.name}-{index}", training=words, runs=(), logs=f"{job.logs}/{index}")
        for index, words in enumerate(job.commands)
    ]


def train_job(job: Job) -> list[dict[str, Any]]:
    """A TrainingRuntime, and the TrainJob that refers to it."""
    template = {"spec": jobset_spec(job, sets_rendezvous=False)}
    runtime = {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": template}
    reference = {"apiGroup": TRAINER_API.partition("/")[0], "kind": "TrainingRuntime", "name": job.name}
    trainer = {"numNodes": job.nodes, "numProcPerNode": job.ranks}
    return [
        api_object(TRAINER_API, "TrainingRuntime", job, runtime),
        api_object(TRAINER_API, "TrainJob", job, {"runtimeRef": reference, "trainer": trainer}),
    ]


def api_object(version: str, kind: str, job: Job, spec: dict[str, Any]) -> dict[str, Any]:
    """An object of Kubernetes with the job's name and namespace."""
    names = {"name": job.name} | ({"namespace": job.namespace} if job.namespace else {})
    return {"apiVersion": version, "kind": kind, "metadata": names, "spec": spec}


def jobset_spec(job: Job, sets_rendezvous: bool = True) -> dict[str, Any]:
    """The spec of a JobSet.

    Args:
        sets_rendezvous: set torchrun's variables; Kubeflow Trainer sets the same ones itself.
    """
    if job.preprocess:
        merge = replicated_job(job, MERGE, pod(job, preprocess_script(job, "--merge-parts")), 1)
        part = f'--part "$(({TASK} + 1))/{job.parts}"'
        parts = replicated_job(job, PARTS, pod(job, preprocess_script(job, part)), job.parts or 1, is_array=True)
        replicated = [parts, merge | {"dependsOn": [{"name": PARTS, "status": "Complete"}]}]
    else:
        variables = rendezvous(job, sets_rendezvous) if job.nodes > 1 else []
        count = len(job.runs) or job.nodes
        replicated = [replicated_job(job, NODE, pod(job, script(job), variables), count, is_array=bool(job.runs))]
    # A Job that failed by its podFailurePolicy would fail again. Indices of an array are repeated by their Job.
    final = ["PodFailurePolicy", "FailedIndexes"]
    return {
        # Host names of pods are published before they are ready: the first one waits for the others in torchrun.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": job.max_requeues,
            "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": final}],
        },
        "replicatedJobs": replicated,
    }


def replicated_job(
    job: Job, name: str, template: dict[str, Any], count: int, is_array: bool = False
) -> dict[str, Any]:  # fmt: skip
    """An Indexed Job with `count` pods, which are independent of each other in an array."""
    final = {*PERMANENT_ERRORS} if job.nodes > 1 else {*PERMANENT_ERRORS, NOT_STARTED}
    statuses = {"containerName": NODE, "operator": "In", "values": sorted(final)}
    retries = {"backoffLimitPerIndex": job.max_requeues} if is_array else {"backoffLimit": 0}
    spec = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": min(count, job.array_limit or count) if is_array else count,
        **retries,
        "podFailurePolicy": {"rules": [{"action": "FailIndex" if is_array else "FailJob", "onExitCodes": statuses}]},
        "template": {"spec": template},
    }
    labels = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}}
    return {"name": name, "replicas": 1, "template": {**(labels if name == NODE else {}), "spec": spec}}


def pod(job: Job, text: str, variables: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The spec of a pod that runs a script."""
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if job.claim:
        volumes.append({"name": "project", "persistentVolumeClaim": {"claimName": job.claim}})
        mounts.append({"name": "project", "mountPath": job.project})
    limits: dict[str, Any] = {job.gpu_resource: job.gpus_per_node} if job.gpus_per_node else {}
    limits |= {name: int(count) for name, count in job.rdma.items()}
    resources = {"limits": limits, "requests": {"cpu": job.cpus_per_node} if job.cpus_per_node else {}}
    uid = {"name": JOBSET_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": UID_LABEL}}}
    container = {
        "name": NODE,
        "image": job.image,
        "command": ["bash", "-c", escape(text)],
        "workingDir": job.project,  # made if the image does not have it
        "env": [uid, *variables],
        "resources": {name: values for name, values in resources.items() if values},
        # RDMA registers memory, which is locked.
        **({"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if job.rdma else {}),
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",  # required by podFailurePolicy
        "terminationGracePeriodSeconds": signal_lead_s(job),
        **({"nodeSelector": dict(job.node_selector)} if job.node_selector else {}),
        "containers": [container],
        "volumes": volumes,
    }


def rendezvous(job: Job, sets_all: bool) -> list[dict[str, Any]]:
    """The variables of torchrun's rendezvous; without `sets_all` only those that Kubeflow Trainer does not set."""
    config = {"name": "PET_RDZV_CONF", "value": f"timeout={RENDEZVOUS_TIMEOUT_S}"}
    if not sets_all:
        return [config]
    values = {
        "PET_NNODES": str(job.nodes),
        "PET_NPROC_PER_NODE": str(job.ranks),
        "PET_MASTER_ADDR": f"{job.name}-{NODE}-0-0.{job.name}",
        "PET_MASTER_PORT": str(PORT),
    }
    rank = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX_ANNOTATION}}}
    return [config, rank, *({"name": name, "value": value} for name, value in values.items())]


def script(job: Job) -> str:
    """The script of a pod that trains."""
    meeting = ["--standalone"] if job.nodes == 1 else []
    training = f'"${{torchrun[@]}}" {PRETRAIN_MODULE} "${{training[@]}}"'
    supervise = f"exec python3 {SUPERVISE_MODULE} --max-restarts {job.restarts if job.nodes == 1 else 0} -- {training}"
    torchrun = torchrun_array(job, [*meeting, f'--log-dir {shlex.quote(job.log_folder)}/ranks/"$HOSTNAME"'])
    if job.nodes == 1:
        start = [*torchrun, supervise]
    else:
        start = [
            "# The nodes and the first one's address are in the variables PET_*.",
            *torchrun,
            'if [ "$PET_NODE_RANK" = 0 ]; then',
            f"  {supervise}",
            "fi",
            "# The first pod reports the run's exit status, after which all pods stop or restart. Another pod that",
            "# fails waits for that.",
            "is_stopped=",
            """trap 'is_stopped=1; kill -TERM "$pid" 2>/dev/null' TERM""",
            f"{training} &",
            "pid=$!",
            "while status=0; do",
            '  wait "$pid" || status=$?',
            '  kill -0 "$pid" 2>/dev/null || break  # else a signal has ended the wait',
            "done",
            f'[ "$status" = 0 ] || [ "$is_stopped" ] || {{ sleep {REPORT_S} & pid=$!; wait "$pid" || true; }}',
            f'[ "$status" = 0 ] || exit {INTERNAL}',
        ]
    return join_script([["set -euo pipefail", *environment_lines(job)], training_lines(job, TASK), start])


def preprocess_script(job: Job, part: str) -> str:
    """The script of a pod that preprocesses a part, or merges all."""
    words = bash_array("preprocess", fill_lines(preprocess_words(job)))
    start = f'exec python3 {PREPROCESS} "${{preprocess[@]}}" {part}'
    return join_script([["set -euo pipefail", *environment_lines(job)], words, [start]])


def escape(text: str) -> str:
    """Keep Kubernetes from expanding `$(NAME)` in a command, and from reading `$$` as one `$`."""
    return re.sub(r"\$(?=[$(])", "$$", text)


# No version of YAML reads it as a number, as `089` and `1e3`, or as a boolean, as `y`. PyYAML quotes longer booleans.
PLAIN_WORD = re.compile(r"[A-Za-z][\w./-]{2,}", re.ASCII)


class ManifestDumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, quotes all but plain words, and repeats values without references."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else None if PLAIN_WORD.fullmatch(data) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


ManifestDumper.add_representer(str, ManifestDumper.represent_str)


def job_problems(job: Job) -> list[str]:
    """Problems of a job that Kubernetes would report late or not at all."""
    # JobSet refuses a name if those of its pods, NAME-JOB-0-INDEX-RANDOM, do not fit into a label.
    replicated = PARTS if job.preprocess else NODE
    count = job.parts or (job.nodes if job.nodes > 1 else len(job.runs) or 1)
    longest = f"{job.name}-{len(job.runs)}" if job.runs and job.nodes > 1 else job.name
    room = MAX_LABEL - len(f"{longest}-{replicated}-0-{count - 1}-abcde") + len(job.name)
    problems = []
    if len(job.name) > room or not DNS_LABEL.fullmatch(job.name):
        problems.append(f"name: {job.name!r}: at most {room} lower-case letters, digits and -, first a letter and last "
                        "no -")  # fmt: skip
    if not IMAGE.fullmatch(job.image or ""):
        found = f"{job.image!r} is no name of an image" if job.image else "missing"
        problems.append(f"image: {found}; name one that has megafp8, such as registry.example.com/megafp8:1")
    if job.namespace is not None and not (DNS_LABEL.fullmatch(job.namespace) and len(job.namespace) <= MAX_LABEL):
        problems.append(f"namespace: {job.namespace!r}: lower-case letters, digits and - only")
    if job.claim is not None and not DNS_SUBDOMAIN.fullmatch(job.claim):
        problems.append(f"claim: {job.claim!r} is no name of a PersistentVolumeClaim")
    problems += [
        f"{field}: {name!r}: must be a name such as {example}"
        for field, names, example in (
            ("gpu_resource", [job.gpu_resource], "nvidia.com/gpu"),
            ("rdma", job.rdma, "rdma/ib"),
            ("node_selector", job.node_selector, "nvidia.com/gpu.product"),
        )
        for name in names
        if not is_qualified(name, needs_prefix=field != "node_selector")
    ]
    problems += [f"rdma: {name}: {count!r}: must be the number of devices of a pod" for name, count in job.rdma.items()
                 if not COUNT.fullmatch(count)]  # fmt: skip
    problems += [f"node_selector: {name}: {value!r} is no value of a label" for name, value in job.node_selector.items()
                 if not LABEL_VALUE.fullmatch(value)]  # fmt: skip
    if os.path.normpath(job.project) == "/" or not os.path.isabs(job.project) or ":" in job.project:
        problems.append(f"project: {job.project!r}: must be an absolute path in the pod other than /, without :")
    if job.nodes > 1 and job.max_restarts is not None:
        problems.append(f"max_restarts: {job.max_restarts}: the pods of several nodes restart together, at most "
                        "max_requeues times; remove it")  # fmt: skip
    if job.nodes > 1 and job.runs and job.array_limit:
        problems.append(f"array_limit: {job.array_limit}: each run of several nodes is a JobSet of its own; remove it")
    flag = "--output-prefix" if job.preprocess else "--save"
    saves = [flag_value(flag, words) or "" for words in ([job.preprocess] if job.preprocess else job.commands)]
    folders = [save for save in saves if not is_url(save)]
    if folders and not job.claim:
        fix = "name a PersistentVolumeClaim" + ("" if job.preprocess else ", or save to a URL such as s3://bucket/run")
        problems.append(f"claim: missing; {flag} {folders[0]} is lost with the pod: {fix}")
    if job.claim:
        problems += [f"{flag} {save}: is not on the claim, which is mounted at the project's folder {job.project}"
                     for save in folders if not is_inside(os.path.join(job.project, save), job.project)]  # fmt: skip
    return problems


def is_inside(path: str, folder: str) -> bool:
    """Whether a path of the pod is in a folder of it."""
    folder = os.path.normpath(folder)
    return os.path.commonpath([os.path.normpath(path), folder]) == folder


def is_qualified(name: str, needs_prefix: bool) -> bool:
    """Whether this is a name of Kubernetes' labels or resources: DOMAIN/NAME, or without a domain."""
    prefix, slash, rest = name.rpartition("/")
    is_known = bool(DNS_SUBDOMAIN.fullmatch(prefix)) if slash else not needs_prefix
    return is_known and bool(rest) and bool(LABEL_VALUE.fullmatch(rest))
