"""The loss scale of a step, as megatron-core's scaler keeps it.

The loss is multiplied by it before the backward pass, so that small gradients do not vanish in FP16, and the gradients
are divided by it before their norm is taken. A dynamic scale is found by trying (Micikevicius et al., "Mixed Precision
Training", arXiv:1710.03740): gradients that overflow make no update and, after `--hysteresis` of them, halve it; each
`--loss-scale-window` good steps in a row double it. An overflow is therefore no bad number, unless nothing is left to
try: at `--min-loss-scale`, and with a fixed scale.
"""

from __future__ import annotations

from typing import Optional

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler, MegatronGradScaler

from megafp8.config.schema import OptimizerConfig


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
