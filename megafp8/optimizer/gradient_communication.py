"""Hooks on the gradient reduction, wgrad overwrite in gradient buffers, and traffic of the parameter gathers.

Wgrad overwrite: a linear that accumulates wgrad into `main_grad` inside its GEMM can overwrite `main_grad` in the first
microbatch of a step, so the buffer needs no zeroing. The linear reads `overwrite_main_grad` of its weight, which is set
before the step and cleared after the first wgrad. megatron-core adds gradients that come from autograd, and their parts
of the buffer are zeroed as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megafp8.mcore.grad_reduction import reduction_group
from megafp8.mcore.process_groups import bucket_groups
from megafp8.optimizer.received_bytes import ReceivedBytes
from megafp8.quantization.fp8_parameter import quantized_parameters
from megafp8.resilience import fault_injection


def add_grad_sync_hook(group: Any, hook: Callable[[], None]) -> Callable[[], None]:
    """Call a function before each gradient reduction of a bucket group; of several, the one added last comes first.

    Returns:
        A function that removes the hook. Several hooks of one group have to be removed in reverse order.
    """
    # Bound before it is replaced: `remove` restores exactly this, so that nested hooks have to go in reverse order.
    start_grad_sync = group.start_grad_sync

    def call_and_start(*args: Any, **kwargs: Any) -> Any:
        hook()
        return start_grad_sync(*args, **kwargs)

    def remove() -> None:
        group.start_grad_sync = start_grad_sync

    group.start_grad_sync = call_and_start
    return remove


def poison(group: Any) -> None:
    """Fault injection point for each bucket of a group."""
    for bucket in group.buckets:
        fault_injection.poison("step.gradients", bucket.grad_data)


class WgradOverwrite:
    """Prepares the gradient buffers of a step, in place of megatron-core's `zero_grad_buffer`.

    Forward and backward passes must alternate, as they do without pipeline parallelism, because some layers read
    `overwrite_main_grad` in the forward pass.

    Args:
        chunks: the model chunks with gradient buffers.
        find_weights: returns those of linears that support `overwrite_main_grad`.
    """

    def __init__(self, chunks: Sequence[Any], find_weights: Callable[[], Sequence[nn.Parameter]]):
        self.chunks, self._find_weights = chunks, find_weights
        self.choose_weights()
        for weight in self.weights:
            # Further wgrads of the step are accumulated.
            weight.register_post_accumulate_grad_hook(partial(set_overwrite, is_overwritten=False))
        for chunk in chunks:
            # megatron-core's `zero_grad_buffer` also resets the buffers, which would write the zeros that overwriting
            # saves.
            for buffer in chunk.buffers:
                buffer.reset = lambda: None

    def choose_weights(self) -> None:
        """Find the weights whose gradients are overwritten from the next step on, after linears have changed."""
        self.weights = self._find_weights()
        overwritten = set(self.weights)
        parameters = [parameter for chunk in self.chunks for parameter in chunk.params_with_grad]
        # Without the overwritten weights: their old gradients stay until the first wgrad.
        self.zeroed = [parameter.main_grad for parameter in parameters if parameter not in overwritten]

    @torch.no_grad()
    def start(self) -> None:
        """Mark weights for overwriting and zero all other gradients, before the first microbatch of a step."""
        for weight in self.weights:
            set_overwrite(weight, is_overwritten=True)
        torch._foreach_zero_(self.zeroed)
        for chunk in self.chunks:
            # Still needed: it resets the flags of weights and bucket groups.
            chunk.zero_grad_buffer()


def set_overwrite(weight: Any, is_overwritten: bool) -> None:
    """Set the flag on the weight, for Transformer Engine, and on `main_grad`, for megatron-core's linears."""
    weight.overwrite_main_grad = weight.main_grad.is_overwritten = is_overwritten


class ParameterTraffic(ReceivedBytes, TorchDispatchMode):
    """Counts the bytes of updated weights, and of their amaxes, that a rank receives from other ranks.

    An all-gather counts its output less its input, an all-reduce its tensor. Padding is included.

    Args:
        chunks: the model chunks with gradient buffers.
    """

    def __init__(self, chunks: list[Any]) -> None:
        super().__init__()
        # A dispatch mode sees the collectives inside, however megatron-core calls them.
        for group in (group for chunk in chunks for group in bucket_groups(chunk)):
            group.start_param_sync = self._counted(group.start_param_sync)
        for weight in quantized_parameters(chunks):
            weight.codes.exchange = self._counted(weight.codes.exchange)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the bytes of a collective."""
        name = function._schema.name
        # The tensors of these operators are the output, then the input.
        if name in ("c10d::_allgather_base_", "c10d::allgather_into_tensor_coalesced_"):
            self.received_bytes += num_bytes(args[0]) - num_bytes(args[1])
        elif name == "c10d::allreduce_":
            self.received_bytes += num_bytes(args[0])
        return function(*args, **(kwargs or {}))

    def _counted(self, communicate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its collectives are counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self:
                return communicate(*args, **kwargs)

        return counted


class GradientTraffic(ReceivedBytes):
    """Counts the bytes of gradients that a rank receives from other ranks, as a ring sends them.

    A reduce-scatter of n bytes over d ranks counts (d - 1) / d n, an all-reduce twice that. Padding is included.

    Args:
        chunks: the model chunks with gradient buffers.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        for group in (group for chunk in chunks for group in bucket_groups(chunk)):
            ranks = reduction_group(group)
            if ranks is not None:
                add_grad_sync_hook(group, partial(self._count, group, ranks.size()))

    def _count(self, group: Any, num_ranks: int) -> None:
        if group.grad_reduce_handle is None:  # else megatron-core ignores a repeated call
            # A reduce-scatter, or an all-reduce, which is a reduce-scatter and an all-gather.
            num_phases = 1 if group.ddp_config.use_distributed_optimizer else 2
            reduced = sum(bucket.grad_data.nbytes for bucket in group.buckets)
            self.received_bytes += num_phases * reduced * (num_ranks - 1) // num_ranks


def num_bytes(tensors: Any) -> int:
    """Bytes of a tensor or of several."""
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(tensor.nbytes for tensor in tensors)
