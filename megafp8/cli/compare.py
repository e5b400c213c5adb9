"""Compare finished runs: tables on standard output; with --output-dir also an HTML page, Markdown, JSON and plots.

    python tools/compare_runs.py runs/bf16 runs/fp8 --output-dir runs/comparison
    python tools/compare_runs.py runs/recipes/*/seed* --baseline bf16 --bound 1 --output-dir runs/recipes/report

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

from megafp8.cli.common import Parser, build_command_parser, returns_exit_status
from megafp8.errors import ConfigError
from megafp8.utils.files import path_argument, path_text, visible


def build_parser() -> argparse.ArgumentParser:
    parser = build_command_parser(__doc__, Parser)
    parser.add_argument("runs", nargs="+", type=path_text, metavar="RUN", help="folder of a run (its --save)")
    parser.add_argument(
        "--baseline", type=path_text, metavar="RUN", help="run or recipe to compare with; default: the first"
    )
    parser.add_argument(
        "--output-dir", type=path_argument,
        help="write report.html, comparison.md, comparison.json, gaps.svg and loss_curves.png here",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    add_flags(parser)
    return parser


def add_flags(group: Any) -> None:
    """Add the flags of a comparison to a parser or a group of one."""
    group.add_argument(
        "--bound", type=float, default=0.5, metavar="PERCENT",
        help="accepted increase of the validation loss over the baseline (default %(default)g)",
    )  # fmt: skip
    group.add_argument(
        "--confidence",
        type=float,
        default=95.0,
        metavar="PERCENT",
        help="confidence level of the intervals (default %(default)g)",
    )
    group.add_argument(
        "--include-unfinished", action="store_true",
        help="also show results of unfinished runs; their recipes get no verdict",
    )  # fmt: skip
    group.add_argument(
        "--warmup-steps", type=int, default=10, help="first steps to leave out of the speed (default %(default)s)"
    )
    group.add_argument("--title", default="Comparison of recipes", help="title of the page and the plots")


def problems_of(arguments: argparse.Namespace) -> list[str]:
    """Return what is wrong with the numbers, each with its value."""
    checks = {
        f"--bound {arguments.bound:g} must be from 0 to below 100 percent": 0 <= arguments.bound < 100,
        f"--confidence {arguments.confidence:g} must be above 0 and below 100 percent": 0 < arguments.confidence < 100,
        f"--warmup-steps {arguments.warmup_steps} must be at least 0": arguments.warmup_steps >= 0,
    }
    return [text for text, is_right in checks.items() if not is_right]


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
        include_unfinished=arguments.include_unfinished,
    )  # fmt: skip
    print(tables.to_json(comparison) if arguments.json else tables.to_text(comparison))
    for path in written:
        print(visible(f"wrote {path}"), file=sys.stderr)
    return 0
