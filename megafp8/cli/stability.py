"""Test the stability of recipes: paired runs, a sweep to divergence, known-bad controls, and one page.

    megafp8 stability --output-dir runs/stability --size tiny --recipes tensorwise,mxfp8
    megafp8 stability --output-dir runs/stability --parts pairs,controls -- --data-path ... --num-layers 12

Parts: pairs (paired runs over seeds, compared with BF16's own spread), sweep (learning rates to divergence), controls
(settings that are known to be worse), and with --checkpoint continuation. Without --data-path after --, the suite
prepares bytes of Python's standard library. Repeating the command starts or resumes what is not done, and writes
OUTPUT_DIR/report again. With --slurm the runs are job arrays.
docs/stability.md describes verdicts and sizes. Exit status: 0 if all runs have a result or are submitted, 64 for wrong
flags, 75 after a signal or while another process has one of the runs, else that of the first run that failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from megafp8.cli import built_in_data, stability_checkpoint
from megafp8.cli.common import TRAINING_SCRIPT, build_command_parser, returns_exit_status
from megafp8.errors import PREEMPTED, ConfigError, NumericsError
from megafp8.utils.best_effort import best_effort
from megafp8.utils.files import path_argument, path_text

if TYPE_CHECKING:
    from megafp8.launch.job import Job
    from megafp8.launch.stability import Suite
    from megafp8.launch.study import Study, StudyRun

log = partial(print, flush=True)
MAPPINGS = ("sbatch", "environment")
"""Fields of a Slurm job that have keys of their own."""


def build_parser() -> argparse.ArgumentParser:
    from megafp8.launch.built_in_sizes import SIZES
    from megafp8.launch.stability import (
        CONTINUATION,
        CONTROLS,
        FAULTS_ELSEWHERE,
        NUM_SEEDS,
        PAIRED,
        PARTS,
        SUITE_FILE,
    )
    from megafp8.recipes import registry

    parser = build_command_parser(__doc__)
    parser.add_argument(
        "--output-dir", type=path_argument, required=True, metavar="D", help="folder of all runs and the report"
    )
    parser.add_argument("--size", choices=list(SIZES), default="tiny", help="size of model and runs (default: tiny)")
    parser.add_argument(
        "--recipes", default=registry.DEFAULT_FP8, metavar="NAMES",
        help="comma-separated recipes to test against BF16 (default: %(default)s)",
    )  # fmt: skip
    parts = ", ".join(f"{name}: {text}" for name, text in PARTS.items())
    parser.add_argument(
        "--parts",
        metavar="NAMES",
        help=f"comma-separated; default: all, {CONTINUATION} with --checkpoint, {CONTROLS} without --slurm ({parts})",
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N",
        help=f"paired seeds of {', '.join(PAIRED)} (default: {NUM_SEEDS})",
    )  # fmt: skip
    sizes = ", ".join(f"{size.sweep_seeds} at {name}" for name, size in SIZES.items())
    parser.add_argument("--sweep-seeds", type=int, metavar="N", help=f"seeds of the part sweep (default: {sizes})")
    parser.add_argument("--fault-seeds", metavar="N", help=f"refused: {FAULTS_ELSEWHERE}")
    parser.add_argument(
        "--checkpoint", type=path_text, default="", metavar="FOLDER", help="checkpoint for the part continuation"
    )
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="GPUs of a run; on a CPU: ranks (default: %(default)s)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="print the state of every run and stop")
    what.add_argument("--dry-run", action="store_true", help="print every run and its command and stop")
    what.add_argument(
        "--report-only", action="store_true",
        help=f"write the report of the suite in --output-dir, as its {SUITE_FILE} describes it, and stop",
    )  # fmt: skip
    parser.add_argument("--slurm", action="store_true", help="submit job arrays instead of running on this machine")
    parser.add_argument(
        "--job", action="append", default=[], metavar="KEY=VALUE",
        help="field of the Slurm jobs, as in a study's slurm: time=1:00:00, sbatch.mem=64G; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--parallel", type=int, metavar="N", help="runs at the same time on this machine (default: as studies)"
    )
    parser.add_argument(
        "flags", nargs="*", metavar="FLAGS",
        help="after --: flags of all runs, over those of the size; a sweep starts at their --lr, and --min-lr is a "
        "tenth of the rate unless it is given",
    )  # fmt: skip
    return parser


@returns_exit_status("stability")
def main(argv: Sequence[str]) -> int:
    """Run, submit or list the suite, and write its report; return the exit status."""
    options = build_parser().parse_args(argv)
    from megafp8.cli import training_pool
    from megafp8.launch import slurm, stability, study_execution
    from megafp8.launch.built_in_sizes import SIZES

    if options.report_only:
        check_report_only(options)
        sys.stdout, sys.stderr = best_effort(sys.stdout), best_effort(sys.stderr)  # the terminal may be closed
        report(options.output_dir)
        return 0
    suite = read_suite(options)
    data = suite.parsed.config.data
    built_in_data.check_data(data, suite.folder)
    study = stability.build_study(suite)
    parts = stability.part_runs(study)
    stability_checkpoint.check_continuation(suite.checkpoint, parts, built_in_data.is_built_in(data, suite.folder))
    runs = stability.unique_runs(parts)
    controls = None
    if stability.CONTROLS in suite.parts:
        controls = stability.plan_controls(suite, TRAINING_SCRIPT, built_in_data.rules_before(data, suite.folder))
    queued = study_execution.queued_ids(study.folder)
    progress = [study_execution.run_progress(run, queued) for run in runs]
    due = [each.run for each in progress if stability.is_unfinished(each)]
    if options.status:
        print(study_execution.status_text(progress) if progress else "no whole runs")
        if controls is not None:
            print(f"{stability.CONTROLS}: {training_pool.effort_of_forks(controls)} to do")
        return 0
    jobs = build_jobs(study, due) if options.slurm else []
    effort = f"{len(runs)} runs, {len(due)} to start"
    if controls is not None:
        effort += f"; {stability.CONTROLS}: {training_pool.effort_of_forks(controls)}"
    if options.dry_run:
        for run in () if options.slurm else runs:
            print(f"{run.label}: {' '.join(study_execution.train_command(run, TRAINING_SCRIPT))}")
        for fork in (*controls.trunks, *controls.forks) if controls else ():
            print(f"{stability.CONTROLS}/{fork.name}: {' '.join(fork.command)}")
        print("".join(f"{slurm.script(job)}\n" for job in jobs), end="")
        print(effort)
        return 0
    sys.stdout, sys.stderr = best_effort(sys.stdout), best_effort(sys.stderr)  # the terminal may be closed
    parallel, gpus = places(suite.gpus, options.parallel) if controls else (1, [])
    stability.write_suite_file(suite, parts, controls.forks if controls else ())
    built_in_data.prepare_data(data, suite.folder, SIZES[suite.size].corpus_bytes)
    log(f"{effort}; folder {study.folder}")
    if options.slurm:
        for line in study_execution.submit(study, due):
            log(line)
        if options.parts is None:
            log(f"not submitted: {stability.CONTROLS}; later, the same command without --slurm runs it")
        return 0
    status = run_suite(runs, due, options.parallel)
    if controls is not None and status != PREEMPTED:
        of_controls = training_pool.train_forks(controls, parallel, gpus)
        status = of_controls if of_controls == PREEMPTED else status or of_controls
    report(suite.folder)
    return status


def places(ranks: int, parallel: Optional[int]) -> tuple[int, list[str]]:
    """How many runs of so many ranks this machine takes at a time, at most as many as asked for, and its GPUs.

    Raises:
        ConfigError: it has too few GPUs.
    """
    from megafp8.cli import training_pool
    from megafp8.launch import study_execution

    num_gpus = len(study_execution.visible_gpus())
    most = num_gpus // ranks if num_gpus else parallel or 1
    if not most:
        raise ConfigError(f"--gpus {ranks}: this machine has {num_gpus}")
    number = min(parallel or most, most)
    return number, training_pool.share_devices(number, ranks, num_gpus)[0]


def check_report_only(options: argparse.Namespace) -> None:
    """Check that --report-only has a suite to report, and no flags that it would ignore.

    Raises:
        ConfigError: the folder has no suite, or other flags are given.
    """
    from megafp8.launch.stability import SUITE_FILE

    parser, problems = build_parser(), []
    others = {name: value for name, value in vars(options).items() if name not in ("output_dir", "report_only")}
    ignored = [
        "flags after --" if name == "flags" else f"--{name.replace('_', '-')}"
        for name, value in others.items() if value not in ([], parser.get_default(name))
    ]  # fmt: skip
    if ignored:
        problems.append(f"--report-only reads {SUITE_FILE} and ignores {', '.join(ignored)}: remove them")
    if not (options.output_dir / SUITE_FILE).is_file():
        problems.append(
            f"--output-dir {options.output_dir} has no {SUITE_FILE}: run the suite first, or name the folder of one"
        )
    if problems:
        raise ConfigError(problems)


def build_jobs(study: Study, due: Sequence[StudyRun]) -> list[Job]:
    """The Slurm jobs of the runs to start.

    Raises:
        ConfigError: fields of --job that are wrong.
    """
    from megafp8.launch import study_execution

    try:
        return study_execution.build_jobs(study, due)
    except ConfigError as error:
        raise ConfigError([f"--job: {problem.removeprefix('slurm: ')}" for problem in error.problems]) from None


def run_suite(runs: Sequence[StudyRun], due: Sequence[StudyRun], parallel: Optional[int]) -> int:
    """Run what is due on this machine; return the exit status of the suite. A divergence is a result."""
    from megafp8.launch import study_execution
    from megafp8.launch.stability import is_finished

    gpus = study_execution.visible_gpus()
    study_execution.check_gpus(due, gpus)
    status = study_execution.run_here(
        due, TRAINING_SCRIPT, parallel, gpus, log, results=(NumericsError.exit_status,)
    )  # fmt: skip
    is_complete = all(is_finished(study_execution.run_progress(run)) for run in runs)
    return status or (0 if is_complete else PREEMPTED)


def read_suite(options: argparse.Namespace) -> Suite:
    """The suite that the flags ask for.

    Raises:
        ConfigError: combinations of flags that are wrong.
    """
    from megafp8.config.flags import parse_with_problems
    from megafp8.launch.stability import CONTINUATION, CONTROLS, FAULTS_ELSEWHERE, NUM_SEEDS, PARTS, Suite

    problems = [] if options.fault_seeds is None else [f"--fault-seeds {options.fault_seeds}: {FAULTS_ELSEWHERE}"]
    if options.parallel is not None and (options.parallel < 1 or options.slurm):
        problems.append(f"--parallel {options.parallel}: must be at least 1, and is not for --slurm")
    if options.gpus < 1:
        problems.append(f"--gpus {options.gpus}: must be at least 1")
    if options.job and not options.slurm:
        problems.append("--job is for --slurm: give both, or remove it")
    if options.parts is None:
        left_out = {"" if options.checkpoint else CONTINUATION, CONTROLS if options.slurm else ""}
        parts = tuple(name for name in PARTS if name not in left_out)
    else:
        parts = words_of(options.parts)
    if options.slurm and CONTROLS in parts:
        problems.append(
            f"--slurm: {CONTROLS} forks runs that are done; leave it out, and repeat the command without --slurm for it"
        )
    if not parts:
        problems.append(f"--parts names no part: choose from {', '.join(PARTS)}")
    problems += seed_problems(options, parts) + stability_checkpoint.checkpoint_problems(options.checkpoint, parts)
    slurm = read_job_fields(options.job, problems)
    if problems:
        raise ConfigError(problems)
    data = parse_with_problems(options.flags)[0].config.data
    return Suite(
        folder=options.output_dir, size=options.size, parts=parts, recipes=words_of(options.recipes),
        num_seeds=NUM_SEEDS if options.seeds is None else options.seeds, num_sweep_seeds=options.sweep_seeds,
        flags=(*built_in_data.data_flags(options.output_dir, data), *options.flags),
        checkpoint=options.checkpoint,
        checkpoint_flags=stability_checkpoint.read_flags(options.checkpoint) if options.checkpoint else (),
        gpus=options.gpus, slurm=slurm,
    )  # fmt: skip


def seed_problems(options: argparse.Namespace, parts: Sequence[str]) -> list[str]:
    """Numbers of seeds that no part uses."""
    from megafp8.launch.stability import PAIRED, SWEEP

    problems = []
    for flag, number, users in (
        ("--seeds", options.seeds, PAIRED), ("--sweep-seeds", options.sweep_seeds, (SWEEP,)),
    ):  # fmt: skip
        if number is not None and parts and not set(users) & set(parts):
            problems.append(f"{flag} {number}: has no effect without {' or '.join(users)} in --parts; remove it")
    return problems


def read_job_fields(words: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """The fields of --job KEY=VALUE; KEY is NAME.KEY for a field that is a mapping. Appends to `problems`."""
    fields: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        name, dot, inner = key.partition(".")
        if not name or not value or bool(dot) != bool(inner):
            problems.append(f"--job {word}: must be KEY=VALUE, or NAME.KEY=VALUE for {' and '.join(MAPPINGS)}")
        elif not dot and name in MAPPINGS:
            problems.append(f"--job {word}: give its keys one by one, as in --job {name}.KEY=VALUE")
        elif not dot:
            fields[name] = value
        elif name not in MAPPINGS:
            problems.append(f"--job {word}: {name} has no keys; those that have: {', '.join(MAPPINGS)}")
        else:
            fields.setdefault(name, {})[inner] = value
    return fields


def words_of(text: str) -> tuple[str, ...]:
    """The names in a comma-separated list, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def report(folder: Path) -> None:
    """Write the report of the runs so far, and print its verdicts."""
    from megafp8.analysis.stability_page import publish_suite, to_text

    suite_report, written = publish_suite(folder)
    log(to_text(suite_report))
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
