"""`--micro-batch-size auto`: in which order sizes are tried, and which one is taken.

The largest size that fits is found first: from the one that memory is predicted to hold upwards by doubling (or the
next divisor), and between the largest that fits and the smallest that does not by halving the distance. Then the
neighbours of the fastest are tried until it is faster than both. Sizes whose prediction is far above the limit are left
out: a trial that runs out of memory costs a start of new processes.

`--micro-batch-size auto`: which sizes a run may have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from megafp8.config import derived, rules
from megafp8.config.schema import AUTO, RunConfig
from megafp8.config.settings import with_values
from megafp8.errors import ConfigError
from megafp8.planning.memory import estimate_ends

HOPELESS_FACTOR = 1.5
"""Of the limit; a prediction above it is not tried. Those against measured peaks were off by less than a quarter."""
EQUAL_FRACTION = 0.01
"""Speeds that differ by less count as the same, and the larger size is taken: timings repeat no better."""
HEADING = f"{'size':>6}{'predicted GiB':>15}{'peak GiB':>10}{'ms/sample':>11}"
NOT_TRIED = "not tried: predicted far above the limit"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of one size, the worst of all ranks.

    Attributes:
        predicted_bytes: by the planner, of the fullest stage.
        peak_bytes: of device memory on a GPU, of the process on a CPU; None where it did not fit, or was not tried.
        ms_per_sample: of a step, over the sequences of the global batch.
        note: why there are no figures.
    """

    size: int
    predicted_bytes: int
    peak_bytes: Optional[int] = None
    ms_per_sample: Optional[float] = None
    note: str = ""


def predicted_bytes(config: RunConfig, size: int, world_size: int, padded_vocab: int, implementation: str) -> int:
    """Memory of a rank of the fullest stage, without what lies outside of tensors."""
    estimates = estimate_ends(with_size(config, size), world_size, padded_vocab, implementation=implementation)
    return max(estimate.total_bytes for estimate in estimates)


def hopeful_sizes(predicted: Mapping[int, int], limit_bytes: int) -> list[int]:
    """Sizes that are tried if the search comes to them, ascending; the smallest is always among them.

    Args:
        predicted: bytes by size, outside ones included.
    """
    smallest = min(predicted)
    return sorted(size for size in predicted if size == smallest or predicted[size] <= HOPELESS_FACTOR * limit_bytes)


def first_size(predicted: Mapping[int, int], limit_bytes: int) -> int:
    """Where the search begins: the largest size that is predicted to fit, or the smallest of all."""
    return max((size for size in predicted if predicted[size] <= limit_bytes), default=min(predicted))


def next_size(sizes: Sequence[int], tried: Mapping[int, Optional[float]], first: int) -> Optional[int]:
    """The size to try next; None when the search is over.

    Args:
        sizes: which there are, ascending.
        tried: milliseconds per sample; None for a size that did not fit.
        first: where to begin.
    """
    if not tried:
        return first
    fitting = [size for size, ms in tried.items() if ms is not None]
    too_large = min((size for size, ms in tried.items() if ms is None), default=sizes[-1] + 1)
    if not fitting:
        smaller = [size for size in sizes if size < too_large]
        return max((size for size in smaller if 2 * size <= too_large), default=smaller[0] if smaller else None)
    larger = [size for size in sizes if max(fitting) < size < too_large]
    if larger and too_large > sizes[-1]:
        return max((size for size in larger if size <= 2 * max(fitting)), default=larger[0])
    if larger:
        return larger[len(larger) // 2]
    place = sizes.index(min(fitting, key=lambda size: tried[size] or 0.0))
    neighbours = sizes[max(0, place - 1) : place + 2]
    return next((size for size in neighbours if size not in tried), None)


def best_size(tried: Mapping[int, Optional[float]]) -> Optional[int]:
    """The fastest size that fits, the largest of those that are as fast; None where none fits."""
    times = {size: ms for size, ms in tried.items() if ms is not None}
    return max((size for size in times if times[size] <= min(times.values()) * (1 + EQUAL_FRACTION)), default=None)


def table(trials: Sequence[Trial]) -> str:
    """The trials by size, for people."""
    return "\n".join([HEADING, *(row(trial) for trial in sorted(trials, key=lambda trial: trial.size))])


def row(trial: Trial) -> str:
    """A line of the table."""
    start = f"{trial.size:>6}{gib(trial.predicted_bytes):>15}"
    if trial.peak_bytes is None or trial.ms_per_sample is None:
        return f"{start}  {trial.note}"
    return f"{start}{gib(trial.peak_bytes):>10}{trial.ms_per_sample:>11.4g}"


def gib(num_bytes: int) -> str:
    """`1.50`."""
    return f"{num_bytes / 2**30:.2f}"


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
