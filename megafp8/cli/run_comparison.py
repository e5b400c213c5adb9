"""Train one model in several recipes with the same seeds, data order and evaluation, and report the differences.

    megafp8 run-comparison --recipes bf16,tensorwise,nvfp4 --seeds 3 --output runs/cmp
    megafp8 run-comparison --recipes bf16,delayed --seeds 3 --output runs/cmp -- --train-iters 1000
    megafp8 run-comparison --recipes bf16,delayed --seeds 3 --output runs/cmp -- ALL FLAGS OF A TRAINING COMMAND

Flags after -- that name no model replace those of a built-in size, and data are the bytes of Python's standard library,
unless the flags name others. With a model they are the complete training command, unless --size is given, too.

Runs are in OUTPUT/RECIPE/SEED. Repeating the command skips runs that are done and resumes the others. A run that
fails is reported, and the others continue. The report is in OUTPUT/report: report.html, Markdown, JSON and plots.
`megafp8 compare` writes it again from the records, on any machine.

    megafp8 run-comparison --forks --recipes bf16,tensorwise,nvfp4 --seeds 4 --output runs/forks

With --forks only runs in BF16 are trained, the trunks, one for each seed. From their checkpoints every recipe and BF16
train some steps on the same batches. The report, OUTPUT/report/forks.html, says what switching to a recipe
costs after so many steps: far fewer steps show a small cost than with whole runs, but the cost of a whole run is
another question.

Recipes: bf16, bf16-control (other microbatches, to show the effect of rounding alone), tensorwise, delayed, rowwise,
blockwise, mxfp8, nvfp4, quartet2. The suffixes -e4m3, -hybrid and -e5m2 give an FP8 recipe another format. --variant
adds any other set of flags. Exit status: 0 if all runs are done, else that of the first problem (64 for wrong flags, 70
for a run that failed).
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from megafp8.cli import built_in_data
from megafp8.cli.command_flags import add_flags, argument, float_flag, int_flag, path_flag, switch
from megafp8.cli.common import TRAINING_SCRIPT, build_command_parser, returns_exit_status
from megafp8.cli.training_pool import effort_of_forks, share_devices, train, train_forks
from megafp8.config import flags, iterations, rules, variants
from megafp8.config.rules.base import Rule
from megafp8.config.schema import RunConfig
from megafp8.errors import PREEMPTED, ConfigError, Megafp8Error
from megafp8.launch.built_in_sizes import (
    COMPARISON_SIZES,
    ComparisonSize,
    comparison_flags,
    names_model,
    shared_micro_batch_size,
)
from megafp8.launch.compared_runs import discard_partial_checkpoints, run_problems
from megafp8.launch.forks import ForkPlan, plan_forks
from megafp8.launch.process_pool import PooledRun, training_command
from megafp8.resilience.run_state import current_state, finished_state

DEFAULT_BOUND, DEFAULT_TITLE = 0.5, "Comparison of recipes"


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_command_parser(__doc__),
        path_flag("--output-dir --output", "folder of all runs and the report (default %(default)s)", metavar="D",
                  default=Path("runs/comparison")),
        argument("--size", "built-in model and run (default: by device, where the flags after -- name no model)",
                 choices=list(COMPARISON_SIZES)),
        argument("--recipes", f"comma-separated: {', '.join(variants.names())} (default %(default)s); the first is the "
                 "baseline", default=f"{variants.BASELINE},tensorwise", metavar="NAMES"),
        argument("--variant", "another variant with its flags: edges='--recipe tensorwise "
                 "--first-last-layers-bf16'", action="append", default=[], metavar="NAME='FLAGS'"),
        int_flag("--seeds", "number of seeds, counted up from --seed (default 1)", default=1),
        int_flag("--parallel", "number of runs at the same time (default 1; with a built-in size one for each core or "
                 "GPU)"),
        int_flag("--nproc-per-node", "ranks of a run; above 1 under torchrun (default 1)", default=1),
        argument("--forks", "compare forks of BF16 runs, from these of their steps: 200,400 (default: a quarter, half "
                 "and three quarters of --train-iters)", nargs="?", const="", metavar="STEPS"),
        int_flag("--fork-length", "steps of a fork (default: an eighth of --train-iters)"),
        switch("--controls", "with --forks: also settings that are known to be worse, each against its good form, all "
               "emulated; if none is found, there is no verdict"),
        int_flag("--runs-per-gpu", "runs that share a GPU (default %(default)s)", default=1),
        float_flag("--bound", "accepted increase of the validation loss over the baseline (default %(default)g)",
                   default=DEFAULT_BOUND, metavar="PERCENT"),
        argument("--title", "title of the report", default=DEFAULT_TITLE),
        switch("--no-report", "train only"),
        switch("--csv", "also write runs.csv and steps.csv to the report's folder"),
        switch("--dry-run", "check everything, say what would run and stop; nothing is written"),
        switch("--verbose", "with --dry-run: also print the command of each run"),
        argument("flags", "after --: flags that all runs share", nargs="*", metavar="FLAGS"),
    )  # fmt: skip


def use_size(options: argparse.Namespace, num_gpus: int) -> Optional[ComparisonSize]:
    """Put the flags of a built-in size and of its data before those that all runs share.

    Returns:
        The size; None if the flags after -- are complete training commands.

    Raises:
        ConfigError: the flags name a tokenizer and no data.
    """
    parsed, _ = flags.parse_with_problems(options.flags)
    is_complete = names_model(parsed) or parsed.given & {"model.num_layers", "model.hidden_size"}
    if is_complete and options.size is None:
        return None
    size = COMPARISON_SIZES[options.size or ("gpu" if num_gpus else "laptop")]
    words = [*comparison_flags(size, parsed), *built_in_data.data_flags(options.output_dir, parsed.config.data)]
    if options.forks is not None:  # forks load the state of their trunks
        words = [word for word in words if word not in ("--no-save-optim", "--no-save-rng")]
    config = flags.parse_with_problems([*words, *options.flags])[0].config
    micro = shared_micro_batch_size(config, parsed.given, options.nproc_per_node)
    options.flags = [*words, *(() if micro is None else ("--micro-batch-size", str(micro))), *options.flags]
    built_in_data.check_data(config.data, options.output_dir)
    return size


def default_parallel(
    size: Optional[ComparisonSize], num_runs: int, ranks: int, num_gpus: int, runs_per_gpu: int = 1
) -> int:
    """Return the number of runs at the same time: of a built-in size one for each core or place on a GPU."""
    devices = num_gpus * runs_per_gpu or len(os.sched_getaffinity(0))
    return runs_per_gpu if size is None else max(1, min(num_runs, devices // max(1, ranks)))


def effort_text(size: Optional[ComparisonSize], num_runs: int, options: argparse.Namespace, shared: RunConfig) -> str:
    """Return how many runs there are, and with a built-in size how long they take and how much disk they need."""
    steps = iterations.train_iters(shared, options.nproc_per_node)
    text = f"{num_runs} runs of {steps:,} steps, {options.parallel} at a time"
    if size is None:
        return f"{text}, in {options.output_dir}"
    seconds = math.ceil(num_runs / options.parallel) * (size.startup_seconds + steps * size.seconds_per_step)
    disk_bytes = num_runs * size.run_bytes
    if built_in_data.is_built_in(shared.data, options.output_dir):
        disk_bytes += round(size.corpus_bytes * built_in_data.BYTES_PER_TEXT_BYTE)
    return f"{text}: about {math.ceil(seconds / 60)} minutes and {disk_bytes / 1e6:,.0f} MB in {options.output_dir}"


def dry_run_text(runs: Sequence[PooledRun], options: argparse.Namespace, shared: RunConfig) -> str:
    """Return the runs and what they read and write; with --verbose also the command of each."""
    names, folder = list(dict.fromkeys(run.folder.parent.name for run in runs)), options.output_dir
    lines = [f"baseline: {names[0]}", f"compared with it: {', '.join(names[1:]) or 'nothing'}"]
    lines.append(f"seeds: {', '.join(dict.fromkeys(run.folder.name.removeprefix('seed') for run in runs))}")
    if built_in_data.is_built_in(shared.data, folder):
        lines.append(f"data: bytes of Python's standard library, in {folder / 'data'}")
    lines += [] if options.no_report else [f"report: {folder / 'report'}"]
    if options.verbose:
        lines += [f"{run.name}: {shlex.join(run.command)}" for run in runs]
    return "\n".join([*lines, f"nothing was written{'' if options.verbose else '; --verbose shows the commands'}"])


def shared_settings(options: argparse.Namespace) -> tuple[RunConfig, tuple[Rule, ...]]:
    """Return the settings that all runs share, and the rules that apply to them.

    Raises:
        ConfigError: everything that is wrong with them.
    """
    counts = {
        "--seeds": options.seeds, "--parallel": options.parallel, "--nproc-per-node": options.nproc_per_node,
        "--runs-per-gpu": options.runs_per_gpu,
    }  # fmt: skip
    shared, problems = variants.parse_shared_flags(options.flags, str(options.output_dir))
    problems += [f"{flag} {value} must be at least 1" for flag, value in counts.items() if value < 1]
    ignored = {
        "--csv": options.csv,
        "--bound": options.bound != DEFAULT_BOUND,
        "--title": options.title != DEFAULT_TITLE,
    }
    if options.forks is not None:
        problems += [f"{flag} has no effect with --forks: remove it" for flag, is_given in ignored.items() if is_given]
    problems += ["--controls is for --forks: give both"] if options.controls and options.forks is None else []
    problems += [] if 0 <= options.bound < 100 else [f"--bound {options.bound} must be from 0 to below 100 percent"]
    checked = built_in_data.rules_before(shared.data, options.output_dir)
    problems += [] if problems else rules.found_by(checked, shared, options.nproc_per_node)
    if problems:
        raise ConfigError(problems)
    return shared, checked


def plan_runs(
    options: argparse.Namespace, shared: RunConfig, checked: tuple[Rule, ...], device_flags: Sequence[str]
) -> list[PooledRun]:
    """Return the requested runs, ordered by seed.

    Args:
        device_flags: flags that this machine adds to every run.

    Raises:
        ConfigError: everything that is wrong with any of them, also folders that hold other runs.
    """
    ranks, problems = options.nproc_per_node, list[str]()
    chosen, runs = variants_of(options, shared), []
    for seed in range(shared.training.seed, shared.training.seed + options.seeds):
        for variant in chosen:
            folder = options.output_dir / variant.name / f"seed{seed}"
            own = (*variant.flags, "--seed", str(seed), "--save", str(folder), "--load", str(folder))
            words = [*device_flags, *options.flags, *own]
            problems += [f"{variant.name}: {text}" for text in run_problems(words, ranks, folder, checked)]
            command = training_command(TRAINING_SCRIPT, ranks, words)
            runs.append(PooledRun(name=f"{variant.name}/seed{seed}", command=command, folder=folder, gpus=ranks))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return runs


def variants_of(options: argparse.Namespace, shared: RunConfig) -> list[variants.Variant]:
    """Return the variants of --recipes, then those of --variant.

    Raises:
        ConfigError: a name that is unknown or given twice, or a malformed variant.
    """
    recipes = [name.strip() for name in options.recipes.split(",") if name.strip()]
    chosen = [variants.build_variant(name, shared, options.nproc_per_node) for name in recipes]
    chosen += [variants.parse_variant(text) for text in options.variant]
    counts = Counter(variant.name for variant in chosen)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ConfigError(f"--recipes and --variant name {', '.join(twice)} twice")
    if not chosen:
        raise ConfigError(f"--recipes {options.recipes!r} names no recipe: give some of {', '.join(variants.names())}")
    return chosen


def report(runs: Sequence[PooledRun], options: argparse.Namespace) -> None:
    """Compare the runs that are done, and list the others.

    Raises:
        DataError: no run of the baseline is done.
    """
    from megafp8.analysis import tables
    from megafp8.analysis.comparison_page import publish_comparison
    from megafp8.analysis.runs import describe_unfinished

    comparison, written = publish_comparison(
        [run.folder for run in runs if current_state(run.folder) is not None], baseline=runs[0].folder.parent.name,
        output_folder=options.output_dir / "report", bound_fraction=options.bound / 100, title=options.title,
        unfinished=[describe_unfinished(run.folder) for run in runs if current_state(run.folder) is None],
        has_csv=options.csv,
    )  # fmt: skip
    print(tables.to_text(comparison))
    for path in written:
        print(f"wrote {path}", file=sys.stderr)


def run_forks(
    options: argparse.Namespace, shared: RunConfig, checked: tuple[Rule, ...], gpus: Sequence[str],
    device_flags: Sequence[str], size: Optional[ComparisonSize],
) -> int:  # fmt: skip
    """Train trunks and forks, and report what switching costs; return the exit status."""
    plan = ForkPlan(
        folder=options.output_dir, flags=options.flags, num_seeds=options.seeds, ranks=options.nproc_per_node,
        steps=options.forks, length=options.fork_length, controls=options.controls,
    )  # fmt: skip
    runs = plan_forks(plan, shared, variants_of(options, shared), device_flags, TRAINING_SCRIPT, checked)
    print(f"{effort_of_forks(runs)}, {options.parallel} at a time, in {options.output_dir}", file=sys.stderr)
    if options.dry_run:
        every = (*runs.trunks, *runs.forks)
        print("\n".join(f"{run.name}: {shlex.join(run.command)}" for run in every) if options.verbose else "")
        return 0
    if size is not None:
        built_in_data.prepare_data(shared.data, options.output_dir, size.corpus_bytes)
    status = train_forks(runs, options.parallel, gpus)
    if status == PREEMPTED or options.no_report:
        return status
    from megafp8.analysis import forks_page

    try:
        found, written = forks_page.publish_forks(options.output_dir)
    except Megafp8Error as error:
        print(f"run_comparison: {error}", file=sys.stderr)
        return status or error.exit_status
    print(forks_page.to_text(found))
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    return status


@returns_exit_status("run-comparison")
def main(argv: Sequence[str]) -> int:
    """Run and return the exit status."""
    options, status = build_parser().parse_args(argv), 0
    try:
        from megafp8.device.capability import count_gpus

        num_gpus = count_gpus()
        size = use_size(options, num_gpus)
        if options.parallel is None:
            num_runs = options.seeds * (len(options.recipes.split(",")) + len(options.variant))
            options.parallel = default_parallel(size, num_runs, options.nproc_per_node, num_gpus, options.runs_per_gpu)
        gpus, device_flags = share_devices(options.parallel, options.nproc_per_node, num_gpus, options.runs_per_gpu)
        shared, checked = shared_settings(options)
        if options.forks is not None:
            return run_forks(options, shared, checked, gpus, device_flags, size)
        runs = plan_runs(options, shared, checked, device_flags)
        if size is not None or options.dry_run:
            num_due = sum(finished_state(run.folder) is None for run in runs)
            print(effort_text(size, num_due, options, shared), file=sys.stderr)
        if options.dry_run:
            print(dry_run_text(runs, options, shared))
            return 0
        if size is not None:
            built_in_data.prepare_data(shared.data, options.output_dir, size.corpus_bytes)
        if shared.checkpoint.no_save_optim or shared.checkpoint.no_save_rng:
            for run in runs:
                if finished_state(run.folder) is None:
                    discard_partial_checkpoints(run)
        num_steps = iterations.train_iters(shared, options.nproc_per_node)
        status = train(runs, options.parallel, gpus, num_steps)
        if status != PREEMPTED and not options.no_report:
            report(runs, options)
        return status
    except Megafp8Error as error:
        print(f"run_comparison: {error}", file=sys.stderr)
        return status or error.exit_status  # of a failed run before that of the report
