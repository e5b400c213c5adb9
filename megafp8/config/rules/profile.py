"""Rules about profiles."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.schema import RunConfig


def profiled_ranks_exist(config: RunConfig, world_size: int) -> Iterator[str]:
    """--profile-ranks are ranks of the run."""
    outside = [rank for rank in config.logging.profile_ranks if not 0 <= rank < world_size]
    if outside and config.logging.profile:
        yield (
            f"--profile-ranks {' '.join(map(str, outside))}: no such rank; the ranks of this run are 0 to "
            f"{world_size - 1}"
        )


def profile_ends_after_it_starts(config: RunConfig, world_size: int) -> Iterator[str]:
    """At least one step is profiled."""
    logging = config.logging
    if logging.profile and logging.profile_step_end <= logging.profile_step_start:
        yield (
            f"--profile-step-end {logging.profile_step_end} must be above --profile-step-start "
            f"{logging.profile_step_start}: the end step itself is not profiled"
        )
