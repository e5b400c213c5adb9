"""Test the stability of recipes: paired runs, a sweep to divergence, known-bad controls, and one page.

    python launcher/stability.py --output-dir runs/stability --size tiny --recipes tensorwise,mxfp8
    python launcher/stability.py --output-dir runs/stability --parts pairs,controls -- --data-path ... --num-layers 12

Parts: pairs (paired runs over seeds, compared with BF16's own spread), sweep (learning rates to divergence), controls
(settings that are known to be worse), faults (planted ones: noticed when, repaired by what), and with --checkpoint
continuation. Without --data-path after --, the suite
prepares bytes of Python's standard library. Repeating the command starts or resumes what is not done, and writes
OUTPUT_DIR/report again. With --slurm the runs are job arrays. docs/stability.md describes verdicts and sizes. Exit
status: 0 if all runs have a result or are submitted, 64 for wrong flags, 75 after a signal, else that of the first run
that failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megafp8.cli.common import TRAINING_SCRIPT, Parser, build_command_parser, returns_exit_status
from megafp8.errors import ConfigError
from megafp8.utils.best_effort import best_effort
from megafp8.utils.files import path_argument, path_text

log = partial(print, flush=True)
DATA_SETTINGS = ("data.data_path", "data.train_data_path", "data.mock_data")


def build_parser() -> argparse.ArgumentParser:
    from megafp8.launch.stability import CONTINUATION, PARTS, SIZES
    from megafp8.recipes import registry

    parser = build_command_parser(__doc__, Parser)
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
        "--parts", metavar="NAMES", help=f"comma-separated; default: all, {CONTINUATION} with --checkpoint ({parts})"
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="paired seeds (default: %(default)s)")
    parser.add_argument(
        "--fault-seeds", type=int, default=2, metavar="N", help="seeds of the part faults (default: %(default)s)"
    )
    parser.add_argument(
        "--checkpoint", type=path_text, default="", metavar="FOLDER", help="checkpoint for the part continuation"
    )
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="GPUs of a run; on a CPU: ranks (default: %(default)s)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="print the state of every run and stop")
    what.add_argument("--dry-run", action="store_true", help="print every run and its command and stop")
    what.add_argument("--report-only", action="store_true", help="write the report of the runs so far and stop")
    parser.add_argument("--slurm", action="store_true", help="submit job arrays instead of running on this machine")
    parser.add_argument(
        "--job", action="append", default=[], metavar="KEY=VALUE",
        help="field of the Slurm jobs, as in a study's slurm: time=1:00:00; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--parallel", type=int, metavar="N", help="runs at the same time on this machine (default: as studies)"
    )
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="after --: flags of all runs, over those of the size")
    return parser


@returns_exit_status("stability")
def main(argv: Sequence[str]) -> int:
    """Run, submit or list the suite, and write its report; return the exit status."""
    options = build_parser().parse_args(argv)
    from megafp8.launch import stability, study_execution

    suite = read_suite(options)
    study = stability.build_study(suite)
    parts = stability.part_runs(study)
    runs = stability.unique_runs(parts)
    queued = study_execution.queued_ids(study.folder)
    progress = [study_execution.run_progress(run, queued) for run in runs]
    due = [each.run for each in progress if stability.is_unfinished(each)]
    if options.status:
        print(study_execution.status_text(progress))
        return 0
    if options.dry_run:
        for run in runs:
            print(f"{run.label}: {' '.join(study_execution.train_command(run, TRAINING_SCRIPT))}")
        print(f"{len(runs)} runs, {len(due)} to start")
        return 0
    sys.stdout, sys.stderr = best_effort(sys.stdout), best_effort(sys.stderr)  # the terminal may be closed
    stability.write_suite_file(suite, parts)
    status = 0
    if not options.report_only:
        prepare_data(suite, options.flags)
        log(f"{len(runs)} runs, {len(due)} to start; folder {study.folder}")
        if options.slurm:
            for line in study_execution.submit(study, due):
                log(line)
            return 0
        gpus = study_execution.visible_gpus()
        study_execution.check_gpus(due, gpus)
        study_execution.run_here(due, TRAINING_SCRIPT, options.parallel, gpus, log)
        status = status_of([study_execution.run_progress(run) for run in runs])
    report(suite.folder)
    return status


def status_of(progress: Sequence) -> int:
    """Exit status of the suite: 0 if every run has a result, else that of the first run without one."""
    from megafp8.errors import INTERNAL, PREEMPTED
    from megafp8.launch import stability

    failed = [each for each in progress if not stability.is_finished(each)]
    if not failed:
        return 0
    if any(each.found is None or each.state == "preempted" for each in failed):
        return PREEMPTED
    return failed[0].found.exit_status or INTERNAL


def read_suite(options: argparse.Namespace):
    """The suite that the flags ask for.

    Raises:
        ConfigError: combinations of flags that are wrong.
    """
    from megafp8.launch.stability import CONTINUATION, PARTS, Suite

    problems = []
    if options.parallel is not None and (options.parallel < 1 or options.slurm):
        problems.append(f"--parallel {options.parallel}: must be at least 1, and is not for --slurm")
    if options.fault_seeds < 1:
        problems.append(f"--fault-seeds {options.fault_seeds}: must be at least 1")
    if options.gpus < 1:
        problems.append(f"--gpus {options.gpus}: must be at least 1")
    if options.job and not options.slurm:
        problems.append("--job is for --slurm: give both, or remove it")
    pairs = [text.partition("=") for text in options.job]
    problems += [f"--job {key}: must be KEY=VALUE" for key, _, value in pairs if not key or not value]
    if options.parts is None:
        parts = tuple(name for name in PARTS if name != CONTINUATION or options.checkpoint)
    else:
        parts = words_of(options.parts)
    if options.checkpoint and CONTINUATION not in parts:
        problems.append(f"--checkpoint is for the part {CONTINUATION}: name it in --parts, or remove it")
    if not parts:
        problems.append(f"--parts names no part: choose from {', '.join(PARTS)}")
    if problems:
        raise ConfigError(problems)
    return Suite(
        folder=options.output_dir, size=options.size, parts=parts, recipes=words_of(options.recipes),
        num_seeds=options.seeds, num_fault_seeds=options.fault_seeds,
        flags=(*data_flags(options), *options.flags), checkpoint=options.checkpoint,
        gpus=options.gpus, slurm={key: value for key, _, value in pairs},
    )  # fmt: skip


def words_of(text: str) -> tuple[str, ...]:
    """The names in a comma-separated list, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def names_data(flags: Sequence[str]) -> bool:
    """Whether the flags name their own data."""
    from megafp8.config.flags import parse_with_problems

    invocation, _ = parse_with_problems(list(flags))
    return not invocation.given.isdisjoint(DATA_SETTINGS)


