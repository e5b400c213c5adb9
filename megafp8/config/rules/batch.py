"""Rules about batch schedules and the batch size of evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

from megafp8.config import iterations
from megafp8.config.batch_schedule import BatchSchedule
from megafp8.config.rules.base import all_positive, batch_schedule, has_whole_replicas, read_batch_schedule
from megafp8.config.schema import AUTO, RunConfig
from megafp8.utils.integers import round_up


def one_batch_schedule(config: RunConfig, world_size: int) -> Iterator[str]:
    """The global batch size is given once, as in Megatron-LM."""
    training = config.training
    if not training.step_batch_size_schedule:
        return
    flag = f"--step-batch-size-schedule {' '.join(training.step_batch_size_schedule)!r}"
    schedule, batch = read_batch_schedule(config, world_size), training.global_batch_size
    last = schedule.last_batch_size if isinstance(schedule, BatchSchedule) else None
    if batch is not None and last is not None and batch != last:
        yield f"{flag} ends at {last}, and --global-batch-size gives {batch}: keep one, or give equal sizes"
    if training.rampup_batch_size:
        yield f"{flag} and --rampup-batch-size both set the global batch size: keep one"
    if training.decrease_batch_size_if_needed:
        yield (
            f"{flag} with --decrease-batch-size-if-needed: the sizes of a schedule are used as they are; remove the "
            "second flag, and give multiples of --micro-batch-size x data-parallel size"
        )


def batch_schedule_is_valid(config: RunConfig, world_size: int) -> Iterator[str]:
    """The flags of a batch schedule can be read, and its sizes increase."""
    training = config.training
    if training.decrease_batch_size_if_needed and training.micro_batch_size == AUTO:
        yield "--decrease-batch-size-if-needed needs a number as --micro-batch-size, not auto"
    problem = read_batch_schedule(config, world_size)
    if isinstance(problem, str):
        yield problem


def rampup_counts_samples(config: RunConfig, world_size: int) -> Iterator[str]:
    """--rampup-batch-size needs --train-samples, as in Megatron-LM."""
    schedule, steps = varying_schedule(config, world_size), config.training.train_iters
    if not config.training.rampup_batch_size or schedule is None or steps is None or not all_positive(steps):
        return
    yield (
        f"{schedule_flag(config)} with --train-iters {steps}: the length of the run and its learning-rate schedule "
        f"must be in samples; use --train-samples {schedule.advance(steps)} for the same number of steps"
    )


def scheduled_batches_divide(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every global batch of a schedule divides among the ranks."""
    schedule, micro = varying_schedule(config, world_size), config.training.micro_batch_size
    if schedule is None or micro is None or not all_positive(micro) or not has_whole_replicas(config, world_size):
        return
    sequences = iterations.microbatch_sequences(config, world_size)
    bad = [phase for phase in schedule.phases if phase.batch_size % sequences]
    if bad:
        sizes = ", ".join(f"{phase.batch_size} (from sample {phase.start_sample})" for phase in bad[:3])
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        yield (
            f"{schedule_flag(config)}: sizes {sizes}{more} are not multiples of --micro-batch-size x data-parallel "
            f"size = {micro} x {sequences // micro} = {sequences}: use multiples; a run that is past these samples "
            "needs only the later sizes"
        )


def eval_batch_divides(config: RunConfig, world_size: int) -> Iterator[str]:
    """A global batch of an evaluation divides among the ranks."""
    micro, batch = config.training.micro_batch_size, config.training.eval_global_batch_size
    if batch is None or micro is None or not all_positive(micro, batch) or not has_whole_replicas(config, world_size):
        return
    sequences = iterations.microbatch_sequences(config, world_size)
    parallel = config.parallel
    is_interleaved = parallel.num_layers_per_virtual_pipeline_stage or parallel.num_virtual_stages_per_pipeline_rank
    stages = max(1, parallel.pipeline_model_parallel_size) if is_interleaved else 1
    if batch % (sequences * stages):
        factors = f"{micro} x {sequences // micro}" + (f" x {stages}" if stages > 1 else "")
        pipeline = " x pipeline-parallel size, for the interleaved schedule" if stages > 1 else ""
        yield (
            f"--eval-global-batch-size {batch} is not a multiple of --micro-batch-size x data-parallel size{pipeline} "
            f"= {factors} = {sequences * stages}: use {round_up(batch, sequences * stages)}"
        )


def varying_schedule(config: RunConfig, world_size: int) -> Optional[BatchSchedule]:
    """The schedule of a run with --rampup-batch-size or --step-batch-size-schedule; None if its flags are wrong."""
    return batch_schedule(config, world_size) if iterations.has_batch_schedule(config.training) else None


def schedule_flag(config: RunConfig) -> str:
    """The flag of the run's batch schedule."""
    training = config.training
    if training.step_batch_size_schedule:
        return f"--step-batch-size-schedule {' '.join(training.step_batch_size_schedule)!r}"
    return f"--rampup-batch-size {' '.join(map(str, training.rampup_batch_size))}"
