"""How a field of a section is declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, Optional, Union

AUTO = 0
"""What the word `auto` is read as, in settings that take it."""
INT64_MAX = (1 << 63) - 1


def setting(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    off: tuple[str, ...] = (),
    choices: Union[tuple[Any, ...], Callable[[], tuple[Any, ...]]] = (),
    many: bool = False,
    auto: bool = False,
    metavar: Optional[str] = None,
    maximum: int = INT64_MAX,
    path: bool = False,
) -> Any:
    """Declare one field of a section.

    Args:
        default: value when the flag is absent.
        help: one line for `--help`; says the unit where there is one.
        flags: spellings that set the field; empty means `--` and the field's name with dashes.
            For a boolean that is True by default and has only an `off` spelling, give `flags=()`.
        off: spellings that set a boolean field to False (for example `--disable-bias-linear`).
        choices: the values allowed, or a function that knows them when the flags are read.
        many: the flag takes one or more values and the field is a tuple.
        auto: a count that may also be the word `auto`, kept as `AUTO`.
        maximum: of a whole number. Values above it are refused as they are read, before anything computes with them.
        path: the text is a path, or the prefix of some; one that no file can have is refused.
    """
    metadata = {
        "help": help, "flags": flags, "off": off, "choices": choices, "many": many, "auto": auto, "metavar": metavar,
        "maximum": maximum, "path": path,
    }  # fmt: skip
    return field(default=default, metadata=metadata)
