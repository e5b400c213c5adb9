"""How many bytes it takes to tell all ranks the updated weights, counted at the collectives themselves."""

from __future__ import annotations

from typing import Any, Optional

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megafp8.fp8.scaling import reduce_amax


class ParameterTraffic(TorchDispatchMode):
    """Counts what a rank gets from others of the distributed optimizer's weights, and of their amaxes.

    A gather counts what comes out of it less what went in; a reduction its tensor. Padding is sent too, and counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Within the mode: look at the arguments of every collective."""
        name = function._schema.name
        if name in ("c10d::_allgather_base_", "c10d::allgather_into_tensor_coalesced_"):
            self.received_bytes += num_bytes(args[0]) - num_bytes(args[1])
        elif name == "c10d::allreduce_":
            self.received_bytes += num_bytes(args[0])
        return function(*args, **(kwargs or {}))

    def watch(self, chunks: list[Any]) -> None:
        """Count what the gathers of these model chunks move from now on."""
        for chunk in chunks:
            for group in chunk.bucket_groups:
                self._watch(group)

    def _watch(self, group: Any) -> None:
        start = group.start_param_sync

        def start_counted(*args: Any, **kwargs: Any) -> Any:
            with self:
                return start(*args, **kwargs)

        group.start_param_sync = start_counted

    def reduce_amax(self, largest: Tensor, group: Optional[dist.ProcessGroup]) -> Tensor:
        """`scaling.reduce_amax`, counted."""
        with self:
            return reduce_amax(largest, group)

    def take(self) -> int:
        """The bytes since the last call."""
        received, self.received_bytes = self.received_bytes, 0
        return received


def num_bytes(tensors: Any) -> int:
    """Bytes of a tensor or of several."""
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(tensor.nbytes for tensor in tensors)
