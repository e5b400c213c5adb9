"""The policy of `--micro-batch-size auto`: the order in which sizes are tried, and which one is taken.

The search first finds the largest size that fits. It starts with the largest one that is predicted to fit, and doubles
or halves it (or takes the next divisor) until both a size that fits and one that does not are known. Between them it
bisects. Then it tries the neighbors of the fastest size until that is faster than both. Sizes whose prediction is far
above the limit are not tried, because a trial that runs out of memory costs a start of new processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from megafp8.config.layer_backends import LayerBackend
from megafp8.config.micro_batch_sizes import with_size
from megafp8.config.run_sizes import run_sizes
from megafp8.config.schema import RunConfig
from megafp8.resources.memory import estimate_stages

MAX_PREDICTED_RATIO = 1.5
"""Sizes with a prediction above this multiple of the limit are not tried. Predictions were within a quarter of measured
peaks."""
EQUAL_FRACTION = 0.01
"""Times that differ by less are equal, and the larger size is taken. Timings do not repeat more precisely."""
HEADING = f"{'size':>6}{'predicted GiB':>15}{'peak GiB':>10}{'ms/sample':>11}"
NOT_TRIED = "not tried: predicted far above the limit"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of one size, the worst of all ranks.

    Attributes:
        predicted_bytes: the planner's estimate of a process's memory, of the stage that needs the most.
        peak_bytes: of a process: its tensors' peak and what torch does not allocate on a GPU, all of it on a CPU; None
            if the size did not fit or was not tried.
        ms_per_sample: time of a step per sequence of the global batch.
        note: why there are no measurements.
    """

    size: int
    predicted_bytes: int
    peak_bytes: Optional[int] = None
    ms_per_sample: Optional[float] = None
    note: str = ""


def predicted_bytes(
    config: RunConfig,
    sizes: Sequence[int],
    world_size: int,
    padded_vocab: int,
    implementation: LayerBackend,
    outside_bytes: int,
) -> dict[int, int]:
    """Memory of a process by size, on a rank of the pipeline stage that needs the most.

    Args:
        outside_bytes: the part that torch does not allocate.
    """
    found = {}
    for size in sizes:
        sizes_of_run = run_sizes(with_size(config, size), world_size, padded_vocab)
        estimates = estimate_stages(sizes_of_run, implementation=implementation)
        found[size] = outside_bytes + max(estimate.total_bytes for estimate in estimates)
    return found


def sizes_to_try(predicted: Mapping[int, int], limit_bytes: int) -> list[int]:
    """Sizes that the search may try, ascending. The smallest size is always included.

    Args:
        predicted: total bytes by size, including memory that torch does not allocate.
    """
    smallest = min(predicted)
    return sorted(
        size for size in predicted if size == smallest or predicted[size] <= MAX_PREDICTED_RATIO * limit_bytes
    )


def first_size(predicted: Mapping[int, int], limit_bytes: int) -> int:
    """The size that the search starts with: the largest that is predicted to fit, or else the smallest."""
    return max((size for size in predicted if predicted[size] <= limit_bytes), default=min(predicted))


def next_size(sizes: Sequence[int], tried: Mapping[int, Optional[float]], first: int) -> Optional[int]:
    """The size to try next; None when the search is over.

    Args:
        sizes: all sizes that may be tried, ascending.
        tried: milliseconds per sample by size; None for a size that did not fit.
        first: the size to start with.
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
    index = sizes.index(min(fitting, key=lambda size: tried[size] or 0.0))
    neighbours = sizes[max(0, index - 1) : index + 2]
    return next((size for size in neighbours if size not in tried), None)


def best_size(tried: Mapping[int, Optional[float]]) -> Optional[int]:
    """The fastest size that fits, or the largest of equally fast ones; None if none fits."""
    times = {size: ms for size, ms in tried.items() if ms is not None}
    return max((size for size in times if times[size] <= min(times.values()) * (1 + EQUAL_FRACTION)), default=None)


def table(trials: Sequence[Trial]) -> str:
    """The trials as a text table, by size."""
    return "\n".join([HEADING, *(table_row(trial) for trial in sorted(trials, key=lambda trial: trial.size))])


def table_row(trial: Trial) -> str:
    start = f"{trial.size:>6}{gib(trial.predicted_bytes):>15}"
    if trial.peak_bytes is None or trial.ms_per_sample is None:
        return f"{start}  {trial.note}"
    return f"{start}{gib(trial.peak_bytes):>10}{trial.ms_per_sample:>11.4g}"


def gib(num_bytes: int) -> str:
    """Bytes in GiB, as text."""
    return f"{num_bytes / 2**30:.2f}"
