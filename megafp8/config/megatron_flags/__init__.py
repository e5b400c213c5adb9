"""Megatron-LM flags that are not settings of megafp8, and how each is handled.

- replaced: read as a flag that exists, with a warning.
- accepted: changes nothing here; a warning gives the reason.
- idle: changes nothing without another flag, which is not given, or with another, which is; accepted with a warning.
- refused: would change training, or asks for an unsupported feature; the reason names an alternative.

In doubt a flag is refused, so that no request is silently ignored.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Optional

from megafp8.config.megatron_flags.accepted import ACCEPTED_GROUPS, ACCEPTED_PREFIXES, ACCEPTED_VALUES, MANY, Arity
from megafp8.config.megatron_flags.refused import REFUSED_GROUPS, REFUSED_PREFIXES
from megafp8.config.megatron_flags.replaced import OVERRIDES, PARTS_OF_CUDA_GRAPH, REPLACED
from megafp8.config.megatron_flags.unused import missing_main_flags, overriding_flag

NO_EFFECT = ": no effect; "
"""Between flag and reason in the warning of an accepted flag."""


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
    for flags, arity, reason in ACCEPTED_GROUPS:
        if flag in flags.split():
            return _accept(flag, words, arity, reason)
    refusal = refusal_reason(flag)
    if refusal is None:
        harmless = next((why for names, why in ACCEPTED_PREFIXES if flag.startswith(tuple(names.split()))), None)
        return None if harmless is None else Verdict(True, flag, harmless)
    values, reason = ACCEPTED_VALUES.get(flag, ((), ""))
    if len(words) == 1 and words[0] in values:
        return Verdict(True, f"{flag} {words[0]}", reason)
    if other := overriding_flag(flag, given):
        return Verdict(True, flag, f"it does not matter with {other}")
    if mains := missing_main_flags(flag, given):
        return Verdict(True, flag, f"it only matters with {mains}")
    return Verdict(False, flag, refusal)


def _accept(flag: str, words: Sequence[str], arity: Arity, reason: str) -> Verdict:
    fits = len(words) >= 1 if arity == MANY else len(words) == arity
    if not fits:
        expected = {0: "no value", 1: "one value", MANY: "one or more values"}[arity]
        return Verdict(False, flag, f"expected {expected}, got {' '.join(map(repr, words)) or 'none'}")
    return Verdict(True, flag, reason)


def refusal_text(flags: Sequence[str], reason: str) -> str:
    """The message for flags that are refused for the same reason."""
    names = list(dict.fromkeys(flags))
    return f"{', '.join(names)}: {reason if len(names) == 1 else reason.replace('remove it', 'remove them')}"


def refusal_reason(flag: str) -> Optional[str]:
    """Why a flag is refused and what to use instead; None if it is not."""
    for flags, reason in REFUSED_GROUPS:
        if flag in flags.split():
            return reason
    return next((reason for prefixes, reason in REFUSED_PREFIXES if flag.startswith(tuple(prefixes.split()))), None)
