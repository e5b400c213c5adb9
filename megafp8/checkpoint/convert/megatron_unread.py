"""Which of Megatron-LM's arguments in a checkpoint are named to the user because they are not read.

A checkpoint has several hundred arguments, most of them with their default. Those are named that may change something:
settings of megafp8 with a value other than the default, arguments of flags that are refused, and unknown ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from megafp8.config import megatron_flags
from megafp8.config.settings import Setting, all_settings


def unread_arguments(args: Mapping[str, Any], read: Set[str]) -> list[str]:
    """Return the arguments that are not read and may matter, as `name = value`, sorted."""
    given = frozenset(flag_of(name) for name, value in args.items() if is_set(value))
    by_field = {setting.field: setting for setting in all_settings() if setting.section}
    off_flags = {flag for setting in all_settings() for flag in setting.off}
    return [
        f"{name} = {value}"
        for name, value in sorted(args.items())
        if name not in read and is_set(value)
        and not has_default(by_field.get(name), value)
        and not has_no_effect(name, value, given)
        and not is_on_by_default(name, value, off_flags)
    ]  # fmt: skip


def is_set(value: Any) -> bool:
    """Return whether an argument has a value other than off, none or zero."""
    return value is not None and value is not False and value not in (0, "", [], ())


def flag_of(name: str, prefix: str = "") -> str:
    """Return the flag of an argument: `--no-rope-fusion` of `rope_fusion` and the prefix `no_`."""
    return "--" + (prefix + name).replace("_", "-")


def has_default(setting: Setting | None, value: Any) -> bool:
    """Return whether a value is the default of a setting. Megatron-LM has some as lists of one."""
    if setting is None:
        return False
    values = value if isinstance(value, (list, tuple)) else [value]
    defaults = setting.default if setting.many else (setting.default,)
    return [str(each) for each in values] == [str(each) for each in defaults]


def has_no_effect(name: str, value: Any, given: Set[str]) -> bool:
    """Return whether megafp8 accepts the flag and ignores it.

    Args:
        given: flags of all arguments that are set.
    """
    verdict = megatron_flags.classify(flag_of(name), [] if value is True else [str(value)], given)
    return verdict is not None and verdict.accepted


def is_on_by_default(name: str, value: Any, off_flags: Set[str]) -> bool:
    """Return whether an argument is on and has a flag that turns it off."""
    turned_off = [flag_of(name, prefix) for prefix in ("no_", "disable_")]
    return value is True and any(flag in off_flags or megatron_flags.classify(flag, []) for flag in turned_off)
