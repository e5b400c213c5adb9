"""Declaration of a setting: a dataclass field with everything that is known about it.

Range checks, messages about settings without effect, what a resumed run compares, what the search for a micro-batch
size depends on, and more follow from it. Rules name settings where the condition is more than another setting.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional, Union

AUTO = 0  # value of `auto` in settings that accept it
INT64_MAX = (1 << 63) - 1


class Role(enum.Flag):
    """What a setting changes. A section has a default, which the role of a setting replaces."""

    FUNCTION = enum.auto()
    """The function of the weights: a conversion of a checkpoint compares it."""
    WEIGHTS = enum.auto()
    """The shape or the meaning of the weights: a run that continues a checkpoint must have the same value."""
    LEARNING = enum.auto()
    """What a run learns: a run that continues a checkpoint names a change."""
    SAMPLES = enum.auto()
    """Samples and their order: the indices of a dataset depend on it."""
    CARRIED = enum.auto()
    """Read from the checkpoint with --use-checkpoint-args, beside the section `model`; in the section `parallel` with
    --use-mp-args-from-checkpoint-args."""
    MEMORY = enum.auto()
    """Memory or time of a step: --micro-batch-size auto searches again."""
    AUTOMATIC = enum.auto()
    """Chosen by megafp8 (`resources/automatic.py`) where it is None or "auto". A resumed run chooses anew; a
    comparison that goes on (`launch/compared_runs.py`) sees no difference in it."""
    OUTPUT = enum.auto()
    """What is saved and logged, when a run stops, time limits: no loss and no comparison of speeds."""


NO_ROLE = Role(0)
"""Speed, or which validations there are, and nothing of the above."""
MODEL = Role.FUNCTION | Role.WEIGHTS | Role.LEARNING | Role.MEMORY


class Audience(enum.Enum):
    """Who needs a setting: which help shows it, and how."""

    COMMON = "most runs: the first screen of --help has it"
    ADVANCED = ""
    DEPRECATED = "deprecated: only for command lines of Megatron-LM"
    TESTS = "for tests and comparisons, not for training"


COMMON, DEPRECATED, TESTS = Audience.COMMON, Audience.DEPRECATED, Audience.TESTS
OWN = "none"
"""Meaning of a flag in Megatron-LM that does not have it."""


@dataclass(frozen=True)
class Range:
    """An interval of numbers; without `high` all from `low` on. `low` and `high` belong to it unless they are open."""

    low: float
    high: Optional[float] = None
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        if self.high is None:
            return above
        return above and (value < self.high if self.high_open else value <= self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f"above {self.low:g}" if self.low_open else f"at least {self.low:g}"
        return f"in {'(' if self.low_open else '['}{self.low:g}, {self.high:g}{')' if self.high_open else ']'}"


AT_LEAST_1, NOT_NEGATIVE = Range(1), Range(0)
# Numbers far above all that models use, but small enough that no product of a few of them overflows.
COEFFICIENT, POSITIVE_COEFFICIENT = Range(0, 1e3), Range(0, 1e3, low_open=True)
LIMIT, POSITIVE_LIMIT = Range(0, 1e12), Range(0, 1e12, low_open=True)
FRACTION_BELOW_1, FRACTION_ABOVE_0 = Range(0, 1, high_open=True), Range(0, 1, low_open=True)


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
    range: Optional[Range] = None,
    needs: str = "",
    requires: str = "",
    role: Optional[Role] = None,
    unset: str = "",
    unit: str = "",
    group: str = "",
    audience: Audience = Audience.ADVANCED,
    megatron: str = "",
    former: str = "",
) -> Any:
    """Declare one field of a section.

    Args:
        default: value without the flag.
        help: one line for `--help`, with the unit and without the default. Its first clause, up to a semicolon, says
            what the setting is; the short help shows no more. With `off` and without `flags` it starts with a verb,
            because `--help` shows "do not" before it.
        flags: flags that set the field, or that set a boolean to True. Empty means `--` and the field's name with
            dashes, unless `off` is given.
        off: flags that set a boolean to False, for example `--disable-bias-linear`.
        choices: allowed values, or a function that returns them.
        many: the flag takes one or more values, and the field is a tuple.
        auto: the value may also be the word `auto`, which is stored as `AUTO`.
        metavar: name of the value in `--help`; by default the unit, else N, X or a word of the field's name.
        maximum: limit of an integer, checked on parsing so that later arithmetic is safe.
        path: the value is a path or a path prefix, and is checked with `path_problem`.
        range: the values of a number; of each number with `many`. `AUTO` is none of them.
        needs: flags without which the setting has no effect, for example `--num-experts`; said as a warning, because
            Megatron-LM's scripts give one set of flags to many runs. See `config/features.py`.
        requires: as `needs`, but the run is refused: where the user most likely expects another model, precision or
            starting point than the run would have, and where only megafp8 has the setting.
        role: what it changes; by default the role of its section.
        unset: what a run uses without the flag, where the default value does not say it.
        unit: of a number, such as steps.
        group: the topic of `--help` that shows it; by default that of the class which declares it (`config/help.py`).
        audience: who needs it.
        megatron: what the flag means in Megatron-LM; empty where it is the same, `OWN` where Megatron-LM has no such
            flag, else what Megatron-LM does in place of what `help` says.
        former: of a setting that is gone, what to use in its place, see `former_setting`.
    """
    metadata = {
        "help": help, "flags": flags, "off": off, "choices": choices, "many": many, "auto": auto, "metavar": metavar,
        "maximum": maximum, "is_path": path, "range": range, "needs": needs, "requires": requires, "role": role,
        "unset": unset, "unit": unit, "group": group, "audience": audience, "megatron": megatron, "former": former,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


def former_setting(default: Any, instead: str) -> Any:
    """Declare a setting that is gone. Files of earlier versions have it, so that it can be read with its default.

    Args:
        instead: refuses its flag and any other value, with what to use in its place.
    """
    return setting(default, "", former=instead)
