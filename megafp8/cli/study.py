"""Run a scaling study, or any sweep: every combination of a grid of flags, from one YAML file.

    megafp8 study STUDY.yaml --dry-run
    megafp8 study STUDY.yaml --local --parallel 2
    megafp8 study STUDY.yaml --status

With Slurm, the runs are job arrays, and with --kubernetes JobSets; without both, or with --local, they are processes on
this machine. Every run has its own folder, whose name does not change when the grid grows. Repeating the command skips
runs that are done, running or queued, and starts or resumes the others; for Kubernetes it prints all of them. If the
flags of one run are wrong, none starts. docs/scaling_studies.md describes the file. Exit status: 0 if all are done or
submitted, 64 for a wrong study, 75 after a signal, else that of the first run that failed.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Optional

from megafp8.cli.command_flags import add_flags, argument, int_flag, path_flag, switch
from megafp8.cli.common import TRAINING_SCRIPT, build_command_parser, returns_exit_status
from megafp8.config.gpu_names import gpu_type
from megafp8.device.gpus import GPUS
from megafp8.errors import ConfigError
from megafp8.utils.best_effort import best_effort
from megafp8.utils.files import path_argument
from megafp8.utils.formatting import duration_text

if TYPE_CHECKING:
    from megafp8.launch.study import StudyRun
    from megafp8.launch.study_execution import StudyProgress

log = partial(print, flush=True)


def build_parser() -> argparse.ArgumentParser:
    parser = add_flags(
        build_command_parser(__doc__),
        argument("study", "file of the study", type=path_argument, metavar="STUDY.yaml"),
        path_flag("--folder", "folder of the study, instead of the file's", metavar="DIR"),
        argument("--only", "runs whose label matches this shell pattern (default: all)", default="*",
                 metavar="PATTERN"),
    )  # fmt: skip
    add_flags(
        parser.add_mutually_exclusive_group(),
        switch("--status", "print the state of every run and stop"),
        switch("--dry-run", "print every command, its tokens, FLOPs and time and stop"),
    )  # fmt: skip
    add_flags(
        parser.add_mutually_exclusive_group(),
        switch("--local", "run on this machine (default where there is no sbatch)"),
        switch("--slurm", "submit job arrays (default where there is sbatch); with --dry-run: print their scripts"),
        switch("--kubernetes", "print JobSets for `kubectl apply`, and start nothing"),
    )  # fmt: skip
    return add_flags(
        parser,
        int_flag("--parallel", "number of runs at the same time on this machine (default: as many as fit on its GPUs; "
                 "1 on a CPU)"),
        argument("--gpu", "with --dry-run: GPU for which the planner predicts times (default: times of finished runs)",
                 type=gpu_type(), metavar="NAME"),
    )  # fmt: skip


@returns_exit_status()
def main(argv: Sequence[str]) -> int:
    """Run, submit, plan or list the runs of a study; return the exit status."""
    arguments = build_parser().parse_args(argv)
    from megafp8.cli.job_options import warn_of_unused
    from megafp8.launch import kubernetes, slurm, study_execution
    from megafp8.launch.study import expand, read_study

    is_local = arguments.local or not (arguments.slurm or arguments.kubernetes or shutil.which("sbatch"))
    check_flags(arguments, is_local)
    study = read_study(arguments.study, arguments.folder)
    runs = expand(study)
    queued = study_execution.queued_ids(study.folder)
    selected = [study_execution.run_progress(run, queued) for run in runs if fnmatchcase(run.label, arguments.only)]
    if not selected:
        raise ConfigError(f"--only {arguments.only}: matches none of the {len(runs)} runs, such as {runs[0].label}")
    if arguments.status:
        print(study_execution.status_text(selected))
        return 0
    due = [progress.run for progress in selected if study_execution.is_due(progress)]
    if arguments.kubernetes:
        # All, since folders on a claim are not seen here. Runs that are done end at once.
        jobs = study_execution.build_jobs(study, [progress.run for progress in selected], "kubernetes")
        for job in jobs[:1]:  # they have the same fields
            warn_of_unused(job, kubernetes.UNUSED_FIELDS, "by Kubernetes")
        print("---\n".join(map(kubernetes.manifests, jobs)), end="")
        return 0
    if arguments.dry_run:
        scripts = [slurm.script(job) for job in study_execution.build_jobs(study, due)] if arguments.slurm else []
        print("\n".join(scripts) if arguments.slurm else plan_text(selected, arguments.gpu))
        return 0
    if is_local:
        check_machine([progress.run for progress in selected])
        study_execution.check_gpus(due, study_execution.visible_gpus())
    study_execution.write_study_file(study, runs)
    sys.stdout, sys.stderr = best_effort(sys.stdout), best_effort(sys.stderr)  # the terminal may be closed
    log(f"{study.name}: {len(selected)} runs, {len(due)} to start; folder {study.folder}")
    if is_local:
        return study_execution.run_here(due, TRAINING_SCRIPT, arguments.parallel, study_execution.visible_gpus(), log)
    for line in study_execution.submit(study, due):
        log(line)
    return 0


def check_flags(arguments: argparse.Namespace, is_local: bool) -> None:
    """Check combinations of flags.

    Raises:
        ConfigError: flags that are wrong, or have no effect with the others.
    """
    problems = []
    if arguments.gpu and (not arguments.dry_run or arguments.slurm or arguments.kubernetes):
        problems.append(f"--gpu {arguments.gpu}: is for the times of a --dry-run without jobs; remove it")
    if arguments.parallel is not None:
        if arguments.parallel < 1:
            problems.append(f"--parallel {arguments.parallel}: must be at least 1")
        if arguments.status or arguments.dry_run:
            requested = "--status" if arguments.status else "--dry-run"
            problems.append(f"--parallel {arguments.parallel}: {requested} runs nothing; remove one of them")
        elif not is_local:
            launcher = "kubernetes" if arguments.kubernetes else "slurm"
            where = f"is for runs on this machine, and these are jobs of {launcher.capitalize()}"
            fix = f"give --local, or `array_limit` in the study's {launcher}"
            problems.append(f"--parallel {arguments.parallel}: {where}; {fix}")
    if problems:
        raise ConfigError(problems)


def check_machine(runs: Sequence[StudyRun]) -> None:
    """Check that this machine can run the runs.

    Raises:
        ConfigError: files that are missing here, or recipes that this machine does not support.
    """
    from megafp8.launch.study import labels_text

    # In a child process: a CUDA context holds GPU memory for as long as its process lives.
    with ProcessPoolExecutor(1, get_context("fork")) as process:
        problems = process.submit(machine_problems, runs).result()
    if problems:
        raise ConfigError([f"{labels_text(labels)}: {problem}" for problem, labels in problems.items()])


def machine_problems(runs: Sequence[StudyRun]) -> dict[str, list[str]]:
    """Return the problems of the runs on this machine, each with the labels of its runs."""
    from megafp8.config import rules
    from megafp8.device import capability

    target = capability.detect_target()
    problems: dict[str, list[str]] = {}
    for run in runs:
        found = rules.path_problems(run.config, run.world_size)
        for problem in found + capability.capability_problems(run.config, target):
            problems.setdefault(problem, []).append(run.label)
    return problems


def plan_text(selected: Sequence[StudyProgress], gpu: Optional[str]) -> str:
    """Return two lines for each run, and sums over those that are not done."""
    from megafp8.analysis.percent import count_text
    from megafp8.launch import study_execution

    def count(number: Optional[float]) -> str:
        return "?" if number is None else count_text(number)

    lines: list[str] = []
    seconds_left: list[Optional[float]] = []
    due: list[StudyRun] = []
    for progress in selected:
        run = progress.run
        seconds = study_execution.predicted_seconds(run, selected, GPUS[gpu] if gpu else None)
        if study_execution.is_due(progress):
            due.append(run)
            seconds_left.append(seconds)
        lines.append(
            f"{run.label}  {run.id}  {progress.state}: {count(run.parameters)} parameters, "
            f"{count(run.tokens)} tokens, {count(run.flops)} FLOPs, {time_text(seconds)} on "
            f"{run.world_size} {'GPUs' if gpu else 'ranks'}"
        )
        lines.append(f"  {shlex.join(study_execution.train_command(run, TRAINING_SCRIPT))}")
    lines.append(
        f"{len(selected)} runs, {len(due)} to start: {count(sum(run.tokens for run in due))} tokens, "
        f"{count(total(run.flops for run in due))} FLOPs, {time_text(total(seconds_left))} one after the other"
    )
    return "\n".join(lines)


def total(numbers: Iterable[Optional[float]]) -> Optional[float]:
    """The sum of numbers; None if one of them is unknown."""
    known = list(numbers)
    return None if None in known else sum(filter(None, known))


def time_text(seconds: Optional[float]) -> str:
    return "time unknown" if seconds is None else duration_text(seconds)
