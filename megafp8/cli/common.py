"""Parsers, flags, progress bars and exit statuses shared by the subcommands."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Optional

from megafp8 import __version__
from megafp8.errors import ConfigError, Megafp8Error, OutOfMemory
from megafp8.utils.files import path_text, visible
from megafp8.utils.numbers import number, whole_number

if TYPE_CHECKING:
    from tqdm import tqdm

    from megafp8.config.schema import DataConfig

INTERRUPTED = 130  # as a shell reports SIGINT
# In a checkout, and in site-packages where the package is installed.
TRAINING_SCRIPT = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"
TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")
_VOCAB_SIZE = "model.vocab_size"


class Parser(argparse.ArgumentParser):
    """argparse whose types int and float are those of `utils/numbers.py`, also in subparsers.

    Errors have one line, and megafp8's exit status for wrong flags (64) in place of argparse's (2).
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.register("type", int, whole_number)
        self.register("type", float, number)

    def error(self, message: str) -> NoReturn:
        """Print the message, without the usage, and exit."""
        self.exit(ConfigError.exit_status, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def build_command_parser(
    description: Optional[str], parser_class: type[argparse.ArgumentParser] = Parser, **options: Any
) -> argparse.ArgumentParser:
    """Build the parser of a program.

    Args:
        description: the docstring of its module.
        options: of `parser_class`.

    Returns:
        A parser with `--version`.
    """
    parser = parser_class(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
    parser.add_argument("--version", action="version", version=f"megafp8 {__version__}")
    return parser


def returns_exit_status(prefix: Optional[str] = None) -> Callable[[Callable[[Sequence[str]], int]], Callable[..., int]]:
    """Decorate a `main`: arguments default to the process's, and a `Megafp8Error` is printed and returns its status.

    So is an error of the system, such as a full disk or a folder that cannot be made, with status 74, and a lack of
    memory, with status 70.

    Args:
        prefix: text before the message; None: the error's class.
    """

    def decorate(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
        @functools.wraps(main)
        def run(argv: Optional[Sequence[str]] = None) -> int:
            try:
                return main(sys.argv[1:] if argv is None else argv)
            except (Megafp8Error, OSError, MemoryError) as error:
                if isinstance(error, MemoryError):
                    error = OutOfMemory("the system gave this process no more memory; ulimit -v shows its limit")
                head = type(error).__name__ if prefix is None else prefix
                text = system_error_text(error) if isinstance(error, OSError) else str(error)
                lines = map(visible, (f"{head}: {text}" if head else text).split("\n"))
                print("\n".join(lines), file=sys.stderr, flush=True)
                return os.EX_IOERR if isinstance(error, OSError) else error.exit_status

        return run

    return decorate


def system_error_text(error: OSError) -> str:
    """The file and what the system says: `report/report.html: No space left on device`."""
    return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror or str(error)


def add_tokenizer_flags(parser: argparse.ArgumentParser, description: Optional[str] = None) -> None:
    """Add a group of the flags of `megafp8 pretrain` that name a tokenizer."""
    from megafp8.config.flag_parser import add_setting
    from megafp8.config.settings import settings_by_name
    from megafp8.data.tokenizers.build import TOKENIZER_SETTINGS

    group = parser.add_argument_group("tokenizer", description)
    for name in (*(f"data.{setting}" for setting in TOKENIZER_SETTINGS), _VOCAB_SIZE):
        add_setting(group, settings_by_name()[name])


def read_tokenizer_flags(options: argparse.Namespace) -> tuple[DataConfig, Optional[int]]:
    """Return the arguments of `build_tokenizer`: the data section, and --vocab-size."""
    from megafp8.config.schema import DataConfig
    from megafp8.data.tokenizers.build import TOKENIZER_SETTINGS

    values = {setting: getattr(options, f"data.{setting}") for setting in TOKENIZER_SETTINGS}
    return DataConfig(**values), getattr(options, _VOCAB_SIZE)


def add_tokenizer_file_flags(parser: argparse.ArgumentParser, type_help: Optional[str] = None) -> None:
    """Add a group with a flag for each file of a tokenizer, for tools that know the rest from a checkpoint.

    Args:
        type_help: of --tokenizer-type; None: without that flag.
    """
    files = "current paths of its files (default: as in training)"
    group = parser.add_argument_group("tokenizer", f"type and {files}" if type_help else files)
    if type_help:
        group.add_argument("--tokenizer-type", metavar="TYPE", help=type_help)
    for name in TOKENIZER_FILES:
        group.add_argument("--" + name.replace("_", "-"), type=path_text, metavar="F")


def given_flags(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return the named options that have a value."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def too_small(options: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Return a problem for each of the named options that is given and below 1."""
    given = given_flags(options, names)
    return [f"--{name.replace('_', '-')} {value}: must be 1 or more" for name, value in given.items() if value < 1]


def output_problems(output: Optional[Path]) -> list[str]:
    """Return what is wrong with the folder of --output."""
    if output is None or os.access(output.absolute().parent, os.W_OK):
        return []
    return [f"--output {output}: its folder is not there or cannot be written"]


def launcher_problems(what: str) -> list[str]:
    """Return what is wrong with the launcher of a command that one process runs.

    Args:
        what: this process does, such as `generates`.
    """
    ranks = os.environ.get("WORLD_SIZE", "1")
    return [f"{ranks} ranks: one process {what}; start it without a launcher"] if int(ranks) > 1 else []


def bytes_bar(total: int, **options: Any) -> tqdm:
    """Return a progress bar over bytes, shown on a terminal only."""
    from tqdm import tqdm

    return tqdm(total=total, unit="B", unit_scale=True, disable=None, **options)


def stderr_log(prefix: str = "") -> Callable[[str], None]:
    """Return a function that prints a line to standard error."""
    return lambda text: print(f"{prefix}{text}", file=sys.stderr, flush=True)


def install_patches() -> None:
    """Install the patches that megatron-core needs before its first import."""
    from megafp8.mcore import cpu_patches

    cpu_patches.install()
