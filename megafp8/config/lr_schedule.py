"""Lengths of the schedules of learning rate and weight decay, in samples: pure functions of the settings.

They follow Megatron-LM's `get_optimizer_param_scheduler`. The settings that they read must have passed the rules in
`config/rules`. With --train-iters, a step counts as a global batch of the largest size, also under
--step-batch-size-schedule.
"""

from __future__ import annotations

from typing import Optional

from megafp8.config import iterations
from megafp8.config.schema import OptimizerConfig, RunConfig


def lr_decay_samples(config: RunConfig, world_size: int) -> int:
    """Samples at which the schedule ends; by default the end of the run."""
    optimizer = config.optimizer
    if config.training.train_iters is None:
        return optimizer.lr_decay_samples or iterations.train_samples(config, world_size)
    steps = optimizer.lr_decay_iters if optimizer.lr_decay_iters is not None else config.training.train_iters
    return steps * iterations.global_batch_size(config, world_size)


def lr_warmup_samples(config: RunConfig, world_size: int) -> float:
    """Samples of linear warm-up. With --lr-warmup-fraction it may be fractional, as in Megatron-LM."""
    optimizer = config.optimizer
    if optimizer.lr_warmup_fraction is not None:
        return optimizer.lr_warmup_fraction * lr_decay_samples(config, world_size)
    if config.training.train_iters is None:
        return optimizer.lr_warmup_samples
    return optimizer.lr_warmup_iters * iterations.global_batch_size(config, world_size)


def lr_wsd_decay_samples(config: RunConfig, world_size: int) -> Optional[int]:
    """Samples of the final decay of WSD; None if not given."""
    if config.training.train_iters is None:
        return config.optimizer.lr_wsd_decay_samples
    steps = config.optimizer.lr_wsd_decay_iters
    return None if steps is None else steps * iterations.global_batch_size(config, world_size)


def weight_decay_samples(config: RunConfig, world_size: int) -> int:
    """Samples over which weight decay changes from its start to its end value: those of the run."""
    if config.training.train_iters is None:
        return iterations.train_samples(config, world_size)
    return config.training.train_iters * iterations.global_batch_size(config, world_size)


def weight_decay_range(optimizer: OptimizerConfig) -> tuple[float, float]:
    """Weight decay at the start and at the end of the run."""
    if optimizer.weight_decay_incr_style == "constant":
        return optimizer.weight_decay, optimizer.weight_decay
    assert optimizer.start_weight_decay is not None and optimizer.end_weight_decay is not None
    return optimizer.start_weight_decay, optimizer.end_weight_decay


def lr_marks(config: RunConfig, world_size: int) -> dict[str, float]:
    """Samples at which a phase of the learning rate begins or ends, by its label."""
    end = lr_decay_samples(config, world_size)
    samples = {"warm-up ends": lr_warmup_samples(config, world_size), "decay ends": float(end)}
    decay_samples = lr_wsd_decay_samples(config, world_size)
    if decay_samples is not None:
        samples["decay begins"] = end - decay_samples
    if config.optimizer.lr_decay_style == "constant":
        del samples["decay ends"]
    return samples
