#!/usr/bin/env python3
"""Compare finished runs: a table on standard output; with --output-dir also Markdown, JSON and loss curves."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that a run had as --save")
    parser.add_argument("--baseline", metavar="RUN", help="run to compare with, folder or name; default the first")
    parser.add_argument("--output-dir", type=Path, help="write comparison.md, comparison.json and loss_curves.png here")
    parser.add_argument("--warmup-steps", type=int, default=10, help="first steps that do not count for the speed")
    parser.add_argument("--title", default="Training loss", help="title of the picture")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser


def main(argv: Optional[Sequence[str]] = None) -> int:
    arguments = build_parser().parse_args(argv)
    from megafp8.errors import Megafp8Error
    from megafp8.reports.publish import publish_comparison

    try:
        comparison, written = publish_comparison(
            arguments.runs,
            baseline=arguments.baseline,
            output_folder=arguments.output_dir,
            warmup_steps=arguments.warmup_steps,
            title=arguments.title,
        )
    except Megafp8Error as error:
        print(f"compare_runs: {error}", file=sys.stderr)
        return error.exit_status
    print(comparison.to_json() if arguments.json else comparison.to_text())
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
