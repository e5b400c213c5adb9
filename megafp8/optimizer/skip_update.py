"""Skip-update optimizer, and detection of spikes of loss and gradient norm.

A step of megatron-core's optimizer computes the gradient norm, clips and updates in one call. `SkipUpdateOptimizer` can
skip the update depending on that norm, at no extra cost.

A spike is a loss or gradient norm more than `sigma` standard deviations above the mean of the last `window` updates, as
in OLMo-core's SkipStepOptimizer. Unlike there, skipped updates do not enter the window, so that a spike does not hide
the next one. A loss that stays at a higher level is then a spike in every step, so the number of consecutive skipped
updates has to be limited.

Mean and deviation are computed from the complete window in every step with `math.fsum`, which rounds once. They depend
only on the values in the window, so a resumed run makes the same decisions as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Optional

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

UpdateCondition = Callable[[float], bool]


class SkipUpdateOptimizer(ChainedOptimizer):
    """megatron-core's chained optimizer with updates that can be skipped.

    Args:
        optimizer: megatron-core's optimizer, which this one replaces.
    """

    def __init__(self, optimizer: MegatronOptimizer):
        assert isinstance(optimizer, ChainedOptimizer)
        super().__init__(optimizer.chained_optimizers)
        self._should_update: Optional[UpdateCondition] = None
        self._grad_norm = 0.0

    def step(self, should_update: Optional[UpdateCondition] = None) -> tuple[bool, Optional[float], Optional[float]]:
        """Run megatron-core's step.

        Args:
            should_update: called with the norm before clipping, unless gradients overflowed with a loss scale. False
                skips the update. It must return the same on all ranks.

        Returns:
            Whether the weights were updated, the norm before clipping (None after an overflow), and the number of zeros
            in the gradients if `log_num_zeros_in_grad` is set.
        """
        self._should_update = should_update
        return super().step()

    def get_grad_norm(self) -> float:
        """Compute the norm, and store it for the decision."""
        self._grad_norm = float(super().get_grad_norm())  # megatron-core 0.19 leaves it on the device
        return self._grad_norm

    def step_with_ready_grads(self) -> bool:
        """Run megatron-core's update, unless it is skipped."""
        return (self._should_update is None or self._should_update(self._grad_norm)) and super().step_with_ready_grads()


Window = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class SpikeDetector:
    """Detects spikes of loss and gradient norm.

    Attributes:
        window: number of updates that a step is compared with.
        sigma: threshold above their mean, in standard deviations.
        min_steps: number of updates before anything counts as a spike; at least 2.
    """

    window: int
    sigma: float
    min_steps: int

    def find_spike(self, history: Window, loss: float, grad_norm: float) -> Optional[str]:
        """Description of the spike of a step; None if there is none.

        Args:
            history: (loss, gradient norm) of earlier updates, the newest last.
            loss, grad_norm: of the step, equal on all ranks.
        """
        recent = history[-self.window :]
        if len(recent) < self.min_steps:
            return None
        series = zip(("loss", "gradient norm"), (loss, grad_norm), zip(*recent, strict=True), strict=True)
        found = [text for name, value, values in series if (text := self._excess(name, value, values))]
        return " and ".join(found) or None

    def _excess(self, name: str, value: float, values: Sequence[float]) -> Optional[str]:
        mean, std = mean_and_std(values)
        if not value > mean + self.sigma * std:
            return None
        times = (value - mean) / std if std else math.inf
        return (
            f"{name} {value:.6g} is {times:.1f} standard deviations above the mean {mean:.6g} of the last "
            f"{len(values)} updates"
        )

    def after_update(self, history: Window, loss: float, grad_norm: float) -> Window:
        """The window with one more update."""
        return (*history, (loss, grad_norm))[-self.window :]


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation of at least two values."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
