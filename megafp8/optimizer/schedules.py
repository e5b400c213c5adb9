"""Learning-rate and weight-decay schedule, and the loss scale.

The schedule is megatron-core's and counts samples.

The loss is multiplied by the loss scale before the backward pass, so that small gradients do not underflow in FP16, and
gradients are divided by it before their norm is computed. Dynamic loss scaling (Micikevicius et al., "Mixed Precision
Training", arXiv:1710.03740) skips the update when gradients overflow, halves the loss scale after `--hysteresis`
overflows, and doubles it after `--loss-scale-window` consecutive steps without overflow. An overflow is an error only
if the loss scale cannot be lowered: at `--min-loss-scale`, or if it is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Optional

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

from megafp8.config.batch_schedule import BatchSchedule
from megafp8.config.lr_schedule import ScheduleSamples, weight_decay_range
from megafp8.config.schema import CheckpointConfig, OptimizerConfig


class Schedule(OptimizerParamScheduler):
    """megatron-core's scheduler, which also saves and loads the settings that megatron-core leaves out."""

    EXTRA_KEYS = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")

    def state_dict(self) -> dict[str, Any]:
        """megatron-core's state and the settings that it leaves out."""
        return super().state_dict() | {name: getattr(self, name) for name in self.EXTRA_KEYS}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the saved settings, or keep the present ones with `override_opt_param_scheduler`."""
        for name in self.EXTRA_KEYS:  # before the rest: megatron-core then also computes the learning rate
            setattr(self, name, self._check_and_set(getattr(self, name), state_dict[name], name))
        super().load_state_dict(state_dict)


def build_schedule(
    settings: OptimizerConfig, samples: ScheduleSamples, checkpoint: CheckpointConfig, optimizer: MegatronOptimizer
) -> Schedule:
    """Build the schedule: linear warm-up, then `--lr-decay-style`. Advance it with `step(increment=samples)`.

    Args:
        checkpoint: says whether a loaded checkpoint replaces these settings.
    """
    start_weight_decay, end_weight_decay = weight_decay_range(settings)
    return Schedule(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=samples.warmup,
        lr_decay_steps=samples.decay,
        lr_decay_style=settings.lr_decay_style,
        start_wd=start_weight_decay,
        end_wd=end_weight_decay,
        wd_incr_steps=samples.weight_decay,
        wd_incr_style=settings.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=checkpoint.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=checkpoint.override_opt_param_scheduler,
        wsd_decay_steps=samples.wsd_decay,
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )


def current_learning_rate(optimizer: MegatronOptimizer) -> float:
    """The learning rate of parameters without a decoupled learning rate; NaN if there are none."""
    rate = get_canonical_lr_for_logging(optimizer.param_groups)
    return float("nan") if rate is None else float(rate)


@dataclass(frozen=True, kw_only=True)
class ScheduledStep:
    """Learning rates, weight decay and batch size of one step.

    Attributes:
        step: counted from 1.
        samples_before: consumed by the steps before.
        decoupled_learning_rate: of embedding and output layer; None without `--decoupled-lr`.
    """

    step: int
    samples_before: int
    global_batch_size: int
    learning_rate: float
    decoupled_learning_rate: Optional[float]
    weight_decay: float


def preview_schedule(
    settings: OptimizerConfig, samples: ScheduleSamples, batches: BatchSchedule, steps: Sequence[int]
) -> list[ScheduledStep]:
    """Learning rates and weight decay of some steps of a run, from its own schedule but without a model.

    Args:
        steps: ascending, counted from 1.
    """
    groups: list[dict[str, Any]] = [{"default_config": True}, {}]
    if settings.decoupled_lr is not None:
        groups[1] = {"max_lr": settings.decoupled_lr}
        if settings.decoupled_min_lr is not None:
            groups[1]["min_lr"] = settings.decoupled_min_lr
    optimizer: Any = SimpleNamespace(param_groups=groups)
    schedule, found = build_schedule(settings, samples, CheckpointConfig(), optimizer), []
    for step in steps:
        schedule.step(increment=batches.advance(step - 1) - schedule.num_steps)
        found.append(
            ScheduledStep(
                step=step,
                samples_before=schedule.num_steps,
                global_batch_size=batches.batch_size_at(schedule.num_steps),
                learning_rate=current_learning_rate(optimizer),
                decoupled_learning_rate=None if settings.decoupled_lr is None else groups[1]["lr"],
                weight_decay=groups[0]["weight_decay"],
            )
        )
    return found


def get_grad_scaler(optimizer: MegatronOptimizer) -> Optional[MegatronGradScaler]:
    """The gradient scaler of the optimizer; None without a loss scale. Chained optimizers share one."""
    scalers = {getattr(part, "grad_scaler", None) for part in getattr(optimizer, "chained_optimizers", (optimizer,))}
    (scaler,) = scalers
    return scaler


def current_loss_scale(optimizer: MegatronOptimizer) -> Optional[float]:
    """The loss scale of the next step; None without one. Synchronizes with the device."""
    scaler = get_grad_scaler(optimizer)
    return None if scaler is None else float(scaler.scale)


def can_lower_loss_scale(optimizer: MegatronOptimizer) -> bool:
    """Whether the loss scale is dynamic and above its minimum. Synchronizes with the device."""
    scaler = get_grad_scaler(optimizer)
    return isinstance(scaler, DynamicGradScaler) and float(scaler.scale) > float(scaler.min_scale)


def describe_overflow(settings: OptimizerConfig, loss_scale: float) -> str:
    """Text for an overflow at a loss scale that cannot be lowered, with the fix."""
    if settings.loss_scale is not None:
        return f"the loss scale is fixed at {loss_scale:g}: lower --loss-scale, or with --fp16 leave it out"
    return f"the loss scale is at its minimum of {loss_scale:g}: lower --min-loss-scale if gradients are that large"
