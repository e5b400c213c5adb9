"""Check of gradients under `--use-torch-fsdp2`, which reduces them during the backward pass of each microbatch."""

from __future__ import annotations

from functools import partial
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.optimizer.fsdp_traffic import add_reduction_hook
from megafp8.optimizer.gradient_checks import GradientNormCheck, is_finite, parameters_in_forward_order


class ReducedGradientMonitor(GradientNormCheck):
    """Finds non-finite values in this rank's rows of the reduced gradients.

    A NaN of one rank is then in the rows of others. With codes, whose casts read all gradients, one more read before
    them tells which rank it comes from. Without, the report names the tensor, and the ranks that have its rows.

    Args:
        is_local: whether the gradients of each module are also checked before they are reduced.
    """

    origin_text = "--use-torch-fsdp2: a rank has rows of sums over ranks, each of which may have brought the value up"

    def __init__(self, chunks: list[Any], device: torch.device, is_local: bool):
        super().__init__(chunks, device)
        self.gradients = [parameter.main_grad for chunk in chunks for parameter in chunk.parameters()]
        self._sums = [sums for chunk in chunks for sums in chunk.sums] if is_local else []
        self._bad_modules = torch.zeros(len(self._sums), device=device)
        for sums, bad in zip(self._sums, self._bad_modules, strict=True):
            add_reduction_hook(sums.module, partial(self._check, bad))

    def _check(self, bad: Tensor, gradients: Tensor) -> None:
        bad += ~is_finite(gradients)

    def bad_gradients(self, squared_norm: Optional[Tensor]) -> Tensor:
        """The number of gradients that are not finite, if there is no norm that tells."""
        if squared_norm is not None:
            return super().bad_gradients(squared_norm)
        bad = torch.zeros((), device=self.device)
        for gradient in self.gradients:
            bad += ~is_finite(gradient)
        return bad

    def find_local(self) -> Optional[set[tuple[int, str]]]:
        """(chunk, name) of this rank's non-finite gradients before they were reduced; None if no rank knows of any.

        They are those parameters of its bad modules whose sums are not finite. Collective.
        """
        names = {parameter: (index, name) for index, name, parameter in parameters_in_forward_order(self.chunks)}
        reduced = {name for parameter, name in names.items() if not bool(is_finite(parameter.main_grad))}
        local = {
            names[parameter]
            for sums, is_bad in zip(self._sums, self._bad_modules.tolist(), strict=True)
            for parameter in sums.parameters
            if is_bad
        }
        gathered: list[tuple[set[tuple[int, str]], bool]] = [(set(), False)] * dist.get_world_size()
        dist.all_gather_object(gathered, (reduced, bool(local)))
        all_reduced = set().union(*(names for names, _ in gathered))
        return local & all_reduced if any(is_known for _, is_known in gathered) else None

    def reset(self) -> None:
        """Clear the flags of modules before the next step."""
        self._bad_modules.zero_()
