"""Loss spikes: a loss or gradient norm far above those of the steps before.

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

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
