"""The `megafp8` command, which runs the module of a subcommand in this folder."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Optional

from megafp8 import __version__
from megafp8.cli.subcommands import COMMANDS, SUBCOMMANDS
from megafp8.errors import ConfigError, Megafp8Error

USAGE = """\
usage: megafp8 COMMAND [flags]

Pretrain GPT models in FP8 and FP4, on one CPU or many GPUs.
"""


def help_text() -> str:
    """Return the text of `megafp8 --help`; imports no subcommand."""
    width = max(map(len, SUBCOMMANDS))
    groups = (
        f"\n{title}\n" + "".join(f"  {name:{width}}  {text}\n" for name, text in commands.items())
        for title, commands in COMMANDS.items()
    )
    return f"{USAGE}{''.join(groups)}\nHelp on a command: megafp8 COMMAND --help. Version: megafp8 --version.\n"


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run a subcommand and return its exit status; 64 for a subcommand that does not exist."""
    if "_ARGCOMPLETE" in os.environ:
        from megafp8.cli.completion import complete

        complete()  # does not return
    words = sys.argv[1:] if argv is None else list(argv)
    name = words[0].replace("_", "-") if words else ""
    if name in SUBCOMMANDS:
        sys.argv = ["megafp8", *words[1:]]
        return run(name)
    if words in (["--help"], ["-h"]):
        print(help_text(), end="")
        return 0
    if words == ["--version"]:
        print(f"megafp8 {__version__}")
        return 0
    from megafp8.utils.suggestions import did_you_mean  # here: a subcommand does not need it

    if not words:
        problem = "which subcommand? See megafp8 --help"
    else:
        near = did_you_mean(name, SUBCOMMANDS, count=3, similarity=0.6)
        problem = f"{words[0]}: no such subcommand{near or '; see --help'}"
    print(f"megafp8: {problem}", file=sys.stderr)
    return ConfigError.exit_status


def run(name: str) -> int:
    """Run a subcommand on the arguments of the process, and return its exit status."""
    sys.argv[0] = f"megafp8 {name}"  # argparse takes the name in usage lines from here
    try:
        command = importlib.import_module(f"megafp8.cli.{name.replace('-', '_')}")
    except Megafp8Error as error:  # in a recipe of MEGAFP8_RECIPES, whose names are choices of flags
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_status
    return command.main()


if __name__ == "__main__":
    sys.exit(main())
