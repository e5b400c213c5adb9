"""Parameters that FSDP2 gathers together, and reduces the gradients of: a layer, or the rest of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def fsdp_modules(chunk: torch.nn.Module) -> Iterator[FSDPModule]:
    """The modules of a chunk whose parameters FSDP2 gathers together."""
    return (module for module in chunk.modules() if isinstance(module, FSDPModule))


def fsdp_parameters(module: FSDPModule) -> list[Any]:
    """FSDP2's own record of each parameter that it gathers for a module, in the order in which it packs them.

    Torch 2.11 has one group of parameters for a module. Later versions can have several, but have one here.
    """
    group = parameter_group(module)
    return [] if group is None else group.fsdp_params


def parameter_group(module: FSDPModule) -> Any:
    """FSDP2's own record of the parameters of a module; None if it has none."""
    return module._get_fsdp_state()._fsdp_param_group


class GradientSums:
    """Gradients of the parameters of a module, summed over the ranks and over the microbatches of a step.

    FSDP2 hands over the sums over the ranks before it rounds them to the dtype of the parameters. The first microbatch
    of a step overwrites those of the last step, so that nothing sets them to zero. `main_grad` of a parameter is its
    part.

    Args:
        module: has parameters.
        dtype: of the sums; None for that of the parameters.
        on_added: called after the gradients of a microbatch are added, on the stream of the hook.

    Attributes:
        parameters: of the module, sharded.
        sizes: elements of each of them on this rank.
        rows: their sums, flat, in this order.
    """

    def __init__(self, module: FSDPModule, dtype: Optional[torch.dtype], on_added: Callable[[GradientSums], None]):
        self.module, self._on_added = module, on_added
        self.parameters: list[DTensor] = [record.sharded_param for record in fsdp_parameters(module)]
        self.sizes = [parameter.to_local().numel() for parameter in self.parameters]
        first = self.parameters[0].to_local()
        self._group = parameter_group(module)
        self.rows = torch.zeros(sum(self.sizes), dtype=dtype or first.dtype, device=first.device)
        self._is_overwritten = True
        for parameter, rows in zip(self.parameters, self.rows.split(self.sizes), strict=True):
            parameter.main_grad = DTensor.from_local(
                rows.view(parameter.to_local().shape), parameter.device_mesh, parameter.placements, run_check=False,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
            parameter.register_post_accumulate_grad_hook(free_gradient)
        # FSDP2 calls the hook after its reduce-scatter, with the sums in `reduce_dtype`, and rounds them to the dtype
        # of the parameters afterwards.
        module.set_all_reduce_hook(self._add)

    def start(self) -> None:
        """Let the next gradients overwrite the sums."""
        self._is_overwritten = True

    def finish(self) -> None:
        """Set the sums to zero if no gradient came since `start`."""
        if self._is_overwritten:
            # Otherwise the gradients of the last step would be applied again.
            self.rows.zero_()

    def multiply(self, factor: Any) -> None:
        """Multiply the sums."""
        self.rows.mul_(factor)

    def _add(self, gradients: Tensor) -> None:
        assert gradients.numel() == self.rows.numel(), "a gradient is missing, or padded"
        if self._is_overwritten:
            self.rows.copy_(gradients)
        else:
            self.rows.add_(gradients)
        self._is_overwritten = False
        self._on_added(self)
        # FSDP2 calls this on another stream than that of its reductions, and frees the gradients after it. The next
        # reduction may get their memory, so it has to wait until they are read. Both may add to the counts of codes.
        streams = self._group.comm_ctx
        streams.reduce_scatter_stream.wait_stream(streams.all_reduce_stream)


class ReplicaSums:
    """Adds the sums of hybrid sharding's replicas once in a step: by all-reduces, in the dtype of the sums.

    Args:
        group: ranks that have the same rows, one of each replica.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self._works: dict[GradientSums, Any] = {}

    def start(self, sums: GradientSums) -> None:
        """Start to add sums of a step that are complete on this replica."""
        assert sums not in self._works, "gradients were added after their sums were sent"
        self._works[sums] = self._send(sums)

    def finish(self, all_sums: Sequence[GradientSums]) -> None:
        """Start those to which the last microbatch of the step added nothing, and wait for all."""
        for sums in all_sums:
            if sums not in self._works:
                self.start(sums)
        self._wait(list(self._works.values()))
        self._works.clear()

    def _send(self, sums: GradientSums) -> Any:
        return dist.all_reduce(sums.rows, group=self.group, async_op=True)

    def _wait(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait()


def free_gradient(parameter: DTensor) -> None:
    """Free what FSDP2 sets as the gradient of a parameter: the sums have it."""
    parameter.grad = None
