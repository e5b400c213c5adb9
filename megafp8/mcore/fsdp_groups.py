"""Parameters that FSDP2 gathers together, and reduces the gradients of: a layer, or the rest of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Optional

import torch
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
    """

    def __init__(self, module: FSDPModule, dtype: Optional[torch.dtype]):
        parameters: list[DTensor] = [record.sharded_param for record in fsdp_parameters(module)]
        sizes = [parameter.to_local().numel() for parameter in parameters]
        first = parameters[0].to_local()
        self._group = parameter_group(module)
        self._rows = torch.zeros(sum(sizes), dtype=dtype or first.dtype, device=first.device)
        self._is_overwritten = True
        for parameter, rows in zip(parameters, self._rows.split(sizes), strict=True):
            parameter.main_grad = DTensor.from_local(
                rows.view(parameter.to_local().shape), parameter.device_mesh, parameter.placements, run_check=False,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
            parameter.register_post_accumulate_grad_hook(free_gradient)
        module.set_all_reduce_hook(self._add)

    def start(self) -> None:
        """Let the next gradients overwrite the sums."""
        self._is_overwritten = True

    def finish(self) -> None:
        """Set the sums to zero if no gradient came since `start`."""
        if self._is_overwritten:
            self._rows.zero_()

    def multiply(self, factor: Any) -> None:
        """Multiply the sums."""
        self._rows.mul_(factor)

    def _add(self, gradients: Tensor) -> None:
        assert gradients.numel() == self._rows.numel(), "a gradient is missing, or padded"
        if self._is_overwritten:
            self._rows.copy_(gradients)
        else:
            self._rows.add_(gradients)
        self._is_overwritten = False
        # FSDP2 calls this on another stream than that of its reductions, and frees the gradients after it. The next
        # reduction may get their memory, so it has to wait until they are read.
        streams = self._group.comm_ctx
        streams.reduce_scatter_stream.wait_stream(streams.all_reduce_stream)


def free_gradient(parameter: DTensor) -> None:
    """Free what FSDP2 sets as the gradient of a parameter: the sums have it."""
    parameter.grad = None
