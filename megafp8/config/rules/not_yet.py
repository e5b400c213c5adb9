"""Settings whose flag is read but which nothing honours yet: asked for, they are refused instead of ignored.

An entry goes when the code that honours the setting comes. What depends on the machine is not here but in
`device.capability`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megafp8.config.rules.rule import Rule
from megafp8.config.schema import RunConfig
from megafp8.config.settings import settings_by_name, value_of


@dataclass(frozen=True)
class NotYet:
    """Values of one setting that are refused."""

    setting: str
    """`section.field`."""
    is_asked: Callable[[Any], bool]
    """Whether a value asks for what is not there."""
    reason: str
    """Why, and what to use instead."""


NOT_YET: tuple[NotYet, ...] = (
    NotYet(
        "parallel.ddp_average_in_collective",
        bool,
        "gradients are summed over the ranks and divided by the number of tokens once; averaging as well would divide "
        "twice. Remove it",
    ),
    NotYet(
        "checkpoint.non_persistent_ckpt_type",
        lambda kind: kind != "global",
        "on each machine's own disk a checkpoint is lost with one of them, and nothing copies its parts to others. "
        "Give global and a folder that all ranks share (--non-persistent-global-ckpt-dir)",
    ),
    NotYet(
        "data.reset_attention_mask",
        bool,
        "attention is causal over the whole sequence in every layer, and a mask made by the loader would be ignored. "
        "Leave it out; --reset-position-ids and --eod-mask-loss work",
    ),
    NotYet(
        "training.data_parallel_random_init",
        bool,
        "weights start from their global names and the seed, equal on every data-parallel rank. Remove it",
    ),
)


def unhonoured_settings_are_refused(config: RunConfig, world_size: int) -> Iterator[str]:
    """Nothing that was asked for is silently turned off."""
    for entry in NOT_YET:
        value = value_of(config, entry.setting)
        if entry.is_asked(value):
            setting = settings_by_name()[entry.setting]
            flag = (setting.off if value is False and setting.off else setting.flags)[0]
            shown = flag if isinstance(value, bool) else f"{flag} {value}"
            yield f"{shown}: {entry.reason}"


RULES: tuple[Rule, ...] = (unhonoured_settings_are_refused,)
