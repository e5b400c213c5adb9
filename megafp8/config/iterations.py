"""What an iteration reads, and how many iterations a run has: pure functions of a `RunConfig` and a world size.

They follow Megatron-LM's `validate_args`. The settings that they read must have passed the rules in `config/rules`.
"""

from __future__ import annotations

from typing import Optional

from megafp8.config import topology
from megafp8.config.batch_schedule import BatchSchedule, constant, ramp_up, step_schedule
from megafp8.config.schema import RunConfig, TrainingConfig
from megafp8.errors import ConfigError


def batch_schedule(config: RunConfig, world_size: int) -> BatchSchedule:
    """The global batch size of each step.

    Without a flag it is one micro-batch on each data-parallel rank.

    Raises:
        ConfigError: the flags of the schedule are wrong.
    """
    training, seq_length = config.training, config.data.seq_length
    if training.step_batch_size_schedule:
        if not seq_length or seq_length < 1:
            raise ConfigError("--step-batch-size-schedule counts tokens: --seq-length is missing")
        return step_schedule(" ".join(training.step_batch_size_schedule), seq_length)
    size = training.global_batch_size or microbatch_sequences(config, world_size)
    ramp = training.rampup_batch_size
    schedule = ramp_up(ramp, size) if ramp else constant(size)
    if training.decrease_batch_size_if_needed:
        return schedule.rounded_down(microbatch_sequences(config, world_size))
    return schedule


def microbatch_sequences(config: RunConfig, world_size: int) -> int:
    """Sequences of one microbatch over all data-parallel ranks."""
    assert config.training.micro_batch_size is not None
    return config.training.micro_batch_size * topology.data_parallel_size(config, world_size)


def global_batch_size(config: RunConfig, world_size: int) -> int:
    """Sequences per optimizer step; under a batch schedule those of its last phase, the most."""
    return batch_schedule(config, world_size).last_batch_size


def eval_batch_size(config: RunConfig, world_size: int) -> int:
    """Sequences per global batch of an evaluation."""
    return config.training.eval_global_batch_size or global_batch_size(config, world_size)


def has_batch_schedule(training: TrainingConfig) -> bool:
    """Whether the global batch size changes during the run."""
    return bool(training.rampup_batch_size or training.step_batch_size_schedule)


def num_microbatches(config: RunConfig, world_size: int, batch_size: Optional[int] = None) -> int:
    """Microbatches of one data-parallel rank in a global batch, by default that of `global_batch_size`.

    Raises:
        ConfigError: the global batch is not a multiple of micro batch x data-parallel size.
    """
    sequences = microbatch_sequences(config, world_size)
    batch = global_batch_size(config, world_size) if batch_size is None else batch_size
    if batch % sequences:
        raise ConfigError(
            f"global batch {batch} is not a multiple of micro batch x data-parallel size = "
            f"{config.training.micro_batch_size} x {topology.data_parallel_size(config, world_size)} = {sequences}"
        )
    return batch // sequences


def tokens_per_step(config: RunConfig, world_size: int) -> int:
    """Tokens per optimizer step over all ranks; under a batch schedule those of its last phase."""
    assert config.data.seq_length is not None
    return global_batch_size(config, world_size) * config.data.seq_length


def train_iters(config: RunConfig, world_size: int) -> int:
    """Optimizer steps of the run; with --train-samples, the number of full global batches."""
    if config.training.train_iters is not None:
        return config.training.train_iters
    assert config.training.train_samples is not None
    return batch_schedule(config, world_size).num_steps(config.training.train_samples)


def train_samples(config: RunConfig, world_size: int) -> int:
    """Sequences of the run; with --train-samples that number, even if the last batch is not full."""
    if config.training.train_iters is None and config.training.train_samples is not None:
        return config.training.train_samples
    return trained_samples(config, world_size)


def trained_samples(config: RunConfig, world_size: int) -> int:
    """Sequences of all steps of the run, without an incomplete last batch."""
    return batch_schedule(config, world_size).advance(train_iters(config, world_size))


def dataset_samples(config: RunConfig, world_size: int) -> tuple[int, int, int]:
    """Sequences that the run reads for (training, validation, test).

    Every validation reads the same samples, so that losses are comparable within a run and between runs.
    """
    held_out = config.training.eval_iters * eval_batch_size(config, world_size)
    return train_samples(config, world_size), held_out, held_out
