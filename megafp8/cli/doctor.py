"""Say what this machine has, whether training can run on it, which recipe runs how, and how to fix each problem.

    python tools/doctor.py
    python tools/doctor.py --gpus 8 --folder runs --strict || exit    # in a job script, before training

Looks at Python, torch, CUDA, driver, cuDNN, NCCL, Transformer Engine, megatron-core, Triton's compiler, NVLink, shared
memory, open files and the disk, and works where any of them is broken or missing. Exit status 0: training can run; 64:
it cannot; with --strict 1 where there are warnings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from megafp8.cli.common import build_command_parser, returns_exit_status
from megafp8.utils.files import path_text


def build_parser() -> argparse.ArgumentParser:
    parser = build_command_parser(__doc__)
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs that must be there (default: none)")
    parser.add_argument(
        "--folder", type=path_text, default=".", help="where runs will be saved: its disk is tried (default: here)"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 where there are warnings")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


@returns_exit_status("doctor")
def main(argv: Sequence[str]) -> int:
    """Print the report; return its exit status."""
    arguments = build_parser().parse_args(argv)
    from megafp8.launch.doctor.checks import run_checks
    from megafp8.launch.doctor.facts import find_machine
    from megafp8.launch.doctor.report import exit_status, report_data, report_text

    machine = find_machine(arguments.folder)
    findings = run_checks(machine, arguments.gpus)
    text = json.dumps(report_data(machine, findings), indent=2) if arguments.json else report_text(machine, findings)
    print(text)
    return exit_status(findings, arguments.strict)
