"""Plot the quantization statistics of a run with --fp8-log-interval, and print its findings.

    python tools/plot_telemetry.py runs/first --output-dir report
    python tools/plot_telemetry.py runs/first --field sqnr_db --recipe mxfp8 --output-dir report

Top: a field of the operands of every linear over the steps. Bottom: the codes of the last record, by exponent.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megafp8.cli.common import build_command_parser, returns_exit_status
from megafp8.utils.files import path_argument, path_text

PICTURE = "telemetry.png"
# Those of megafp8/analysis/plot_quantization.py, whose import is too slow for --help.
FIELDS = ("underflow_fraction", "saturated_fraction", "codes_changed_fraction", "update_to_weight", "sqnr_db",
          "mean_local_sqnr_db", "amax", "scale_spread_octaves", "staleness_octaves", "outlier_octaves")  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    parser = build_command_parser(__doc__)
    parser.add_argument("run", type=path_text, metavar="RUN", help="folder of a run (its --save)")
    parser.add_argument("--field", choices=FIELDS, default=FIELDS[0], help=f"field to plot; default {FIELDS[0]}")
    parser.add_argument("--recipe", metavar="NAME", help="one of --fp8-what-if; default: the recipe of the run")
    parser.add_argument(
        "--output-dir", type=path_argument, default=Path("."), metavar="D", help=f"write {PICTURE} here"
    )
    return parser


@returns_exit_status("plot-statistics")
def main(argv: Sequence[str]) -> int:
    """Write the picture and print the findings; return the exit status."""
    arguments = build_parser().parse_args(argv)
    from megafp8.analysis.plot_quantization import plot_telemetry
    from megafp8.analysis.runs import load_run

    run = load_run(arguments.run)
    picture = plot_telemetry(run, arguments.output_dir / PICTURE, field=arguments.field, recipe=arguments.recipe)
    for event in run.events:
        if event.name == "health":
            print(f"step {event.step}: {event.detail}")
    print(f"wrote {picture}", file=sys.stderr)
    return 0
