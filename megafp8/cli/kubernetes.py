"""Write training as a Kubernetes manifest, from the same job files and flags as `megafp8 slurm`.

    megafp8 kubernetes JOB.yaml | kubectl apply -f -
    megafp8 kubernetes JOB.yaml --kind jobset --output job.yaml
    megafp8 kubernetes --name first --nodes 2 --image registry/megafp8:1 --claim shared -- FLAGS

A job is a TrainJob of Kubeflow Trainer with its TrainingRuntime, or with --kind jobset a JobSet, which does not need
Kubeflow. Job files with `runs` or `preprocess` are JobSets with an Indexed Job. FLAGS are those of megafp8 pretrain,
with --save and --load on one folder of --claim, or on one URL. Everything is checked before anything is written, and
nothing is started. A preempted pod saves; pods are restarted after crashes, but not after errors that would recur.
Exit status: 64 for a wrong job or wrong flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megafp8.cli.command_flags import add_flags, argument, path_flag
from megafp8.cli.common import returns_exit_status
from megafp8.cli.job_options import build_job_parser, check_training, read_arguments, warn_of_unused
from megafp8.errors import ConfigError
from megafp8.launch import kubernetes
from megafp8.launch.job import check_job
from megafp8.utils.formatting import control_problems


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_job_parser(__doc__),
        argument("--kind", "kind of the objects (default: trainjob; jobset for an array)",
                 choices=(kubernetes.TRAINJOB, kubernetes.JOBSET)),
        path_flag("--output", "file to write (default: standard output)", metavar="FILE"),
    )  # fmt: skip


@returns_exit_status()
def main(argv: Sequence[str]) -> int:
    """Write the manifest; return the exit status."""
    arguments, job = read_arguments(build_parser(), argv, kubernetes.DEFAULTS)
    check_job(job)
    check_training(job)
    warn_of_unused(job, kubernetes.UNUSED_FIELDS, "by Kubernetes")
    text = kubernetes.manifests(job, getattr(arguments, "kind", None))
    if "output" not in arguments:
        print(text, end="")
        return 0
    path = arguments.output
    if problems := control_problems("--output", path):
        raise ConfigError(problems)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}: choose another --output") from error
    return 0
