"""Counts what FSDP2's ranks send each other, and hooks on their gradients.

FSDP2's collectives are replaced through `set_custom_all_gather` and `set_custom_reduce_scatter`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from megafp8.mcore.fsdp_groups import GradientSums, fsdp_modules, parameter_group
from megafp8.optimizer.received_bytes import ReceivedBytes


class HookedReduceScatter(DefaultReduceScatter):
    """A reduce-scatter that gives this rank's gradients to a function before."""

    def __init__(self, reduce: Callable[..., Any], hook: Callable[[Tensor], None]):
        self._reduce, self._hook = reduce, hook

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        """Call the function, and reduce."""
        self._hook(input_tensor)
        return self._reduce(output_tensor, input_tensor, *args, **options)


def add_reduction_hook(module: Any, hook: Callable[[Tensor], None]) -> None:
    """Call a function with the gradients of a module, flat, before each reduction.

    Args:
        module: of FSDP2, with parameters. A collective that is set later replaces the hook.
    """
    module.set_custom_reduce_scatter(HookedReduceScatter(parameter_group(module)._reduce_scatter_comm, hook))


class CountedGather(ReceivedBytes, DefaultAllGather):
    """An all-gather that counts the bytes that this rank receives.

    Args:
        chunks: model chunks whose gathers it carries out.
    """

    def __init__(self, chunks: Sequence[Any]):
        for module in (module for chunk in chunks for module in fsdp_modules(chunk)):
            module.set_custom_all_gather(self)
        for codes, _ in (each for chunk in chunks for each in chunk.quantized_weights):
            codes.exchange = self._counted(codes.exchange)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        """Gather, in the format of the input."""
        self.received_bytes += output_tensor.nbytes - input_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, *args, **options)

    def _counted(self, exchange: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap the reduction of amaxes, which is counted as one message of their size."""

        def counted(amax: Tensor, group: Optional[dist.ProcessGroup]) -> Tensor:
            self.received_bytes += amax.nbytes if group is not None else 0
            return exchange(amax, group)

        return counted


class CountedReduction(ReceivedBytes, DefaultReduceScatter):
    """A reduce-scatter that counts the bytes that this rank receives, as a ring sends them.

    It also counts both phases of the all-reduces between replicas.

    Args:
        chunks: model chunks whose gradients it reduces.
    """

    def __init__(self, chunks: Sequence[Any]):
        for module in (module for chunk in chunks for module in fsdp_modules(chunk)):
            module.set_custom_reduce_scatter(self)
        for replicas in (chunk.replicas for chunk in chunks if chunk.replicas is not None):
            replicas.start = self._counted(replicas.start, replicas.group.size())

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        """Add the gradients in their dtype."""
        self.received_bytes += input_tensor.nbytes - output_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, *args, **options)

    def _counted(self, start: Callable[[GradientSums], None], num_replicas: int) -> Callable[[GradientSums], None]:
        """Wrap the start of an all-reduce between replicas."""

        def counted(sums: GradientSums) -> None:
            self.received_bytes += 2 * sums.rows.nbytes * (num_replicas - 1) // num_replicas
            start(sums)

        return counted
