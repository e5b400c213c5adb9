"""How many bytes it takes to tell all ranks the updated weights, counted at the collectives themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.fp8.parameter import quantized_parameters


class ParameterTraffic(TorchDispatchMode):
    """Counts what a rank gets from others of the distributed optimizer's weights, and of their amaxes.

    A gather counts what comes out of it less what went in; a reduction its tensor. Padding is sent too, and counts.

    Args:
        chunks: the model's, with their gradient buffers.
    """

    def __init__(self, chunks: list[Any]) -> None:
        super().__init__()
        self.received_bytes = 0
        for group in (group for chunk in chunks for group in chunk.bucket_groups):
            group.start_param_sync = self._counted(group.start_param_sync)
        for weight in quantized_parameters(chunks):
            weight.codes.exchange = self._counted(weight.codes.exchange)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Within the mode: look at the arguments of every collective."""
        name = function._schema.name
        if name in ("c10d::_allgather_base_", "c10d::allgather_into_tensor_coalesced_"):
            self.received_bytes += num_bytes(args[0]) - num_bytes(args[1])
        elif name == "c10d::allreduce_":
            self.received_bytes += num_bytes(args[0])
        return function(*args, **(kwargs or {}))

    def _counted(self, communicate: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose collectives count."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self:
                return communicate(*args, **kwargs)

        return counted

    def take(self) -> int:
        """The bytes since the last call."""
        received, self.received_bytes = self.received_bytes, 0
        return received


def build_traffic(config: RunConfig, chunks: list[Any]) -> Optional[ParameterTraffic]:
    """The count of a run; None where every rank updates all weights and nothing is gathered, or a graph gathers."""
    is_in_graph = config.parallel.overlap_param_gather and derived.has_step_graph(config)
    return ParameterTraffic(chunks) if config.parallel.use_distributed_optimizer and not is_in_graph else None


def num_bytes(tensors: Any) -> int:
    """Bytes of a tensor or of several."""
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(tensor.nbytes for tensor in tensors)
