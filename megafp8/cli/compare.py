"""Compare finished runs: tables on standard output; with --output-dir also an HTML page, Markdown, JSON and plots.

    megafp8 compare runs/bf16 runs/fp8 --output-dir runs/comparison
    megafp8 compare runs/recipes/*/seed* --baseline bf16 --bound 1 --output-dir runs/recipes/report

Runs that differ only in their seed are one recipe. Each is compared with the baseline's run of the same seed. With two
or more seeds there is a verdict: whether the interval of the gap is within the bound. Only the records are needed. A
run that is not done, by its run_state.json, is listed without results unless --include-unfinished is given. Exit
status: 64 for wrong flags, 66 for runs that are missing, damaged or not comparable.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from megafp8.cli.command_flags import add_flags, argument, float_flag, int_flag, path_flag, switch
from megafp8.cli.common import build_command_parser, returns_exit_status
from megafp8.errors import ConfigError
from megafp8.utils.files import path_text, visible


def build_parser() -> argparse.ArgumentParser:
    parser = add_flags(
        build_command_parser(__doc__),
        argument("runs", "folder of a run (its --save)", nargs="+", type=path_text, metavar="RUN"),
        argument("--baseline", "run or recipe to compare with (default: the first)", type=path_text, metavar="RUN"),
        path_flag("--output-dir", "write report.html, comparison.md, comparison.json, gaps.svg and loss_curves.png "
                  "here"),
        switch("--json", "print JSON instead of the table"),
    )  # fmt: skip
    add_comparison_flags(parser)
    return parser


def add_comparison_flags(group: Any) -> None:
    """Add the flags of a comparison to a parser or a group of one."""
    add_flags(
        group,
        float_flag("--bound", "accepted increase of the validation loss over the baseline (default: %(default)g)",
                   default=0.5, metavar="PERCENT"),
        float_flag("--confidence", "confidence level of the intervals (default: %(default)g)", default=95.0,
                   metavar="PERCENT"),
        switch("--csv", "with --output-dir, also write runs.csv and steps.csv"),
        switch("--include-unfinished", "also show results of unfinished runs; their recipes get no verdict"),
        int_flag("--warmup-steps", "first steps to leave out of the speed (default: %(default)s)", default=10),
        argument("--title", "title of the page and the plots", default="Comparison of recipes"),
    )  # fmt: skip


def problems_of(arguments: argparse.Namespace) -> list[str]:
    """Return what is wrong with the numbers, each with its value."""
    checks = {
        f"--bound {arguments.bound:g} must be from 0 to below 100 percent": 0 <= arguments.bound < 100,
        f"--confidence {arguments.confidence:g} must be above 0 and below 100 percent": 0 < arguments.confidence < 100,
        f"--warmup-steps {arguments.warmup_steps} must be at least 0": arguments.warmup_steps >= 0,
    }
    problems = [text for text, is_right in checks.items() if not is_right]
    if arguments.csv and arguments.output_dir is None:
        problems.append("--csv has no effect without --output-dir: give the folder to write to")
    return problems


@returns_exit_status("compare")
def main(argv: Sequence[str]) -> int:
    """Print and write the comparison; return the exit status."""
    arguments = build_parser().parse_args(argv)
    from megafp8.analysis import tables
    from megafp8.analysis.comparison_page import publish_comparison

    if problems := problems_of(arguments):
        raise ConfigError(problems)
    comparison, written = publish_comparison(
        arguments.runs, baseline=arguments.baseline, output_folder=arguments.output_dir,
        warmup_steps=arguments.warmup_steps, bound_fraction=arguments.bound / 100,
        confidence=arguments.confidence / 100, title=arguments.title,
        include_unfinished=arguments.include_unfinished, has_csv=arguments.csv,
    )  # fmt: skip
    print(tables.to_json(comparison) if arguments.json else tables.to_text(comparison))
    for path in written:
        print(visible(f"wrote {path}"), file=sys.stderr)
    return 0
