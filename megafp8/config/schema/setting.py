"""Declaration of a setting: a dataclass field with metadata for the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, Optional, Union

AUTO = 0  # value of `auto` in settings that accept it
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
        default: value without the flag.
        help: one line for `--help`, with the unit. With `off` and without `flags` it starts with a verb, because
            `--help` shows "do not" before it.
        flags: flags that set the field, or that set a boolean to True. Empty means `--` and the field's name with
            dashes, unless `off` is given.
        off: flags that set a boolean to False, for example `--disable-bias-linear`.
        choices: allowed values, or a function that returns them.
        many: the flag takes one or more values, and the field is a tuple.
        auto: the value may also be the word `auto`, which is stored as `AUTO`.
        metavar: name of the value in `--help`.
        maximum: limit of an integer, checked on parsing so that later arithmetic is safe.
        path: the value is a path or a path prefix, and is checked with `path_problem`.
    """
    metadata = {
        "help": help, "flags": flags, "off": off, "choices": choices, "many": many, "auto": auto, "metavar": metavar,
        "maximum": maximum, "is_path": path,
    }  # fmt: skip
    return field(default=default, metadata=metadata)
