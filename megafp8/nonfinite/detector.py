"""The interface of what finds non-finite values."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

Found = TypeVar("Found", covariant=True)


class Detector(Protocol[Found]):
    """Finds the non-finite values of one kind on this rank."""

    def reset(self) -> None:
        """Clear the counts before a step, also before the replay of a CUDA graph, which holds no resets."""

    def counts(self) -> Tensor:
        """This rank's counts after forward-backward, to sum over the ranks. On the device, which nothing waits for."""

    def find(self) -> Found:
        """Where the values are. Called on all ranks, and only in a step whose sums say that something is wrong."""


class OperandDetector(Detector[Tensor], Protocol):
    """Counts non-finite and saturated values, or tensors, that this rank's linears quantize.

    `counts` has the non-finite and the saturated ones, and infinite amaxes that a history would keep, int64 [3]. `find`
    returns a copy of the counts by linear and quantizer, int64 [linears, QUANTIZERS, 2].
    """

    def clear_infinite_amaxes(self) -> list[str]:
        """Remove infinite amaxes from histories that would keep them; names of the operands that had one."""
