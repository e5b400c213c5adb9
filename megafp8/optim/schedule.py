"""The learning-rate and weight-decay schedule: megatron-core's, counted in samples as Megatron counts it."""

from __future__ import annotations

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

from megafp8.config import derived
from megafp8.config.schema import RunConfig


def build_schedule(config: RunConfig, optimizer: MegatronOptimizer, world_size: int) -> OptimizerParamScheduler:
    """Linear warm-up, then the decay of `--lr-decay-style`. Advance it with `step(increment=samples)`."""
    settings = config.optimizer
    start_weight_decay, end_weight_decay = derived.weight_decay_range(settings)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=derived.lr_warmup_samples(config, world_size),
        lr_decay_steps=derived.lr_decay_samples(config, world_size),
        lr_decay_style=settings.lr_decay_style,
        start_wd=start_weight_decay,
        end_wd=end_weight_decay,
        wd_incr_steps=derived.weight_decay_samples(config, world_size),
        wd_incr_style=settings.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=config.checkpoint.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=config.checkpoint.override_opt_param_scheduler,
        wsd_decay_steps=derived.lr_wsd_decay_samples(config, world_size),
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )


def current_learning_rate(optimizer: MegatronOptimizer) -> float:
    """The learning rate of the parameters without a rate of their own."""
    rate = get_canonical_lr_for_logging(optimizer.param_groups)
    return float("nan") if rate is None else float(rate)
