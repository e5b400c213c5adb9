"""What a rule is, and the arithmetic that rules share.

Settings whose flag is read but which nothing honours yet: asked for, they are refused instead of ignored.

An entry goes when the code that honours the setting comes. What depends on the machine is not here but in
`device.capability`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

from megafp8.config import derived
from megafp8.config.schema import DataConfig, RunConfig
from megafp8.config.settings import settings_by_name, value_of
from megafp8.errors import ConfigError

Rule = Callable[[RunConfig, int], Iterator[str]]


def positive(*values: Optional[float]) -> bool:
    """Whether all values are there and above 0, so that a rule may compute with them."""
    return all(value is not None and value > 0 for value in values)


def has_shape(config: RunConfig) -> bool:
    """Whether the numbers that give the model and its splitting their shape are there and above 0."""
    model, parallel = config.model, config.parallel
    return positive(
        model.num_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.num_query_groups,
        1 if model.ffn_hidden_size is None else model.ffn_hidden_size,
        1 if model.kv_channels is None else model.kv_channels,
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )


def batch_size(config: RunConfig, world_size: int) -> Optional[int]:
    """Global batch, if it can be known."""
    if config.training.global_batch_size is None and not positive(config.training.micro_batch_size):
        return None
    try:
        size = derived.global_batch_size(config, world_size)
    except ConfigError:
        return None
    return size if size > 0 else None


def microbatches(config: RunConfig, world_size: int) -> Optional[int]:
    """Microbatches in a step, if the batch and the layout divide."""
    if not positive(config.training.micro_batch_size) or batch_size(config, world_size) is None:
        return None
    try:
        return derived.num_microbatches(config, world_size)
    except ConfigError:
        return None


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def shards_by_flag(data: DataConfig) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The words of each flag that names token shards: prefixes, with weights between them or without."""
    return (
        ("--data-path", data.data_path),
        ("--train-data-path", data.train_data_path),
        ("--valid-data-path", data.valid_data_path),
        ("--test-data-path", data.test_data_path),
    )


def without(effect: Any, needs: str) -> str:
    """The problem of a setting that would do nothing."""
    return f"{effect} has no effect without {needs}: give {needs}, or remove it"


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
