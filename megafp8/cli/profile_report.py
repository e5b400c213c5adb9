"""Show where the time of a profiled step goes: parts of the step, each beside its floor, idle time and communication.

    megafp8 report profile runs/profiled
    megafp8 report profile runs/profiled/profile/rank3.json --json

Kernels of the GPU are in parts by their names, operators on a CPU. A floor is the planner's FLOPs or bytes of the part
at the peak of the GPU; a trace outside of its run's folder has none. A kernel that fuses parts is in one of them.
Exit status: 64 for wrong flags, 66 for a trace that is missing or damaged, or has nothing to report.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from megafp8.cli.command_flags import add_flags, argument, switch
from megafp8.cli.common import build_command_parser, returns_exit_status
from megafp8.utils.files import path_argument


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_command_parser(__doc__, prog="megafp8 report profile"),
        argument("trace", "folder of a run (its --save) with --profile, or the file of a trace", type=path_argument,
                 metavar="RUN_OR_TRACE"),
        switch("--json", "print JSON instead of tables"),
    )  # fmt: skip


@returns_exit_status("report profile")
def main(argv: Sequence[str]) -> int:
    """Print the report; return the exit status."""
    arguments = build_parser().parse_args(argv)
    from megafp8.analysis.profile_report import report_profile

    report = report_profile(arguments.trace)
    print(json.dumps(report.to_data(), indent=2) if arguments.json else report.to_text())
    return 0
