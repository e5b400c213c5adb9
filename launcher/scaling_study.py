#!/usr/bin/env python3
"""Run a scaling study, or any sweep: every combination of a grid of flags, from one YAML file.

    python launcher/scaling_study.py examples/studies/stdlib_cpu.yaml --dry-run
    python launcher/scaling_study.py examples/studies/stdlib_cpu.yaml --local --parallel 2
    python launcher/scaling_study.py examples/studies/stdlib_cpu.yaml --status

Where there is Slurm, the runs become job arrays; elsewhere, and with --local, processes of this machine. Every run has
a folder of its own with a name that stays when the grid grows. The same command again passes over runs that are done,
running or queued and starts the others, which go on from their checkpoints. Nothing starts when the flags of one run
are wrong. docs/scaling_studies.md describes the file. Exit status: 0 all done or submitted, 64 wrong study, 75 stopped
by a signal, else that of the first run that failed.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

from megafp8.config import rules
from megafp8.device.gpus import GPUS
from megafp8.errors import ConfigError, Megafp8Error
from megafp8.launch import slurm
from megafp8.launch.study import StudyRun, expand, labels_text, read_study
from megafp8.launch.study_execution import (
    StudyProgress,
    build_jobs,
    check_gpus,
    command_of,
    is_due,
    predicted_seconds,
    progress_of,
    queued_ids,
    run_here,
    status_text,
    submit,
    visible_gpus,
    write_study_file,
)
from megafp8.utils.best_effort import best_effort
from megafp8.utils.files import path_argument

SCRIPT = Path(__file__).resolve().parents[1] / "pretrain_gpt.py"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=path_argument, metavar="STUDY.yaml", help="what to run")
    parser.add_argument(
        "--folder", type=path_argument, metavar="DIR", help="folder of the study, instead of the file's"
    )
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="runs whose label matches this shell pattern (default: all)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="print the state of every run and stop")
    what.add_argument("--dry-run", action="store_true", help="print every command, its tokens, FLOPs and time and stop")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--local", action="store_true", help="run on this machine (default where there is no sbatch)")
    where.add_argument(
        "--slurm",
        action="store_true",
        help="submit job arrays (default where there is sbatch); with --dry-run: print their scripts",
    )
    parser.add_argument(
        "--parallel",
        type=int,
        metavar="N",
        help="runs at a time on this machine (default: as many as its GPUs hold, without GPUs 1)",
    )
    parser.add_argument(
        "--gpu",
        choices=sorted(GPUS),
        help="with --dry-run: GPU whose times the planner predicts; default from runs of the study that are done",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        is_local = arguments.local or not (arguments.slurm or shutil.which("sbatch"))
        check_flags(arguments, is_local)
        study = read_study(arguments.study, arguments.folder)
        runs = expand(study)
        queued = queued_ids(study.folder)
        every = [progress_of(run, queued) for run in runs if fnmatchcase(run.label, arguments.only)]
        if not every:
            raise ConfigError(f"--only {arguments.only}: matches none of the {len(runs)} runs, such as {runs[0].label}")
        if arguments.status:
            print(status_text(every))
            return 0
        due = [one.run for one in every if is_due(one)]
        if arguments.dry_run:
            scripts = [slurm.script(job) for job in build_jobs(study, due)] if arguments.slurm else []
            print("\n".join(scripts) if arguments.slurm else plan_text(every, arguments.gpu))
            return 0
        if is_local:
            check_machine([one.run for one in every])
            check_gpus(due, visible_gpus())
        write_study_file(study, runs)
        sys.stdout, sys.stderr = best_effort(sys.stdout), best_effort(sys.stderr)  # the terminal may be closed
        tell(f"{study.name}: {len(every)} runs, {len(due)} to start; folder {study.folder}")
        if is_local:
            return run_here(due, SCRIPT, arguments.parallel, visible_gpus(), tell)
        for line in submit(study, due):
            tell(line)
        return 0
    except Megafp8Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_status


def check_flags(arguments: argparse.Namespace, is_local: bool) -> None:
    """
    Raises:
        ConfigError: flags that are wrong, or would have no effect beside the others.
    """
    problems = []
    if arguments.gpu and (not arguments.dry_run or arguments.slurm):
        problems.append(f"--gpu {arguments.gpu}: is for the times of a --dry-run without --slurm; remove it")
    if arguments.parallel is not None:
        if arguments.parallel < 1:
            problems.append(f"--parallel {arguments.parallel}: must be at least 1")
        if arguments.status or arguments.dry_run:
            asked = "--status" if arguments.status else "--dry-run"
            problems.append(f"--parallel {arguments.parallel}: {asked} runs nothing; remove one of them")
        elif not is_local:
            problems.append(
                f"--parallel {arguments.parallel}: is for runs on this machine, and these go to Slurm; give --local, "
                "or `array_limit` in the study's slurm"
            )
    if problems:
        raise ConfigError(problems)


def tell(text: str) -> None:
    """Show a line at once."""
    print(text, flush=True)


def check_machine(runs: Sequence[StudyRun]) -> None:
    """
    Raises:
        ConfigError: files that are missing here, recipes that this machine cannot do; a dry run does not ask.
    """
    # In a process that ends: asking CUDA takes memory of a GPU for as long as the process lives.
    with ProcessPoolExecutor(1, get_context("fork")) as process:
        problems = process.submit(machine_problems, runs).result()
    if problems:
        raise ConfigError([f"{labels_text(labels)}: {problem}" for problem, labels in problems.items()])


def machine_problems(runs: Sequence[StudyRun]) -> dict[str, list[str]]:
    """What is wrong with the runs on this machine, and the labels of those that have it."""
    from megafp8.device import capability  # imports torch

    target = capability.detect_target()
    problems: dict[str, list[str]] = {}
    for run in runs:
        for problem in rules.path_problems(run.config, run.world_size) + capability.problems(run.config, target):
            problems.setdefault(problem, []).append(run.label)
    return problems


def plan_text(every: Sequence[StudyProgress], gpu: Optional[str]) -> str:
    """What would be run: two lines a run, and sums over those that are not done."""
    lines, seconds_left = [], []
    for one in every:
        seconds = predicted_seconds(one.run, every, GPUS[gpu] if gpu else None)
        due = is_due(one)
        seconds_left += [seconds] if due else []
        lines.append(
            f"{one.run.label}  {one.run.id}  {one.state}: {count_text(one.run.parameters)} parameters, "
            f"{count_text(one.run.tokens)} tokens, {count_text(one.run.flops)} FLOPs, {time_text(seconds)} on "
            f"{one.run.world_size} {'GPUs' if gpu else 'ranks'}"
        )
        lines.append(f"  {shlex.join(command_of(one.run, SCRIPT))}")
    due = [one for one in every if is_due(one)]
    flops = [one.run.flops for one in due]
    total = None if None in flops else sum(flops)
    time = time_text(None if None in seconds_left else sum(seconds_left))
    lines.append(
        f"{len(every)} runs, {len(due)} to start: {count_text(sum(one.run.tokens for one in due))} tokens, "
        f"{count_text(total)} FLOPs, {time} one after the other"
    )
    return "\n".join(lines)


def count_text(number: Optional[float]) -> str:
    """A large number in three digits: 1.23e+09 as `1.23G`."""
    if number is None:
        return "?"
    for letter, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def time_text(seconds: Optional[float]) -> str:
    """Seconds as hours and minutes."""
    if seconds is None:
        return "time unknown"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
