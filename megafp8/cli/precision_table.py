"""Train one model in FP32, BF16, FP8 and FP4, and write the table of speed, memory, loss and largest micro-batch.

    megafp8 precision-table --output-dir runs/precision_table -- TRAINING FLAGS

By default: FP32, BF16, each FP8 recipe that is native on this device, and FP4 (emulated where it is not native).
Without native recipes, all FP8 recipes of Transformer Engine are emulated. Each precision has two runs, one after the
other: the training that the flags describe, and two steps with --micro-batch-size auto, which finds the largest size
that fits. OUTPUT_DIR has their folders, precision_table.md and precision_table.json. Repeating the command skips runs
that are done and resumes the others; a run that fails is reported in the table, and the others continue. Exit status: 0
if all runs are done, 70 if one failed, 75 after a stop signal, 64 for wrong flags.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from megafp8.cli.command_flags import add_flags, argument, float_flag, int_flag, path_flag, switch
from megafp8.cli.common import TRAINING_SCRIPT, build_command_parser, returns_exit_status, stderr_log
from megafp8.config import variants
from megafp8.errors import INTERNAL, PREEMPTED, ConfigError
from megafp8.launch.compared_runs import discard_partial_checkpoints, run_problems, visible_devices
from megafp8.launch.process_pool import OUTPUT_FILE, PooledRun, ProcessPool, RunOutcome, training_command
from megafp8.recipes import registry
from megafp8.resilience.run_state import finished_state
from megafp8.utils.files import atomic_write_json, atomic_write_text

UNQUANTIZED = {"fp32": (), "fp16": ("--fp16",)}
"""Flags of the precisions that are no variants of BF16."""
TRAINING, SEARCH = "training", "largest"
SEARCH_STEPS = 2
log = stderr_log("precision-table: ")


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_command_parser(__doc__),
        path_flag("--output-dir", "folder of all runs and the table", required=True, metavar="D"),
        argument("--precisions", f"comma-separated: {', '.join((*UNQUANTIZED, *variants.names()))}; default: see "
                 "above. The first is the baseline", metavar="NAMES"),
        int_flag("--nproc-per-node", "ranks of each run (default: %(default)s)", default=1),
        int_flag("--search-batch", "global batch of the search for the largest micro-batch, whose divisors are tried "
                 "(default: %(default)s; 0: no search)", default=512),
        float_flag("--memory-limit", "memory that the search may use (default: 95%% of the GPU, or of the machine's "
                   "free memory)", metavar="GIB"),
        argument("--title", "title of the table", default="One model in several precisions"),
        switch("--dry-run", "check everything, print the commands and stop"),
        argument("flags", "after --: the flags that all runs share", nargs="*", metavar="FLAGS"),
    )  # fmt: skip


def default_precisions(native: Sequence[str]) -> list[str]:
    """FP32, BF16, the FP8 recipes that are native, or else all that Transformer Engine has, and its FP4 recipes."""
    known = [recipe for recipe in registry.recipes() if recipe.te_recipe_class is not None]
    fp8 = [recipe.name for recipe in known if recipe.family == "fp8"]
    chosen = [name for name in fp8 if name in native] or fp8
    return ["fp32", variants.BASELINE, *chosen, *(recipe.name for recipe in known if recipe.family == "fp4")]


def native_recipes() -> list[str]:
    """Recipes that are native on this machine."""
    from megafp8.device import capability

    return capability.native_recipes(capability.detect_target())


def plan_runs(options: argparse.Namespace, names: Sequence[str]) -> list[PooledRun]:
    """All runs, in the order in which they start.

    Raises:
        ConfigError: everything that is wrong with any of them, also folders that hold other runs.
    """
    shared, problems = variants.parse_shared_flags(options.flags, str(options.output_dir))
    if options.search_batch < 0:
        problems.append(f"--search-batch {options.search_batch}: must be at least 1, or 0 for no search")
    if options.nproc_per_node < 1:
        problems.append(f"--nproc-per-node {options.nproc_per_node} must be at least 1")
    if unknown := [name for name in names if name not in UNQUANTIZED and not variants.is_known(name)]:
        choices = (*UNQUANTIZED, *variants.names())
        problems += [f"--precisions {variants.unknown_name_text(name, choices)}" for name in unknown]
    if len(set(names)) < len(names) or not names:
        problems.append(f"--precisions {options.precisions!r}: give at least one name, and each once")
    if shared.precision.bf16 or shared.precision.fp16:
        problems.append("--bf16, --fp16 in the flags of all runs: set by --precisions; remove it")
    if problems:
        raise ConfigError(problems)
    limit = () if options.memory_limit is None else ("--micro-batch-size-memory-limit", str(options.memory_limit))
    runs, ranks = [], options.nproc_per_node
    for name in names:
        own = UNQUANTIZED[name] if name in UNQUANTIZED else variants.build_variant(name, shared, ranks).flags
        search = (
            "--micro-batch-size", "auto", "--global-batch-size", str(options.search_batch),
            "--train-iters", str(SEARCH_STEPS), "--eval-iters", "0", *limit,
        )  # fmt: skip
        for part, more in ((TRAINING, ()), (SEARCH, search))[: 1 + bool(options.search_batch)]:
            folder = options.output_dir / name / part
            words = [*options.flags, *own, *more, "--save", str(folder), "--load", str(folder)]
            trained = folder if part == TRAINING else None  # a search records the size that it found
            problems += [f"{name}, {part}: {text}" for text in run_problems(words, ranks, trained)]
            command = training_command(TRAINING_SCRIPT, ranks, words)
            runs.append(PooledRun(name=f"{name}/{part}", command=command, folder=folder, gpus=ranks))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return runs


def run_all(runs: Sequence[PooledRun]) -> tuple[list[RunOutcome], bool]:
    """Run what is not done yet, one after the other; outcomes, and whether a signal stopped them."""
    from megafp8.device.capability import count_gpus

    waiting = [run for run in runs if finished_state(run.folder) is None]
    for run in waiting:
        if "--no-save-optim" in run.command or "--no-save-rng" in run.command:
            discard_partial_checkpoints(run)
    if len(waiting) < len(runs):
        log(f"{len(runs) - len(waiting)} of {len(runs)} runs are done already")

    def ended(outcome: RunOutcome) -> None:
        if outcome.is_done:
            log(f"{outcome.run.name}: done in {outcome.seconds:.0f} s")
        else:
            log(f"{outcome.run.name}: NOT DONE: {outcome.reason}; see {outcome.run.folder / OUTPUT_FILE}")

    num_gpus, needed = count_gpus(), max((run.gpus for run in runs), default=0)
    if 0 < num_gpus < needed:
        raise ConfigError(f"--nproc-per-node {needed}: this machine has {num_gpus} GPUs")
    gpus = visible_devices(num_gpus)[:needed] if num_gpus else []
    pool = ProcessPool(1, gpus, on_start=lambda run, _: log(f"{run.name}: started"), on_end=ended)
    return pool.run(waiting), pool.is_stopping


def write_table(options: argparse.Namespace, names: Sequence[str], outcomes: Sequence[RunOutcome]) -> str:
    """Write Markdown and JSON; return the Markdown."""
    from megafp8.analysis.precision_rows import facts_of, read_row, table_data, table_markdown

    reasons = {outcome.run.name: outcome.reason for outcome in outcomes if not outcome.is_done}
    parts = (TRAINING, SEARCH)[: 1 + bool(options.search_batch)]
    rows = []
    facts: list[str] = []
    for name in names:
        folders = {part: options.output_dir / name / part for part in parts}
        done = {part: folder for part, folder in folders.items() if finished_state(folder) is not None}
        problems = [f"{part}: {reasons.get(f'{name}/{part}', 'not started')}" for part in parts if part not in done]
        rows.append(read_row(name, done.get(TRAINING), done.get(SEARCH), problems))
        facts = facts or facts_of(done.get(TRAINING))
    text = table_markdown(rows, options.title, facts)
    atomic_write_text(options.output_dir / "precision_table.md", text)
    atomic_write_json(options.output_dir / "precision_table.json", table_data(rows, options.title, facts))
    return text


@returns_exit_status("precision-table")
def main(argv: Sequence[str]) -> int:
    """Run, write the table and return the exit status."""
    options = build_parser().parse_args(argv)
    if options.precisions is None:
        names = default_precisions(native_recipes())
    else:
        names = [name.strip() for name in options.precisions.split(",") if name.strip()]
    runs = plan_runs(options, names)
    if options.dry_run:
        print("\n".join(f"{run.name}: {shlex.join(run.command)}" for run in runs))
        return 0
    outcomes, is_stopped = run_all(runs)
    print(write_table(options, names, outcomes))
    if is_stopped:
        log("stopped by a signal; the same command resumes")
        return PREEMPTED
    return 0 if all(outcome.is_done for outcome in outcomes) else INTERNAL
