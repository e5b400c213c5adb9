"""Skip-update optimizer, and detection of spikes of loss and gradient norm.

A step of megatron-core's optimizer computes the gradient norm, clips and updates in one call. `SkipUpdateOptimizer` can
skip the update depending on that norm, at no extra cost.

A spike is one of two things, as seen from the last `window` updates:

    loss           more than `sigma` standard deviations above the straight line through their losses
    gradient norm  more than `norm_factor` times their median

A loss that falls during the window has a large deviation from its mean, in which a bad batch disappears. From a line
the deviation is that of the batches. Norms of clean runs are bursts with heavy tails: no number of deviations separates
them from those of bad batches (`benchmarks/planted_faults.py`), so that only a factor that no batch reaches counts. It
finds faults of the arithmetic; clipping bounds what a norm does otherwise.

As in OLMo-core's SkipStepOptimizer, on which this is modelled, `window` and `sigma` are settings. Unlike there, skipped
updates do not enter the window, so that a spike does not hide the next one. A loss that stays at a higher level is then
a spike in every step, so the number of consecutive skipped updates has to be limited.

Everything is computed from the complete window in every step with `math.fsum`, which rounds once. It depends only on
the values in the window, so a resumed run makes the same decisions as an uninterrupted one.
"""

from __future__ import annotations

import math
import statistics
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
        sigma: threshold of the loss above its line, in standard deviations.
        min_steps: number of updates before anything counts as a spike; at least 3.
        norm_factor: threshold of the gradient norm, over the median.
    """

    window: int
    sigma: float
    min_steps: int
    norm_factor: float

    def find_spike(self, history: Window, loss: float, grad_norm: float) -> Optional[str]:
        """Description of the spike of a step; None if there is none.

        Args:
            history: (loss, gradient norm) of earlier updates, the newest last.
            loss, grad_norm: of the step, equal on all ranks.
        """
        recent = history[-self.window :]
        if len(recent) < self.min_steps:
            return None
        losses, norms = zip(*recent, strict=True)
        found = []
        expected, deviation = extrapolate(losses)
        if loss > expected + self.sigma * deviation:
            times = (loss - expected) / deviation if deviation else math.inf
            found.append(
                f"loss {loss:.6g} is {times:.1f} standard deviations above {expected:.6g}, which the last "
                f"{len(recent)} updates lead to"
            )
        median = statistics.median(norms)
        if grad_norm > self.norm_factor * median:
            found.append(
                f"gradient norm {grad_norm:.6g} is {grad_norm / median if median else math.inf:.1f} times the median "
                f"{median:.6g} of the last {len(recent)} updates"
            )
        return " and ".join(found) or None

    def after_update(self, history: Window, loss: float, grad_norm: float) -> Window:
        """The window with one more update."""
        return (*history, (loss, grad_norm))[-self.window :]


def extrapolate(values: Sequence[float]) -> tuple[float, float]:
    """The next value on the least-squares line through at least three values, and the standard deviation with which
    another value of the same scatter lies around it (of the values around the line, and of the line's end)."""
    count = len(values)
    center, mean = (count - 1) / 2, math.fsum(values) / count
    spread = math.fsum((index - center) ** 2 for index in range(count))
    slope = math.fsum((index - center) * (value - mean) for index, value in enumerate(values)) / spread
    squares = math.fsum((value - mean - slope * (index - center)) ** 2 for index, value in enumerate(values))
    of_line = 1 / count + (count - center) ** 2 / spread
    return mean + slope * (count - center), math.sqrt(squares / (count - 2) * (1 + of_line))
