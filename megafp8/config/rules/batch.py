"""Batch, and length of the run."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import derived
from megafp8.config.rules.rule import Rule, batch_size, positive, round_up, without
from megafp8.config.schema import AUTO, RunConfig
from megafp8.errors import ConfigError


def batch_is_given(config: RunConfig, world_size: int) -> Iterator[str]:
    """Micro batch and sequence length have no default."""
    if config.training.micro_batch_size is None:
        yield (
            "--micro-batch-size is missing: sequences in one forward pass of one rank; 1 always fits best, auto finds "
            "the fastest that fits"
        )
    if config.data.seq_length is None:
        yield "--seq-length is missing: tokens in one training sequence"


def global_batch_divides(config: RunConfig, world_size: int) -> Iterator[str]:
    """A step is a whole number of microbatches on each data-parallel rank."""
    micro, batch = config.training.micro_batch_size, config.training.global_batch_size
    if not positive(micro, batch) or micro is None or batch is None:
        return
    try:
        ranks = derived.data_parallel_size(config, world_size)
    except ConfigError:
        return
    if batch % (micro * ranks):
        yield (
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size x data-parallel size = {micro} x "
            f"{ranks} = {micro * ranks} ({batch} / {micro * ranks} = {batch / (micro * ranks):.4g}): "
            f"use --global-batch-size {round_up(batch, micro * ranks)}"
        )


def automatic_size_divides_a_given_batch(config: RunConfig, world_size: int) -> Iterator[str]:
    """--micro-batch-size auto accumulates up to a batch that does not depend on memory, and is for training."""
    training = config.training
    if training.micro_batch_size != AUTO:
        if training.micro_batch_size_memory_limit is not None:
            effect = f"--micro-batch-size-memory-limit {training.micro_batch_size_memory_limit:g}"
            yield without(effect, "--micro-batch-size auto")
        return
    if training.global_batch_size is None:
        yield "--micro-batch-size auto keeps to --global-batch-size, which is missing: sequences in one optimizer step"
    if training.skip_train:
        yield "--micro-batch-size auto tries training steps, and --skip-train makes none: give a number"


def length_is_given_once(config: RunConfig, world_size: int) -> Iterator[str]:
    """The run's length is steps or samples."""
    iters, samples = config.training.train_iters, config.training.train_samples
    if iters is None and samples is None:
        yield "the length of the run is missing: give --train-iters (optimizer steps) or --train-samples (sequences)"
    elif iters is not None and samples is not None:
        yield f"--train-iters {iters} and --train-samples {samples} are both given: keep one"


def samples_fill_a_batch(config: RunConfig, world_size: int) -> Iterator[str]:
    """--train-samples make at least one step."""
    samples, batch = config.training.train_samples, batch_size(config, world_size)
    if positive(samples) and samples is not None and batch is not None and samples < batch:
        yield f"--train-samples {samples} do not fill one global batch of {batch}: use at least {batch}"


def garbage_interval_needs_manual_collection(config: RunConfig, world_size: int) -> Iterator[str]:
    """--manual-gc-interval belongs to --manual-gc."""
    if config.training.manual_gc_interval > 0 and not config.training.manual_gc:
        yield f"--manual-gc-interval {config.training.manual_gc_interval} has no effect without --manual-gc: add it"


RULES: tuple[Rule, ...] = (
    batch_is_given,
    global_batch_divides,
    automatic_size_divides_a_given_batch,
    length_is_given_once,
    samples_fill_a_batch,
    garbage_interval_needs_manual_collection,
)
