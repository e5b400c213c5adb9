"""What a rule is, and the arithmetic that rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Optional

from megafp8.config import derived
from megafp8.config.schema import DataConfig, RunConfig
from megafp8.errors import ConfigError

Rule = Callable[[RunConfig, int], Iterator[str]]


def positive(*values: Optional[float]) -> bool:
    """Whether all values are there and above 0, so that a rule may compute with them."""
    return all(value is not None and value > 0 for value in values)


def has_shape(config: RunConfig) -> bool:
    """Whether the numbers that give the model and its splitting their shape are there and above 0."""
    model, parallel = config.model, config.parallel
    return positive(
        model.num_layers, model.hidden_size, model.num_attention_heads, model.num_query_groups,
        1 if model.ffn_hidden_size is None else model.ffn_hidden_size,
        1 if model.kv_channels is None else model.kv_channels,
        parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.context_parallel_size,
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
