"""Predict the tokens per day of a run under failures, saves and restarts, and the best save interval.

    megafp8 goodput --model-preset llama3-405b --gpus 16384 --gpu h100 --restart-s 300
    megafp8 goodput --gpus 512 --step-s 5 --tokens-per-step 16e6 --checkpoint-gb 5000 --days 30

The run is the fastest layout that megafp8 plan finds. Accepts all flags of megafp8 pretrain as well; --save-interval
and --async-save are those of the run. docs/planning.md has the defaults.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megafp8.cli import plan
from megafp8.cli.common import build_command_parser, returns_exit_status
from megafp8.cli.goodput_flags import add_goodput_flags


def build_parser() -> argparse.ArgumentParser:
    parser = build_command_parser(__doc__, allow_abbrev=False)
    plan.add_cluster_flags(parser)
    add_goodput_flags(parser, is_shown=True)
    parser.set_defaults(goodput=True, scaling=None, top=None, plot=None)
    return parser


@returns_exit_status("goodput")
def main(argv: Sequence[str]) -> int:
    """Print the goodput; return 0, or 64 with wrong flags or when nothing fits."""
    return plan.run(*build_parser().parse_known_args(argv))
