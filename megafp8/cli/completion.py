"""Shell completion of the `megafp8` command with argcomplete: subcommands, their flags, values of flags, and files.

The shell runs the command with the line in COMP_LINE and _ARGCOMPLETE set. Only the parser that the line is about is
built: that of the command, of a subcommand, or of training after `--`. argcomplete gets the line from the word where
the command of that parser begins.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence

import argcomplete
from argcomplete.completers import ChoicesCompleter
from argcomplete.lexers import split_line

from megafp8.cli.subcommands import SUBCOMMANDS
from megafp8.utils.suggestions import NameType

# They take all flags of training, beside their own or after `--`.
WITH_TRAINING_FLAGS = ("build-index", "plan", "plot-schedule", "pretrain")
WITH_TRAINING_FLAGS_AFTER_DASHES = (
    "coordinate-check", "kubernetes", "precision-table", "run-comparison", "slurm", "torchrun",
)  # fmt: skip
WITHOUT_OWN_FLAGS = ("build-index", "pretrain")


def complete() -> None:
    """Write the completions of the shell's line, and end the process."""
    _, _, _, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    parser, start = parser_for(words)
    os.environ["_ARGCOMPLETE"] = str(start + 1)
    argcomplete.autocomplete(parser)


def parser_for(words: Sequence[str]) -> tuple[argparse.ArgumentParser, int]:
    """Return the parser for the word after these, and the index of its command among them."""
    name = words[1].replace("_", "-") if len(words) > 1 else None
    if name not in SUBCOMMANDS:
        return command_parser(), 0
    if name in WITH_TRAINING_FLAGS_AFTER_DASHES and "--" in words:
        return training_parser(), words.index("--")
    return subcommand_parser(name), 1


def command_parser() -> argparse.ArgumentParser:
    """Build the parser of the command itself."""
    parser = argparse.ArgumentParser(prog="megafp8")
    parser.add_argument("--version", action="store_true", help="print the version")
    subcommands = parser.add_subparsers()
    for name, text in SUBCOMMANDS.items():
        subcommands.add_parser(name, help=text)
    return parser


def subcommand_parser(name: str) -> argparse.ArgumentParser:
    """Build the parser of a subcommand; with the flags of training where it takes them."""
    training = training_parser() if name in WITH_TRAINING_FLAGS else None
    if training and name in WITHOUT_OWN_FLAGS:
        return training
    own = importlib.import_module(f"megafp8.cli.{name.replace('-', '_')}").build_parser()
    for action in own._actions:
        if names := names_of(action):
            action.completer = ChoicesCompleter(dict.fromkeys(names, ""))
    if training is None:
        return own
    for action in own._actions:
        if not set(action.option_strings) & set(training._option_string_actions):  # --help, --version
            training._add_action(action)
    return training


def names_of(action: argparse.Action) -> tuple[str, ...]:
    """The names that the value of a flag may have in any case."""
    return action.type.names if isinstance(action.type, NameType) else ()


def training_parser() -> argparse.ArgumentParser:
    """Build the parser of training."""
    from megafp8.config import flag_parser
    from megafp8.config.model_shapes import PRESETS
    from megafp8.config.settings import settings_by_name

    parser, settings = flag_parser.build_parser(), settings_by_name()
    for action in parser._actions:
        setting = settings.get(action.dest)
        choices = list(action.choices or names_of(action) or (setting.choices if setting else ()))
        if action.dest == "model.model_preset":
            choices = list(PRESETS)
        if choices:
            words = choices + ["none"] * bool(setting and setting.optional)
            # argcomplete reads this attribute.
            action.completer = ChoicesCompleter(dict.fromkeys(words, ""))  # type: ignore[attr-defined]
    return parser
