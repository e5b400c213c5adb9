"""Report on a scaling study: loss over compute and size, the law of each recipe, its shift by FP8, speed.

    python tools/scaling_report.py runs/stdlib_cpu --output-dir runs/stdlib_cpu/report
    python tools/scaling_report.py docs/reports/stdlib_cpu/points.json

Prints tables; with --output-dir it writes report.html (one file with its pictures), report.md with laws.svg,
report.json, and points.json, from which the report can be written again. docs/scaling_studies.md
describes the fits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megafp8.cli.common import Parser, build_command_parser, returns_exit_status
from megafp8.utils.files import path_argument


def build_parser() -> argparse.ArgumentParser:
    parser = build_command_parser(__doc__, Parser)
    parser.add_argument(
        "study", type=path_argument, metavar="STUDY_FOLDER", help="folder of a study, or points.json of a report"
    )
    parser.add_argument("--output-dir", type=path_argument, metavar="DIR", help="write the page and its data here")
    parser.add_argument("--baseline", metavar="RECIPE", help="recipe to compare with (default: bf16, else the first)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


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
