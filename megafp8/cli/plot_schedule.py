"""Show the schedules of learning rate and batch size of a training command: a table, and a plot with --output.

    megafp8 plot-schedule --output schedule.png --train-iters 10000 --global-batch-size 64 \\
      --micro-batch-size 8 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 200 --lr-decay-style WSD --lr-wsd-decay-iters 2000

Give the flags of megafp8 pretrain, all of them or those of the schedule. The schedule is computed as in the run. Give
--world-size N if the global batch size depends on the number of ranks. Flags that the run refuses are refused here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megafp8.analysis.plotting import picture_problems
from megafp8.cli.command_flags import add_flags, path_flag, switch
from megafp8.cli.common import build_command_parser, install_patches, returns_exit_status
from megafp8.config import flags, iterations, rules, topology
from megafp8.config.data_phases import schedule_marks
from megafp8.config.lr_schedule import schedule_samples
from megafp8.config.rules import batch, data, declared, optimizer, profile, training
from megafp8.config.rules.base import rules_of
from megafp8.config.rules.setting_warnings import warmup_warnings
from megafp8.config.schema import RunConfig
from megafp8.errors import ConfigError
from megafp8.utils.formatting import text_table

if TYPE_CHECKING:
    from megafp8.optimizer.schedules import ScheduledStep

NUM_DRAWN = 2000
NUM_ROWS = 10


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_command_parser(__doc__, allow_abbrev=False),
        path_flag("--output", "write a plot to F (.png, .svg or .pdf)", metavar="F"),
        switch("--json", "print JSON instead of the table"),
    )  # fmt: skip


def read_config(words: Sequence[str]) -> tuple[RunConfig, int]:
    """Return the settings and the world size of a training command.

    Raises:
        ConfigError: flags that cannot be read, or a schedule, batch or length that a run would refuse.
    """
    parsed, problems = flags.parse_with_problems(words)
    ranks = parsed.world_size or topology.model_parallel_size(parsed.config)
    checks = (declared.numbers_are_in_range, *rules_of(profile, training, batch, optimizer))
    checks += (data.data_phases_follow_each_other,)
    found = rules.found_by(checks, parsed.config, ranks)
    # A schedule counts samples, not tokens: the sequence length may be left out.
    problems += [text for text in found if not text.startswith("--seq-length is missing")]
    if problems:
        raise ConfigError(problems)
    return parsed.config, ranks


def rows_of(config: RunConfig, ranks: int, marks: dict[str, float]) -> list[int]:
    """Return the steps of the table: the first, the last, tenths of the run, the marks, and changes of the batch."""
    last = iterations.train_iters(config, ranks)
    tenths = (1 + round(index * (last - 1) / NUM_ROWS) for index in range(NUM_ROWS + 1))
    changes = batch_changes(config, ranks)
    return sorted({*tenths, *(min(last, round(step)) for step in marks.values()), *changes[:NUM_ROWS]})


def batch_changes(config: RunConfig, ranks: int) -> list[int]:
    """Return the first step of each further batch size."""
    step, last, found = 1, iterations.train_iters(config, ranks), []
    for _, _, num_steps in iterations.batch_schedule(config, ranks).segments():
        if 1 < step <= last:
            found.append(step)
        step += num_steps or 0
    return found


def table(found: Sequence[ScheduledStep], marks: dict[str, float], config: RunConfig, ranks: int) -> str:
    """Return a row for each step, with its marks."""
    length, is_constant = config.data.seq_length, iterations.batch_schedule(config, ranks).is_constant
    header = [
        "step", "samples before", "tokens before", "batch", "learning rate", "embedding and output", "weight decay", "",
    ]  # fmt: skip
    lines = [header]
    for each in found:
        samples = each.samples_before
        rate = each.decoupled_learning_rate
        here = [name for name, step in marks.items() if round(step) == each.step]
        lines.append(
            [
                f"{each.step:,}", f"{samples:,}", "" if length is None else f"{samples * length:,}",
                "" if is_constant else f"{each.global_batch_size:,}",
                f"{each.learning_rate:.4g}", "" if rate is None else f"{rate:.4g}", f"{each.weight_decay:.4g}",
                ", ".join(here),
            ]
        )  # fmt: skip
    shown = [column for column in zip(*lines, strict=True) if any(column[1:])]
    first, *rows = zip(*shown, strict=True)
    return text_table(first, rows, "r")


@returns_exit_status("plot-schedule")
def main(argv: Sequence[str]) -> int:
    """Run and return the exit status."""
    options, words = build_parser().parse_known_args(argv)
    if problems := picture_problems("--output", options.output):
        raise ConfigError(problems)
    config, ranks = read_config(words)
    install_patches()
    from megafp8.optimizer.schedules import preview_schedule

    for warning in warmup_warnings(config, ranks):
        print(f"notice: {warning}", file=sys.stderr)
    marks, last = schedule_marks(config, ranks), iterations.train_iters(config, ranks)
    samples, batches = schedule_samples(config, ranks), iterations.batch_schedule(config, ranks)
    found = preview_schedule(config.optimizer, samples, batches, rows_of(config, ranks, marks))
    if options.json:
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=2))
    else:
        print(table(found, marks, config, ranks))
    if options.output is not None:
        # Every step of a short run; of a long one equal strides and the corners.
        stride = max(1, last // NUM_DRAWN)
        corners = {min(last, round(step)) for step in marks.values()}
        corners |= {near for step in batch_changes(config, ranks) for near in (step - 1, step)}
        steps = sorted({*range(1, last + 1, stride), *corners, last})
        drawn = preview_schedule(config.optimizer, samples, batches, steps)
        draw(drawn, marks, config, options.output)
        print(f"wrote {options.output}", file=sys.stderr)
    return 0


def draw(found: Sequence[ScheduledStep], marks: dict[str, float], config: RunConfig, output: Path) -> None:
    """Write the picture."""
    from megafp8.analysis.plots import plot_schedule

    optimizer = config.optimizer
    end = f", {optimizer.lr_wsd_decay_style}" if optimizer.lr_decay_style == "WSD" else ""
    rates = {"all other weights": [each.learning_rate for each in found]}
    if found[0].decoupled_learning_rate is not None:
        rates["embedding and output layer"] = [each.decoupled_learning_rate or 0.0 for each in found]
    plot_schedule(
        [each.step for each in found], rates, [each.weight_decay for each in found], output, marks=marks,
        batch_sizes=[each.global_batch_size for each in found],
        title=f"{optimizer.lr_decay_style}{end}, peak {optimizer.lr:g}",
    )  # fmt: skip
