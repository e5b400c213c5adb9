"""Counts the operations that a step launches, and how often the host waits for the device.

On a GPU the profiler counts kernels, copies and fills, and calls that wait. On a CPU, where nothing is launched, it
counts torch's operations, and reads of tensor elements by Python, each of which would be a wait on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
# They launch nothing, or allocate only.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"}
READS = {"_local_scalar_dense", "nonzero"}


@dataclass(frozen=True)
class Operations:
    """Of one call."""

    launched: int
    waits: int

    def __sub__(self, other: Operations) -> Operations:
        return Operations(self.launched - other.launched, self.waits - other.waits)


class OperationCount(TorchDispatchMode):
    """Counts torch's operations while it is entered; views launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.launched = self.waits = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.waits += name in READS
        self.launched += not (function.is_view or name in FREE or name in READS)
        return function(*args, **(kwargs or {}))


def count_operations(step: Callable[[], Any]) -> Operations:
    """Of one call of `step`, which has run before."""
    if not torch.cuda.is_available():
        with OperationCount() as count:
            step()
        return Operations(count.launched, count.waits)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = profile.events()
    launched = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events)
    return Operations(launched, sum(event.name in WAITS for event in events))
