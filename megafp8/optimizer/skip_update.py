"""megafp8's last word between the gradients' norm and the update, for megatron-core's own optimizer.

A step of it takes the norm, clips and updates in one call. Here the update waits for a judgement of the norm, which
costs nothing: the norm is that of the clipping, and the ranks of a run have the same.

Loss spikes: a loss or gradient norm far above those of the steps before.

The rule is OLMo-core's: more than `sigma` standard deviations above the mean of the
last `window` updates. Different here: values of updates that were left out never enter the window, so that a spike does
not hide the next one. A loss that stays on a higher level is then a spike in every step, which is why the number of
updates that may be left out in a row is bounded.

Mean and deviation are taken anew from the window in every step, with sums that are rounded once (`math.fsum`): they
depend on the values alone and not on how the run came to them, which makes a resumed run decide as the unbroken one.
That is some 128 additions a step, in the time of microseconds.
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
    """megatron-core's optimizers of one run, whose update can be called off.

    Args:
        optimizer: megatron-core's chain, which this takes the place of.
    """

    def __init__(self, optimizer: MegatronOptimizer):
        assert isinstance(optimizer, ChainedOptimizer)
        super().__init__(optimizer.chained_optimizers)
        self._allows: Optional[UpdateCondition] = None
        self._grad_norm = 0.0

    def step(self, allows: Optional[UpdateCondition] = None) -> tuple[bool, Optional[float], Optional[float]]:
        """megatron-core's step.

        Args:
            allows: told the norm before clipping; False leaves weights and moments as they are. It must give the same
                answer on all ranks.

        Returns:
            Whether the update was made, the norm, and the number of zeros if that is asked for; the norm is None where
            a loss scale overflowed, which nobody is asked about.
        """
        self._allows = allows
        return super().step()

    def get_grad_norm(self) -> float:
        """megatron-core's; kept for the judge."""
        self._grad_norm = super().get_grad_norm()
        return self._grad_norm

    def step_with_ready_grads(self) -> bool:
        """megatron-core's update, unless it is called off."""
        return (self._allows is None or self._allows(self._grad_norm)) and super().step_with_ready_grads()


Window = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class SpikeDetector:
    """Tells spikes from what training does anyhow.

    Attributes:
        window: updates that a step is compared with.
        sigma: standard deviations above their mean from which on it is a spike.
        min_steps: updates without which nothing is one; at least 2.
    """

    window: int
    sigma: float
    min_steps: int

    def spike(self, before: Window, loss: float, grad_norm: float) -> Optional[str]:
        """What is a spike in a step, in words; None if nothing is.

        Args:
            before: (loss, gradient norm) of the updates before, the newest last.
            loss, grad_norm: of the step, the same on all ranks.
        """
        recent = before[-self.window :]
        if len(recent) < self.min_steps:
            return None
        series = zip(("loss", "gradient norm"), (loss, grad_norm), zip(*recent, strict=True), strict=True)
        found = [text for name, value, values in series if (text := self._excess(name, value, values))]
        return " and ".join(found) or None

    def _excess(self, name: str, value: float, values: Sequence[float]) -> Optional[str]:
        mean, deviation = mean_and_deviation(values)
        if not value > mean + self.sigma * deviation:
            return None
        times = (value - mean) / deviation if deviation else math.inf
        return (
            f"{name} {value:.6g} is {times:.1f} standard deviations above the mean {mean:.6g} of the last "
            f"{len(values)} updates"
        )

    def after_update(self, before: Window, loss: float, grad_norm: float) -> Window:
        """The window with one more update."""
        return (*before, (loss, grad_norm))[-self.window :]


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation of two values or more."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
