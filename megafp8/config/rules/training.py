"""Rules about batch size and length of the run."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import topology
from megafp8.config.rules.base import all_positive, batch_schedule
from megafp8.config.schema import AUTO, RunConfig
from megafp8.errors import ConfigError
from megafp8.utils.integers import round_up


def batch_is_given(config: RunConfig, world_size: int) -> Iterator[str]:
    """The micro-batch size and the sequence length have no default."""
    if config.training.micro_batch_size is None:
        yield (
            "--micro-batch-size is missing: sequences per forward pass of a rank; 1 needs the least memory, auto finds "
            "the fastest size that fits"
        )
    if config.data.seq_length is None:
        yield "--seq-length is missing: tokens per training sequence"


def global_batch_divides(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every data-parallel rank has the same number of microbatches per step."""
    micro, batch = config.training.micro_batch_size, config.training.global_batch_size
    if not all_positive(micro, batch) or micro is None or batch is None:
        return
    try:
        ranks = topology.data_parallel_size(config, world_size)
    except ConfigError:
        return
    if batch % (micro * ranks) and not config.training.decrease_batch_size_if_needed:
        yield (
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size x data-parallel size = {micro} x "
            f"{ranks} = {micro * ranks} ({batch} / {micro * ranks} = {batch / (micro * ranks):.4g}): "
            f"use --global-batch-size {round_up(batch, micro * ranks)}"
        )


def automatic_size_divides_a_given_batch(config: RunConfig, world_size: int) -> Iterator[str]:
    """--micro-batch-size auto needs a global batch size, which must not depend on memory, and training steps."""
    training = config.training
    if training.micro_batch_size != AUTO:
        return
    if training.global_batch_size is None and not training.step_batch_size_schedule:
        yield "--micro-batch-size auto needs --global-batch-size, which is missing: sequences per optimizer step"
    if training.skip_train:
        yield "--micro-batch-size auto runs trial training steps, which --skip-train excludes: give a number"


def length_is_given_once(config: RunConfig, world_size: int) -> Iterator[str]:
    """The length of the run is given in steps or in samples."""
    iters, samples = config.training.train_iters, config.training.train_samples
    if iters is None and samples is None:
        yield "the length of the run is missing: give --train-iters (optimizer steps), --train-samples or --num-epochs"
    elif iters is not None and samples is not None:
        yield f"--train-iters {iters} and --train-samples {samples} are both given: keep one"


def samples_fill_a_batch(config: RunConfig, world_size: int) -> Iterator[str]:
    """--train-samples is at least one global batch."""
    samples, schedule = config.training.train_samples, batch_schedule(config, world_size)
    if all_positive(samples) and samples is not None and schedule is not None:
        batch = schedule.batch_size_at(0)
        if samples < batch:
            yield f"--train-samples {samples} is less than one global batch of {batch}: use at least {batch}"
