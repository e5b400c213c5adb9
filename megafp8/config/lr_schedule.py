"""Lengths of the schedules of learning rate and weight decay, in samples: pure functions of the settings.

They follow Megatron-LM's `get_optimizer_param_scheduler`. The settings that they read must have passed the rules in
`config/rules`. With --train-iters, a step counts as a global batch of the largest size, also under
--step-batch-size-schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from megafp8.config import iterations
from megafp8.config.schema import OptimizerConfig, RunConfig


@dataclass(frozen=True)
class ScheduleSamples:
    """Lengths of the schedules of a run, in samples.

    Attributes:
        warmup: linear warm-up of the learning rate. With --lr-warmup-fraction it may be fractional, as in Megatron-LM.
        decay: from the start of the run to the end of the schedule; by default the end of the run.
        wsd_decay: the final decay of WSD; None if not given.
        weight_decay: over which weight decay changes from its start to its end value: those of the run.
    """

    warmup: float
    decay: int
    wsd_decay: Optional[int]
    weight_decay: int


def schedule_samples(config: RunConfig, world_size: int) -> ScheduleSamples:
    """The lengths of the schedules of learning rate and weight decay."""
    optimizer, steps = config.optimizer, config.training.train_iters
    if steps is None:
        samples = iterations.train_samples(config, world_size)
        decay, warmup = optimizer.lr_decay_samples or samples, optimizer.lr_warmup_samples
        wsd_decay = optimizer.lr_wsd_decay_samples
    else:
        batch = iterations.global_batch_size(config, world_size)
        samples = steps * batch
        decay = samples if optimizer.lr_decay_iters is None else optimizer.lr_decay_iters * batch
        warmup = optimizer.lr_warmup_iters * batch
        wsd_decay = None if optimizer.lr_wsd_decay_iters is None else optimizer.lr_wsd_decay_iters * batch
    fraction = optimizer.lr_warmup_fraction
    return ScheduleSamples(warmup if fraction is None else fraction * decay, decay, wsd_decay, weight_decay=samples)


def weight_decay_range(optimizer: OptimizerConfig) -> tuple[float, float]:
    """Weight decay at the start and at the end of the run."""
    if optimizer.weight_decay_incr_style == "constant":
        return optimizer.weight_decay, optimizer.weight_decay
    assert optimizer.start_weight_decay is not None and optimizer.end_weight_decay is not None
    return optimizer.start_weight_decay, optimizer.end_weight_decay


def lr_marks(config: RunConfig, world_size: int) -> dict[str, float]:
    """Samples at which a phase of the learning rate begins or ends, by its label."""
    lengths = schedule_samples(config, world_size)
    samples = {"warm-up ends": lengths.warmup, "decay ends": float(lengths.decay)}
    if lengths.wsd_decay is not None:
        samples["decay begins"] = lengths.decay - lengths.wsd_decay
    if config.optimizer.lr_decay_style == "constant":
        del samples["decay ends"]
    return samples
