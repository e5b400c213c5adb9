"""Room in the fixed shapes of a CUDA graph for what differs between passes: rows of experts, documents of a microbatch.

Kernel by kernel the host reads how much is needed. A CUDA graph has room for more than any pass before it needed. Where
a replay needs more, the step is undone and repeated kernel by kernel, and the next graph has more room (`RepeatedStep`
in `training/step_parts.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class GraphRoom:
    """Decides on the size of one dimension.

    Args:
        factor: of a graph's room over the largest number before it.
        rounded: rounds a number up to a size.

    Attributes:
        largest: number that one pass needed.
        overflows: FP64 [1], passes that needed more than a CUDA graph has.
    """

    def __init__(self, device: torch.device, factor: float, rounded: Callable[[int], int]):
        self.factor, self.rounded, self.largest = factor, rounded, 0
        self.overflows = torch.zeros(1, dtype=torch.float64, device=device)

    def size(self, needed: Tensor, worst: int) -> int:
        """A size for the number `needed`, one integer; in a CUDA graph it may be too small, which is counted.

        Args:
            worst: which always suffices.
        """
        if needed.is_cuda and torch.cuda.is_current_stream_capturing():
            size = self.graph_size(worst)
            self.overflows.add_(needed > size)
            return size
        number = int(needed)  # the host waits for a number on a device
        self.largest = max(self.largest, number)
        return self.rounded(number)

    def graph_size(self, worst: int) -> int:
        """The size in a graph that is captured now."""
        return min(worst, self.rounded(int(self.factor * self.largest)))
