"""The micro-batch sizes that a run may have, of which `--micro-batch-size auto` takes one."""

from __future__ import annotations

from typing import Optional

from megafp8.config import iterations, rules, topology
from megafp8.config.schema import AUTO, RunConfig, TrainingConfig
from megafp8.config.settings import with_values
from megafp8.errors import ConfigError

SIZE_SETTINGS = tuple(f"training.micro_batch_size{end}" for end in ("", "_memory_limit", "_max"))


def is_auto(training: TrainingConfig) -> bool:
    """Whether the micro batch size is `auto`."""
    return training.micro_batch_size == AUTO


def with_size(config: RunConfig, size: int) -> RunConfig:
    """The configuration as if its command line had given this size."""
    return with_values(config, {**dict.fromkeys(SIZE_SETTINGS), "training.micro_batch_size": size})


def with_constant_batch(config: RunConfig, batch_size: int) -> RunConfig:
    """The configuration with one global batch size and without a batch schedule."""
    values = {
        "training.global_batch_size": batch_size,
        "training.rampup_batch_size": (),
        "training.step_batch_size_schedule": (),
    }
    return with_values(config, values)


def last_batch_size(config: RunConfig) -> Optional[int]:
    """The global batch size of most steps, which does not depend on the ranks with `auto`; None if it is not given."""
    training = config.training
    if not training.step_batch_size_schedule:
        return training.global_batch_size
    try:
        return iterations.batch_schedule(config, topology.model_parallel_size(config)).last_batch_size
    except ConfigError:
        return None


def possible_sizes(config: RunConfig, world_size: int) -> list[int]:
    """Sizes that divide the global batch of a rank and violate no rule, ascending."""
    return [size for size, problems in _problems_by_size(config, world_size).items() if not problems]


def refused_sizes(config: RunConfig, world_size: int) -> list[str]:
    """One line for each size that divides the global batch but violates rules, with these rules."""
    return [
        f"{size} is skipped: {'; '.join(problems)}"
        for size, problems in _problems_by_size(config, world_size).items() if problems
    ]  # fmt: skip


def _problems_by_size(config: RunConfig, world_size: int) -> dict[int, list[str]]:
    batch = last_batch_size(config)
    try:
        ranks = topology.data_parallel_size(config, world_size)
    except ConfigError:
        return {}
    if batch is None or batch < 1 or batch % ranks:
        return {}
    rank_batch = batch // ranks
    largest = min(rank_batch, config.training.micro_batch_size_max or rank_batch)
    divisors = (size for size in range(1, largest + 1) if rank_batch % size == 0)
    return {size: rules.setting_problems(with_size(config, size), world_size) for size in divisors}


def setting_problems(config: RunConfig, world_size: int) -> list[str]:
    """Problems of the settings. With `auto` and no possible size, these include the problems of size 1."""
    problems = rules.setting_problems(config, world_size)
    if is_auto(config.training) and not problems and not possible_sizes(config, world_size):
        problems = rules.setting_problems(with_size(config, 1), world_size)
    return problems