def data_flags(options: argparse.Namespace) -> tuple[str, ...]:
    """Flags of the data that the suite prepares; none if the flags name data."""
    if names_data(options.flags):
        return ()
    prefix = data_prefix(options.output_dir)
    return (
        "--tokenizer-type", "ByteLevelTokenizer", "--data-path", f"{prefix}_text_document", "--split", "90,10,0",
        "--data-cache-path", str(prefix.parent / "cache"),
    )  # fmt: skip


def data_prefix(folder: Path) -> Path:
    """Prefix of the shards that the suite prepares."""
    return folder / "data" / "bytes"


def prepare_data(suite, flags: Sequence[str]) -> None:
    """Write the bytes of Python's standard library as shards, unless they exist or the flags name data.

    Raises:
        ConfigError: the corpus or the shards cannot be written.
    """
    if names_data(flags):
        return
    from megafp8.cli import corpus, preprocess
    from megafp8.launch.stability import SIZES

    prefix = data_prefix(suite.folder)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    text = prefix.with_suffix(".jsonl")
    steps = (
        (corpus.main, ["--output", str(text), "--max-bytes", str(SIZES[suite.size].corpus_bytes)]),
        (preprocess.main, ["--input", str(text), "--output-prefix", str(prefix), "--append-eod", "--tokenizer-type",
                           "ByteLevelTokenizer"]),
    )  # fmt: skip
    for step, arguments in steps:
        if step(arguments):
            raise ConfigError(f"{prefix}: the suite's data could not be prepared; see above, or give --data-path")


def report(folder: Path) -> None:
    """Write the report of the runs so far, and print its verdicts."""
    from megafp8.analysis.stability_page import publish_suite, to_text

    suite_report, written = publish_suite(folder)
    log(to_text(suite_report))
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
