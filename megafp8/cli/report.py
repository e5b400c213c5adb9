"""Report on finished runs, a scaling study or a profile: tables on standard output; with --output-dir also a page.

    megafp8 report runs/bf16 runs/fp8 --output-dir runs/comparison
    megafp8 report runs/stdlib_cpu --output-dir runs/stdlib_cpu/report
    megafp8 report profile runs/profiled

Runs are compared as by megafp8 compare. A study is given by its folder or by the points.json of an earlier
report, and its scaling laws are fitted as by megafp8 scaling-report. Runs of one size in a study, or in a folder of
runs, are ranked by their settings. All write report.html, Markdown, JSON and plots, a ranking also CSV. For a profile
see megafp8 report profile --help. Exit status: 64 for wrong flags, 66 for runs that are missing, damaged or not
comparable.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megafp8.cli import compare, profile_report, scaling_report
from megafp8.cli.command_flags import add_flags, argument, path_flag, switch
from megafp8.cli.common import build_command_parser, returns_exit_status
from megafp8.errors import ConfigError
from megafp8.utils.files import path_argument, path_text

PROFILE = "profile"
"""In place of folders; a folder of this name is `./profile`."""


def build_parser() -> argparse.ArgumentParser:
    parser = add_flags(
        build_command_parser(__doc__),
        argument("folders", "folders of runs (their --save), one folder of a study, or its points.json", nargs="+",
                 type=path_argument, metavar="FOLDER"),
        argument("--baseline", "run or recipe to compare with", type=path_text, metavar="NAME"),
        path_flag("--output-dir", "write the page and its data here", metavar="DIR"),
        switch("--json", "print JSON instead of tables"),
    )  # fmt: skip
    compare.add_comparison_flags(parser.add_argument_group("comparison of runs"))
    return parser


def is_study(path: Path) -> bool:
    """Whether a path is a study's folder, one with the folders of runs, or the file of a study's points."""
    from megafp8.analysis.study_points import STUDY_FILE, folders_of_runs

    return path.is_file() or (path / STUDY_FILE).is_file() or bool(folders_of_runs(path))


@returns_exit_status("report")
def main(argv: Sequence[str]) -> int:
    """Report with the command for these folders, which refuses flags of the other; return the exit status."""
    if argv[:1] == [PROFILE]:
        return profile_report.main(argv[1:])
    folders = build_parser().parse_args(argv).folders
    studies = [path for path in folders if is_study(path)]
    if studies and len(folders) > 1:
        raise ConfigError(f"{studies[0]}: is a study, and {len(folders)} folders are given: report on a study alone")
    return scaling_report.main(argv) if studies else compare.main(argv)
