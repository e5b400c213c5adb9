"""Report on a scaling study: loss over compute and size, the law of each recipe, its shift by FP8, speed.

    megafp8 scaling-report runs/stdlib_cpu --output-dir runs/stdlib_cpu/report
    megafp8 scaling-report docs/reports/stdlib_cpu/points.json

Prints tables; with --output-dir it writes report.html (one file with its pictures), report.md with laws.svg,
report.json, and points.json, from which the report can be written again. docs/scaling_studies.md
describes the fits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megafp8.cli.command_flags import add_flags, argument, path_flag, switch
from megafp8.cli.common import build_command_parser, returns_exit_status
from megafp8.utils.files import path_argument


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_command_parser(__doc__),
        argument("study", "folder of a study, or points.json of a report", type=path_argument, metavar="STUDY_FOLDER"),
        path_flag("--output-dir", "write the page and its data here", metavar="DIR"),
        argument("--baseline", "recipe to compare with (default: bf16, else the first)", metavar="RECIPE"),
        switch("--json", "print JSON instead of tables"),
    )  # fmt: skip


@returns_exit_status("scaling-report")
def main(argv: Sequence[str]) -> int:
    """Fit, print and write the report; return the exit status."""
    arguments = build_parser().parse_args(argv)
    from megafp8.analysis.scaling_page import publish_study
    from megafp8.analysis.scaling_report import to_text

    report, written = publish_study(arguments.study, arguments.output_dir, baseline=arguments.baseline)
    print(report.to_json() if arguments.json else to_text(report))
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    return 0
