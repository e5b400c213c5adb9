#!/usr/bin/env python3
"""Train one model in several recipes, each with the same seeds, data order and evaluation, and report what they cost.

    python tools/run_comparison.py --output-dir runs/recipes --recipes bf16,bf16-control,tensorwise,delayed,mxfp8 \\
      --seeds 3 --parallel 2 -- FLAGS OF PRETRAIN_GPT.PY

Runs go to OUTPUT_DIR/RECIPE/SEED. Started again, the command leaves out the runs that are done and goes on with the
others; a run that fails is told and takes no other with it. The report is in OUTPUT_DIR/report: report.html to look at,
Markdown, JSON and a picture; tools/compare_runs.py makes it again from the records alone, on any machine.

Recipes: bf16, bf16-control (the same in other microbatches: what mere rounding does), tensorwise, delayed, blockwise,
mxfp8, nvfp4; with -e4m3, -hybrid or -e5m2 behind an FP8 recipe another format than the usual one. --variant adds what
flags can say. Exit status: 0 when all runs are done, else that of the first problem (64 for wrong flags, 70
for a run that failed).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

from megafp8.cli.common import Parser
from megafp8.config import derived, flags, rules, settings
from megafp8.config.schema import RunConfig
from megafp8.config.variants import BASELINE, Variant, build_variant, differences, names, parse_variant, read_shared
from megafp8.errors import INTERNAL, PREEMPTED, ConfigError, Megafp8Error
from megafp8.launch.process_pool import OUTPUT_FILE, Batch, BatchRun, Outcome
from megafp8.resilience.run_state import current_state, finished_state
from megafp8.utils.best_effort import best_effort
from megafp8.utils.files import UnreadableFile, path_argument, read_text

TRAINER = Path(__file__).resolve().parents[1] / "pretrain_gpt.py"


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output-dir", type=path_argument, required=True, metavar="D", help="folder of all runs and the report"
    )
    parser.add_argument(
        "--recipes",
        default=f"{BASELINE},tensorwise",
        metavar="NAMES",
        help=f"with commas between: {', '.join(names())} (default %(default)s); the first one is the baseline",
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME='FLAGS'",
        help="one more, from flags of its own: edges='--fp8-format hybrid --fp8-recipe tensorwise "
        "--first-last-layers-bf16'",
    )
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="seeds: that of --seed and those after it (default 1)"
    )
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time (default 1)")
    parser.add_argument(
        "--nproc-per-node", type=int, default=1, metavar="N", help="ranks of a run, through torchrun (default 1: none)"
    )
    parser.add_argument("--bound", type=float, default=0.5, metavar="PERCENT",
                        help="validation loss above the baseline's that is accepted (default %(default)g)")  # fmt: skip
    parser.add_argument("--title", default="Comparison of recipes", help="title of the report")
    parser.add_argument("--no-report", action="store_true", help="train only")
    parser.add_argument("--dry-run", action="store_true", help="check everything, show the commands and stop")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="after --: the flags that all runs share")
    return parser


def plan_runs(options: argparse.Namespace, device_flags: Sequence[str]) -> tuple[list[BatchRun], RunConfig]:
    """The runs that are asked for, seed by seed, and the settings that they share.

    Args:
        device_flags: what this machine adds to every run.

    Raises:
        ConfigError: everything that is wrong with any of them, also folders that hold other runs.
    """
    counts = {"--seeds": options.seeds, "--parallel": options.parallel, "--nproc-per-node": options.nproc_per_node}
    ranks, (shared, problems) = options.nproc_per_node, read_shared(options.flags, str(options.output_dir))
    problems += [f"{flag} {value} must be at least 1" for flag, value in counts.items() if value < 1]
    problems += [] if 0 <= options.bound < 100 else [f"--bound {options.bound} must be from 0 to below 100 percent"]
    problems += [] if problems else rules.problems(shared, ranks)
    if problems:
        raise ConfigError(problems)
    variants, runs = variants_of(options, shared), []
    for seed in range(shared.training.seed, shared.training.seed + options.seeds):
        for variant in variants:
            folder = options.output_dir / variant.name / f"seed{seed}"
            own = (*variant.flags, "--seed", str(seed), "--save", str(folder), "--load", str(folder))
            words = [*device_flags, *options.flags, *own]
            problems += [f"{variant.name}: {text}" for text in problems_of(words, folder, ranks)]
            name, command = f"{variant.name}/seed{seed}", command_of(words, ranks)
            runs.append(BatchRun(name=name, command=command, folder=folder, gpus=ranks))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return runs, shared


def variants_of(options: argparse.Namespace, shared: RunConfig) -> list[Variant]:
    """Those of --recipes, then those of --variant.

    Raises:
        ConfigError: a name that is unknown or given twice, or a variant that is none.
    """
    names = [name.strip() for name in options.recipes.split(",") if name.strip()]
    variants = [build_variant(name, shared, options.nproc_per_node) for name in names]
    variants += [parse_variant(text) for text in options.variant]
    names = [variant.name for variant in variants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--recipes and --variant name {', '.join(sorted(twice))} twice")
    if not names:
        raise ConfigError(f"--recipes {options.recipes!r} names no recipe: give some of {', '.join(names())}")
    return variants


def problems_of(words: Sequence[str], folder: Path, ranks: int) -> list[str]:
    """What is wrong with the flags of one run, and with what its folder holds."""
    invocation, problems = flags.read(words)
    problems += rules.problems(invocation.config, ranks)
    if not problems and (folder / "config.json").exists():
        before = read_run_config(folder / "config.json")
        if lines := differences(before, invocation.config):
            problems.append(
                f"{folder} holds a run with other settings ({'; '.join(lines)}): "
                "take another --output-dir, or remove it"
            )
    return problems


def read_run_config(path: Path) -> RunConfig:
    """The settings that a run left.

    Raises:
        ConfigError: the file holds none.
    """
    try:
        return settings.from_json(read_text(path))
    except (UnreadableFile, ConfigError) as error:
        raise ConfigError(f"{path} cannot be read: {error}: take another --output-dir, or remove it") from error


def command_of(words: Sequence[str], ranks: int) -> tuple[str, ...]:
    """The command of a run; one rank needs no launcher."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks > 1 else ()
    return (sys.executable, *launcher, str(TRAINER), *words)


