"""The length of a run that is given in epochs (`--num-epochs`)."""

from __future__ import annotations

import math

from megafp8.config import derived, iterations
from megafp8.config.data_blend import parse_blend
from megafp8.config.schema import RunConfig
from megafp8.config.schema.io import BEST_FIT
from megafp8.config.settings import with_values
from megafp8.errors import ConfigError, DataError

UNKNOWN_STEPS = 10**6
"""In place of a number of steps that cannot be found, so that rules find no further problem with it."""


def with_epochs(
    config: RunConfig, num_epochs: float, world_size: int, warnings: list[str], problems: list[str]
) -> RunConfig:
    """The configuration with the steps that so many passes over the training data take, rounded up.

    Args:
        warnings: to which the number of steps is added.
        problems: to which the reason is added, if the data or the batch has no such number.
    """
    flag, training = f"--num-epochs {num_epochs:g}", config.training
    samples, problem = 0, ""
    if training.train_iters is not None or training.train_samples is not None:
        problem = f"{flag} and --train-iters or --train-samples are both given: keep one"
    elif iterations.has_batch_schedule(training):
        problem = f"{flag}: the batch size changes during the run; give --train-samples"
    elif config.data.data_phases:
        problem = f"{flag}: phases of data have no epochs; give --train-iters or --train-samples"
    else:
        try:
            samples = samples_of_epoch(config)
            batch = iterations.global_batch_size(config, world_size)
        except (ConfigError, DataError, ValueError) as error:
            problem = f"{flag}: {error}; give --train-iters"
    if problem:
        problems.append(problem)
        return with_values(config, {"training.train_iters": training.train_iters or UNKNOWN_STEPS})
    steps = math.ceil(num_epochs * samples / batch)
    warnings.append(f"{flag}: --train-iters {steps:,} (an epoch is {samples:,} samples = {samples / batch:,.1f} steps)")
    return with_values(config, {"training.train_iters": steps})


def samples_of_epoch(config: RunConfig) -> int:
    """Training sequences that the documents of the shards fill once.

    Raises:
        ConfigError: what is no list of shards.
        DataError: a shard cannot be read.
        ValueError: the split or the list of shards cannot be parsed.
    """
    from megafp8.data.packing import pack_lengths  # numpy must come after torch, see manifest_tokenizer.py
    from megafp8.data.shards import read_index

    data, split = config.data, derived.split(config)
    words = data.train_data_path or data.data_path
    if not words or data.mock_data:
        raise ConfigError("an epoch needs the shards of --data-path or --train-data-path")
    blend = parse_blend(words)
    if blend.weights is not None:
        raise ConfigError("a blend with weights has no epochs")
    if data.seq_length is None:
        raise ConfigError("--seq-length is missing")
    if data.packing == BEST_FIT:
        lengths = [read_index(prefix).sequence_lengths for prefix in blend.prefixes]
        trained = [each[: derived.num_training_documents(config, len(each))] for each in lengths]
        return max(1, sum(pack_lengths(each, data.seq_length).num_sequences for each in trained))
    shares = (1.0,) if split is None else derived.split_shares(split)
    tokens = sum(read_index(prefix).num_tokens for prefix in blend.prefixes)
    return max(1, int(tokens * shares[0] / sum(shares)) // data.seq_length)
