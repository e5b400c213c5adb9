#!/usr/bin/env python3
"""A picture of what quantization did in a run that had --fp8-log-interval, and its findings.

    python tools/plot_telemetry.py runs/first --output-dir report
    python tools/plot_telemetry.py runs/first --field sqnr_db --recipe mxfp8 --output-dir report

Above: a field of every linear's operands over the steps. Below: the codes of the last look by exponent.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

from megafp8.utils.files import path_argument, path_text

PICTURE = "telemetry.png"
# As in megafp8/analysis/plot_quantization.py, which is not imported before the flags are read.
FIELDS = ("underflow_fraction", "saturated_fraction", "codes_changed_fraction", "update_to_weight", "sqnr_db",
          "mean_local_sqnr_db", "amax", "scale_spread_octaves", "staleness_octaves", "outlier_octaves")  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=path_text, metavar="RUN", help="folder that a run had as --save")
    parser.add_argument("--field", choices=FIELDS, default=FIELDS[0], help=f"what to draw; default {FIELDS[0]}")
    parser.add_argument("--recipe", metavar="NAME", help="one of --fp8-what-if; default the run's own")
    parser.add_argument(
        "--output-dir", type=path_argument, default=Path("."), metavar="D", help=f"write {PICTURE} here"
    )
    return parser


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run and return the exit status."""
    arguments = build_parser().parse_args(argv)
    from megafp8.analysis.plot_quantization import plot_telemetry
    from megafp8.analysis.runs import load_run
    from megafp8.errors import Megafp8Error

    try:
        run = load_run(arguments.run)
        picture = plot_telemetry(run, arguments.output_dir / PICTURE, field=arguments.field, recipe=arguments.recipe)
    except Megafp8Error as error:
        print(f"plot_telemetry: {error}", file=sys.stderr)
        return error.exit_status
    for event in run.events:
        if event.name == "health":
            print(f"step {event.step}: {event.detail}")
    print(f"wrote {picture}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
