"""Tables of the flags and arguments of a subcommand: an entry has its name, its help and options of argparse."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from megafp8.utils.files import path_argument

Group = TypeVar("Group")
"""A parser, or a group of one."""


def add_flags(group: Group, *entries: tuple[str, dict[str, Any]]) -> Group:
    """Add entries to a parser or a group of one in their order, and return it."""
    for names, options in entries:
        group.add_argument(*names.split(), **options)  # type: ignore[attr-defined]
    return group


def argument(name: str, help: str, **options: Any) -> tuple[str, dict[str, Any]]:
    """Declare a flag or an argument.

    Args:
        name: of a flag may have another spelling after a space.
        options: of argparse's `add_argument`.
    """
    return name, {"help": help, **options}


switch = partial(argument, action="store_true")
int_flag = partial(argument, type=int, metavar="N")
float_flag = partial(argument, type=float)
path_flag = partial(argument, type=path_argument)
