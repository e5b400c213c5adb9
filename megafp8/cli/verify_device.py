"""Compare what this GPU computes natively with the emulation, and write a report.

    megafp8 verify-device
    megafp8 verify-device --recipes mxfp8 nvfp4 --parts casts linears --output report

For every recipe that Transformer Engine supports on the GPU: codes and scales byte for byte, results of linears within
a derived bound, ten training steps of a small model, and the speed of linears with casts against BF16; then the
attention backends. Other recipes are trained emulated, and the emulation on the GPU is compared with that on the CPU.
The report is written as report.md and report.json, and can be attached to an issue. Exit status: 0 if everything
agrees, 1 if not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megafp8.cli.command_flags import add_flags, argument, path_flag
from megafp8.cli.common import TRAINING_SCRIPT, build_command_parser, returns_exit_status, stderr_log
from megafp8.recipes import registry
from megafp8.utils.files import atomic_write_json, atomic_write_text

PARTS = ("casts", "linears", "steps", "speed", "attention")
log = stderr_log("verify-device: ")


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_command_parser(__doc__),
        argument("--recipes", f"recipes to compare, of {', '.join(registry.names())} (default: all)", nargs="+",
                 choices=registry.names(), default=list(registry.names()), metavar="NAME"),
        argument("--parts", f"what to compare, of {', '.join(PARTS)} (default: all)", nargs="+", choices=PARTS,
                 default=list(PARTS), metavar="PART"),
        path_flag("--output", "folder of the report (default: %(default)s)", default=Path("runs/device_report"),
                  metavar="FOLDER"),
    )  # fmt: skip


@returns_exit_status()
def main(argv: Sequence[str]) -> int:
    """Write the report; return the exit status."""
    arguments = build_parser().parse_args(argv)
    from megafp8.mcore import cpu_patches

    cpu_patches.install()
    from megafp8.launch.doctor.facts import installed_packages
    from megafp8.training.device_verification.report import report_data, report_text
    from megafp8.training.device_verification.verify import find_device, verify

    device = find_device(installed_packages())
    native = None
    if device.native_recipes:
        from megafp8.te.native import TransformerEngineLayers

        native = TransformerEngineLayers()
    found = verify(device, native, arguments.recipes, arguments.parts, TRAINING_SCRIPT, log)
    text = report_text(found)
    atomic_write_text(arguments.output / "report.md", text)
    atomic_write_json(arguments.output / "report.json", report_data(found))
    print(text)
    return 1 if found.problems else 0
