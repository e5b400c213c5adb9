"""Check whether training can run on this machine and how each recipe runs, and print a fix for each problem.

    megafp8 doctor
    megafp8 doctor --gpus 8 --folder runs --strict || exit    # in a job script, before training

Checks Python, torch, CUDA, driver, cuDNN, NCCL, Transformer Engine, megatron-core, Triton's compiler, NVLink, shared
memory, open files and the disk. Each of them may be broken or missing. Exit status: 0 if training can run, 64 if not,
1 with --strict if there are warnings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from megafp8.cli.command_flags import add_flags, argument, int_flag, switch
from megafp8.cli.common import build_command_parser, returns_exit_status
from megafp8.utils.files import path_text


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_command_parser(__doc__),
        int_flag("--gpus", "required number of GPUs (default: 0)", default=0),
        argument("--folder", "folder for runs, whose disk is tested (default: the current folder)", type=path_text,
                 default="."),
        switch("--strict", "exit with status 1 if there are warnings"),
        switch("--json", "print JSON instead of text"),
    )  # fmt: skip


@returns_exit_status("doctor")
def main(argv: Sequence[str]) -> int:
    """Print the report; return its exit status."""
    arguments = build_parser().parse_args(argv)
    from megafp8.launch.doctor.checks import run_checks
    from megafp8.launch.doctor.facts import find_machine
    from megafp8.launch.doctor.report import exit_status, report_data, report_text

    machine = find_machine(arguments.folder)
    results = run_checks(machine, arguments.gpus)
    text = json.dumps(report_data(machine, results), indent=2) if arguments.json else report_text(machine, results)
    print(text)
    return exit_status(results, arguments.strict)
