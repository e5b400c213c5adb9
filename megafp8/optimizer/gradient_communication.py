"""What is done whenever gradients of a bucket group are about to be reduced over the data-parallel ranks.

The first weight gradient of a step overwrites the buffer, so that nothing is zeroed and then read for it.

A linear that adds its gradient to the buffer inside its GEMM can as well replace what is there. It looks at the weight
for that: `overwrite_main_grad` is set before the step, and taken back once the first microbatch's gradient is in.
Gradients that autograd makes are added by megatron-core, and their parts of the buffer are zeroed as ever.

How many bytes it takes to tell all ranks the updated weights, counted at the collectives themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.quantization.fp8_parameter import quantized_parameters
from megafp8.resilience import fault_injection


def on_reduction(group: Any, action: Callable[[], None]) -> Callable[[], None]:
    """Do something each time that a bucket group's reduction starts, before it does.

    Returns:
        What ends that. Of several on one group, the last one has to be ended first.
    """
    start = group.start_grad_sync

    def act_and_start(*args: Any, **kwargs: Any) -> Any:
        action()
        return start(*args, **kwargs)

    def end() -> None:
        group.start_grad_sync = start

    group.start_grad_sync = act_and_start
    return end


def expose_to_faults(chunks: Sequence[Any]) -> None:
    """Let planned faults change this rank's gradients before they are reduced."""
    for chunk in chunks:
        for group in chunk.bucket_groups:
            on_reduction(group, partial(poison, group))


def poison(group: Any) -> None:
    """The place of a fault: each bucket of a group."""
    for bucket in group.buckets:
        fault_injection.poison("step.gradients", bucket.grad_data)


class WgradOverwrite:
    """Begins the gradients of a step in place of megatron-core's `zero_grad_buffer`.

    Forward and backward passes must alternate, as they do without pipeline stages: some layers look at the weight in
    the forward pass.

    Args:
        chunks: the model, wrapped with its gradient buffers.
        weights: those whose linears heed `overwrite_main_grad`.
    """

    def __init__(self, chunks: Sequence[Any], weights: Sequence[nn.Parameter]):
        self.chunks, self.weights = chunks, weights
        overwritten = set(weights)
        parameters = [parameter for chunk in chunks for parameter in chunk.params_with_grad]
        self.zeroed = [parameter.main_grad for parameter in parameters if parameter not in overwritten]
        for weight in weights:
            weight.register_post_accumulate_grad_hook(has_gradient)
        for chunk in chunks:
            for buffer in chunk.buffers:
                buffer.reset = do_nothing

    @torch.no_grad()
    def start(self) -> None:
        """Before the first microbatch of a step."""
        for weight in self.weights:
            mark(weight, True)
        torch._foreach_zero_(self.zeroed)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()


def has_gradient(weight: torch.Tensor) -> None:
    """From now on gradients are added."""
    mark(weight, False)


def mark(weight: Any, is_overwritten: bool) -> None:
    """Tell the linear, be it given the weight (Transformer Engine's) or the buffer alone (megatron-core's)."""
    weight.overwrite_main_grad = weight.main_grad.is_overwritten = is_overwritten


def do_nothing() -> None:
    """In place of zeroing a whole buffer."""


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
