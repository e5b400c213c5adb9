"""Megatron-LM flags that are not settings of megafp8, and how each is handled.

- replaced: read as a flag that exists, with a warning.
- accepted: changes nothing here; a warning gives the reason.
- unused: changes nothing without another flag, which is not given, or with another, which is; accepted with a warning.
- refused: would change training, or asks for an unsupported feature; the reason names an alternative.

In doubt a flag is refused, so that no request is silently ignored. `replaced.py` and `flags.yaml` have the tables.
`other_programs.yaml` has names of other trainers' settings.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Optional

from megafp8.config.megatron_flags.replaced import OVERRIDES, PARTS_OF_CUDA_GRAPH, REPLACED
from megafp8.utils.strict_yaml import read_yaml
from megafp8.utils.suggestions import closest

NO_EFFECT = ": no effect; "
"""Between flag and reason in the warning of an accepted flag."""


@dataclass(frozen=True)
class FlagEntry:
    """Flags of `flags.yaml` that are handled alike.

    Attributes:
        flags: their names; one that ends with * stands for all flags that begin so.
        words: what the entry has beside flags and reason: values, or other flags.
    """

    flags: tuple[str, ...]
    words: tuple[str, ...]
    reason: str

    def has(self, flag: str) -> bool:
        """Whether a flag is one of these."""
        return flag in self.flags or any(name[-1] == "*" and flag.startswith(name[:-1]) for name in self.flags)


@functools.lru_cache(maxsize=1)
def tables() -> Mapping[str, tuple[FlagEntry, ...]]:
    """The tables of `flags.yaml`, read once: command lines without such flags do not need them."""
    content = read_yaml(Path(__file__).with_name("flags.yaml"), as_written=True)
    return MappingProxyType({name: tuple(map(_entry, rows)) for name, rows in content.items()})


@functools.lru_cache(maxsize=1)
def _other_programs() -> Mapping[str, str]:
    rows = read_yaml(Path(__file__).with_name("other_programs.yaml"), as_written=True)
    return MappingProxyType({name: row["use"] for row in rows for name in row["names"].split()})


def of_other_program(name: str, *, as_key: bool = False, is_near: bool = False) -> str:
    """What to do for a setting of another trainer: `use --lr` for `learning_rate`; empty for a name that none has.

    Args:
        name: a flag, with or without its dashes, or a key of a configuration file.
        as_key: name the keys of a configuration file in place of flags: `use lr`.
        is_near: a name that differs by a few letters will do.
    """
    name = name.lstrip("-").replace("-", "_").lower()
    known = _other_programs()
    name = next(iter(closest(name, known)), name) if is_near else name
    use = known.get(name) or known.get(name.rpartition(".")[2], "")
    use = f"use {use}" if use and not use.startswith("remove it") else use
    return re.sub(r"--([a-z0-9-]+)", lambda flag: flag[1].replace("-", "_"), use) if as_key else use


def _entry(row: Mapping[str, str]) -> FlagEntry:
    words = row.get("values", row.get("with", row.get("without", "")))
    return FlagEntry(tuple(row["flags"].split()), tuple(words.split()), row.get("reason", ""))


def _find(table: str, flag: str) -> Optional[FlagEntry]:
    return next((entry for entry in tables()[table] if entry.has(flag)), None)


@dataclass(frozen=True)
class Verdict:
    """How one Megatron-LM flag is handled.

    Attributes:
        accepted: whether `text` is a warning and not a problem.
        flag: the flag, with its value where others are handled in another way.
        reason: why it is accepted or refused.
    """

    accepted: bool
    flag: str
    reason: str

    @property
    def text(self) -> str:
        """The message, which begins with the flag."""
        return f"{self.flag}{NO_EFFECT}{self.reason}" if self.accepted else refusal_text([self.flag], self.reason)


def replace(options: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[str]]:
    """Substitute the new spelling of replaced flags.

    Args:
        options: one list per option: the flag and its values.

    Returns:
        The options, and a warning for each replacement and for each flag that a replaced one overrides.
    """
    replaced, warnings = [], []
    unused = {other: flag for flag, *_ in options for other in OVERRIDES.get(flag, ())}
    for flag, *words in options:
        if flag == "--cuda-graph-scope" and words and PARTS_OF_CUDA_GRAPH.issuperset(words):
            flag = "--cuda-graph-modules"
        if flag in unused:
            warnings.append(f"{flag}{NO_EFFECT}{unused[flag]} overrides it, as in Megatron-LM")
            continue
        complete = " ".join([flag, *words])
        given = complete if complete in REPLACED else flag
        new = REPLACED.get(given)
        if new is None:
            replaced.append([flag, *words])
            continue
        warnings.append(f"{given} is read as {new}")
        replaced += [f"--{option}".split() for option in new.removeprefix("--").split(" --")]
        if given == flag:
            replaced[-1] += words
    return replaced, warnings


def classify(flag: str, words: Sequence[str], given: Set[str] = frozenset()) -> Optional[Verdict]:
    """How a flag that is not a setting is handled; None if Megatron-LM does not have it either.

    Args:
        words: its values.
        given: all flags of the command line.
    """
    if accepted := _find("accepted", flag):
        return _accept(flag, words, accepted)
    refusal = refusal_reason(flag)
    if refusal is None:
        return None
    harmless = _find("accepted_values", flag)
    if harmless and len(words) == 1 and words[0] in harmless.words:
        return Verdict(True, f"{flag} {words[0]}", harmless.reason)
    for entry in tables()["unused_with"]:
        if entry.has(flag) and not given.isdisjoint(entry.words):
            return Verdict(True, flag, f"it does not matter with {' or '.join(entry.words)}")
    for entry in tables()["unused_without"]:
        if entry.has(flag) and flag not in entry.words and given.isdisjoint(entry.words):
            return Verdict(True, flag, f"it only matters with {' or '.join(entry.words)}")
    return Verdict(False, flag, refusal)


def _accept(flag: str, words: Sequence[str], entry: FlagEntry) -> Verdict:
    (number,) = entry.words
    if number not in ("any", str(len(words))) and not (number == "many" and words):
        expected = {"0": "no value", "1": "one value", "many": "one or more values"}[number]
        return Verdict(False, flag, f"expected {expected}, got {' '.join(map(repr, words)) or 'none'}")
    return Verdict(True, flag, entry.reason)


def refusal_text(flags: Sequence[str], reason: str) -> str:
    """The message for flags that are refused for the same reason."""
    names = list(dict.fromkeys(flags))
    return f"{', '.join(names)}: {reason if len(names) == 1 else reason.replace('remove it', 'remove them')}"


def refusal_reason(flag: str) -> Optional[str]:
    """Why a flag is refused and what to use instead; None if it is not."""
    entry = _find("refused", flag)
    return entry.reason if entry else None