def share_devices(parallel: int, ranks: int, num_gpus: int) -> tuple[list[str], list[str]]:
    """The GPUs for all runs at a time, and the flags that every run gets: without GPUs a share of the cores.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    if not num_gpus:
        threads = max(1, len(os.sched_getaffinity(0)) // (parallel * ranks))
        return [], ["--num-threads", str(threads)]
    if parallel * ranks > num_gpus:
        raise ConfigError(
            f"--parallel {parallel} with --nproc-per-node {ranks} takes {parallel * ranks} GPUs; there are {num_gpus}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(num_gpus)]
    return devices[: parallel * ranks], []


class Display:
    """Lines for runs that begin and end, and a bar over all their steps on a terminal."""

    def __init__(self, num_runs: int, steps_of_run: int):
        from tqdm import tqdm

        self._steps_of_run, self._num_runs, self._ended = steps_of_run, num_runs, 0
        self._bar = tqdm(
            total=num_runs * steps_of_run, unit="step", dynamic_ncols=True, disable=None, smoothing=0.05,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]",
        )  # fmt: skip

    def started(self, run: BatchRun, gpus: Sequence[str]) -> None:
        """A run begins."""
        self._bar.write(f"started  {run.name}", file=sys.stderr)

    def ended(self, outcome: Outcome) -> None:
        """A run ended."""
        self._ended += 1
        head, count = outcome.run.name, f"({self._ended} of {self._num_runs})"
        if outcome.is_done:
            self._bar.write(f"done     {head} in {outcome.seconds:.0f} s {count}", file=sys.stderr)
            return
        if outcome.is_stopped:
            self._bar.write(f"stopped  {head} {count}: {outcome.reason}", file=sys.stderr)
            return
        text = "\n".join(f"    {line}" for line in outcome.tail.splitlines())
        log = outcome.run.folder / OUTPUT_FILE
        self._bar.write(f"FAILED   {head} {count}: {outcome.reason}\n{text}\n    all of it: {log}", file=sys.stderr)

    def stepped(self, steps: Mapping[str, int]) -> None:
        """How far the runs are that go on."""
        self._bar.set_postfix_str(", ".join(f"{name} {step}" for name, step in steps.items()), refresh=False)
        self._bar.n = self._ended * self._steps_of_run + sum(steps.values())
        self._bar.refresh()

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()


def train(runs: Sequence[BatchRun], parallel: int, gpus: Sequence[str], shared: RunConfig, ranks: int) -> int:
    """Run what is not done yet; the exit status that stands for all."""
    sys.stdout, sys.stderr = best_effort(sys.stdout), best_effort(sys.stderr)  # the terminal may be closed
    waiting = [run for run in runs if finished_state(run.folder) is None]
    if len(waiting) < len(runs):
        print(f"{len(runs) - len(waiting)} of {len(runs)} runs are done already", file=sys.stderr)
    if shared.checkpoint.no_save_optim or shared.checkpoint.no_save_rng:
        for run in waiting:
            discard_what_cannot_resume(run)
    display = Display(len(waiting), derived.train_iters(shared, ranks))
    batch = Batch(parallel, gpus, tell_start=display.started, tell_end=display.ended, tell_steps=display.stepped)
    try:
        outcomes = batch.run(waiting)
    finally:
        display.close()
    if batch.is_asked_to_stop:
        print("run_comparison: stopped by a signal; the same command goes on", file=sys.stderr)
        return PREEMPTED
    failed = [outcome.run.name for outcome in outcomes if not outcome.is_done]
    if failed:
        print(f"run_comparison: {len(failed)} of {len(runs)} runs are not done: {', '.join(failed)}", file=sys.stderr)
    return INTERNAL if failed else 0


def discard_what_cannot_resume(run: BatchRun) -> None:
    """Remove the checkpoints of a run that was interrupted, which have only a part of its state: it begins anew."""
    from megafp8.checkpoint.directory import POINTER

    checkpoints = list(run.folder.glob("iter_*"))
    for checkpoint in checkpoints:
        shutil.rmtree(checkpoint)
    if checkpoints:
        (run.folder / POINTER).unlink(missing_ok=True)
        print(f"{run.name} begins anew: what it saved lacks the state to go on (--no-save-optim)", file=sys.stderr)


def recipe_of(run: BatchRun) -> str:
    """The variant that a run is of: the folder above its own."""
    return run.folder.parent.name


def report(runs: Sequence[BatchRun], options: argparse.Namespace) -> None:
    """Compare the runs that are done, and tell of the others.

    Raises:
        DataError: no run of the baseline is done.
    """
    from megafp8.analysis import tables
    from megafp8.analysis.comparison_page import publish_comparison
    from megafp8.analysis.runs import describe_unfinished

    comparison, written = publish_comparison(
        [run.folder for run in runs if current_state(run.folder) is not None], baseline=recipe_of(runs[0]),
        output_folder=options.output_dir / "report", bound_fraction=options.bound / 100, title=options.title,
        unfinished=[describe_unfinished(run.folder) for run in runs if current_state(run.folder) is None],
    )  # fmt: skip
    print(tables.to_text(comparison))
    for path in written:
        print(f"wrote {path}", file=sys.stderr)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run and return the exit status."""
    options, status = build_parser().parse_args(argv), 0
    try:
        import torch

        gpus, device_flags = share_devices(options.parallel, options.nproc_per_node, torch.cuda.device_count())
        runs, shared = plan_runs(options, device_flags)
        if options.dry_run:
            print("\n".join(f"{run.name}: {shlex.join(run.command)}" for run in runs))
            return 0
        status = train(runs, options.parallel, gpus, shared, options.nproc_per_node)
        if status != PREEMPTED and not options.no_report:
            report(runs, options)
        return status
    except Megafp8Error as error:
        print(f"run_comparison: {error}", file=sys.stderr)
        return status or error.exit_status  # the first problem is the run that failed, not the report


if __name__ == "__main__":
    sys.exit(main())
