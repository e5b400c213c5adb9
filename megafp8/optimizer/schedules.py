"""The learning-rate and weight-decay schedule: megatron-core's, counted in samples as Megatron counts it.

The loss scale of a step, as megatron-core's scaler keeps it.

The loss is multiplied by it before the backward pass, so that small gradients do not vanish in FP16, and the gradients
are divided by it before their norm is taken. A dynamic scale is found by trying (Micikevicius et al., "Mixed Precision
Training", arXiv:1710.03740): gradients that overflow make no update and, after `--hysteresis` of them, halve it; each
`--loss-scale-window` good steps in a row double it. An overflow is therefore no bad number, unless nothing is left to
try: at `--min-loss-scale`, and with a fixed scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Optional

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

from megafp8.config import derived
from megafp8.config.schema import OptimizerConfig, RunConfig


class Schedule(OptimizerParamScheduler):
    """megatron-core's, which also saves and restores what megatron-core leaves out of a learning rate's making."""

    LEFT_OUT = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")

    def state_dict(self) -> dict[str, Any]:
        """megatron-core's, with what it leaves out."""
        return super().state_dict() | {name: getattr(self, name) for name in self.LEFT_OUT}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As megatron-core: the saved values, or with `override_opt_param_scheduler` this schedule's own."""
        for name in self.LEFT_OUT:  # first: with the rest megatron-core also computes the rate
            setattr(self, name, self._check_and_set(getattr(self, name), state_dict[name], name))
        super().load_state_dict(state_dict)


def build_schedule(config: RunConfig, optimizer: MegatronOptimizer, world_size: int) -> Schedule:
    """Linear warm-up, then the decay of `--lr-decay-style`. Advance it with `step(increment=samples)`."""
    settings = config.optimizer
    start_weight_decay, end_weight_decay = derived.weight_decay_range(settings)
    return Schedule(
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


@dataclass(frozen=True, kw_only=True)
class ScheduledStep:
    """What the schedule gives one step.

    Attributes:
        step: 1 for the first one.
        decoupled_learning_rate: of embedding and output layer; None where they have no rate of their own.
    """

    step: int
    learning_rate: float
    decoupled_learning_rate: Optional[float]
    weight_decay: float


def preview_schedule(config: RunConfig, world_size: int, steps: Sequence[int]) -> list[ScheduledStep]:
    """What some steps of a run will get, from the schedule that the run itself is built with, without any model.

    Args:
        steps: in rising order, 1 or more.
    """
    settings = config.optimizer
    groups: list[dict[str, Any]] = [{"default_config": True}, {}]
    if settings.decoupled_lr is not None:
        groups[1] = {"max_lr": settings.decoupled_lr}
        if settings.decoupled_min_lr is not None:
            groups[1]["min_lr"] = settings.decoupled_min_lr
    optimizer: Any = SimpleNamespace(param_groups=groups)
    schedule = build_schedule(config, optimizer, world_size)
    batch, found = derived.global_batch_size(config, world_size), []
    for step in steps:
        schedule.step(increment=(step - 1) * batch - schedule.num_steps)
        found.append(
            ScheduledStep(
                step=step,
                learning_rate=current_learning_rate(optimizer),
                decoupled_learning_rate=None if settings.decoupled_lr is None else groups[1]["lr"],
                weight_decay=groups[0]["weight_decay"],
            )
        )
    return found


def scaler_of(optimizer: MegatronOptimizer) -> Optional[MegatronGradScaler]:
    """The scaler of a run's optimizer; None without a loss scale. A GPT without experts has one."""
    scalers = {getattr(part, "grad_scaler", None) for part in getattr(optimizer, "chained_optimizers", (optimizer,))}
    (scaler,) = scalers
    return scaler


def current_loss_scale(optimizer: MegatronOptimizer) -> Optional[float]:
    """What the next loss is multiplied by, on the host; None without a loss scale. Waits for the device."""
    scaler = scaler_of(optimizer)
    return None if scaler is None else float(scaler.scale)


def can_fall(optimizer: MegatronOptimizer) -> bool:
    """Whether an overflow leads to a lower scale, and so is no bad number. Waits for the device."""
    scaler = scaler_of(optimizer)
    return isinstance(scaler, DynamicGradScaler) and float(scaler.scale) > float(scaler.min_scale)


def describe_overflow(settings: OptimizerConfig, loss_scale: float) -> str:
    """Why a scale that cannot fall is too high, with the mend."""
    if settings.loss_scale is not None:
        return f"the loss scale is fixed at {loss_scale:g}: lower --loss-scale, or with --fp16 leave it out"
    return f"the loss scale is at its minimum of {loss_scale:g}: lower --min-loss-scale if gradients are that large"
