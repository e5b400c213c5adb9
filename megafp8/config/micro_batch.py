"""`--micro-batch-size auto`: which sizes a run may have."""

from __future__ import annotations

from megafp8.config import derived, rules
from megafp8.config.schema import AUTO, RunConfig
from megafp8.config.settings import with_values
from megafp8.errors import ConfigError


def is_auto(config: RunConfig) -> bool:
    """Whether the size is to be found."""
    return config.training.micro_batch_size == AUTO


def with_size(config: RunConfig, size: int) -> RunConfig:
    """The run as if its command line had given this size."""
    values = {"training.micro_batch_size": size, "training.micro_batch_size_memory_limit": None}
    return with_values(config, values)


def possible_sizes(config: RunConfig, world_size: int) -> list[int]:
    """Sizes that fill the global batch by accumulation and break no rule, ascending; empty where none does."""
    return [size for size, found in _problems_by_size(config, world_size).items() if not found]


def refused_sizes(config: RunConfig, world_size: int) -> list[str]:
    """The other sizes that fill the global batch, ascending, each with the rules that it breaks: a line for people."""
    return [
        f"{size} is left out: {'; '.join(found)}"
        for size, found in _problems_by_size(config, world_size).items() if found
    ]  # fmt: skip


def _problems_by_size(config: RunConfig, world_size: int) -> dict[int, list[str]]:
    batch = config.training.global_batch_size
    try:
        ranks = derived.data_parallel_size(config, world_size)
    except ConfigError:
        return {}
    if batch is None or batch < 1 or batch % ranks:
        return {}
    of_rank = batch // ranks
    divisors = (size for size in range(1, of_rank + 1) if of_rank % size == 0)
    return {size: rules.setting_problems(with_size(config, size), world_size) for size in divisors}


def setting_problems(config: RunConfig, world_size: int) -> list[str]:
    """What is wrong with the settings: with auto also what is wrong with the smallest size, where no size is right."""
    found = rules.setting_problems(config, world_size)
    if is_auto(config) and not found and not possible_sizes(config, world_size):
        found = rules.setting_problems(with_size(config, 1), world_size)
    return found
