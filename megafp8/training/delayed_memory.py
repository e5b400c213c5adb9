"""What delayed scaling remembers, taken back with a step whose update is left out, and after a validation.

A step that meets numbers that are not finite, or a spike, has entered their amaxes in histories and scales by the time
that it is found out. An infinite amax keeps a scale as it is for as long as the history is; one that is finite and far
too large is worse, since everything rounds to zero meanwhile. So histories and scales are copied when a step begins,
and put back. So they are around a validation, whose passes enter amaxes in Transformer Engine's layers. The copy is one
operation over a few small tensors a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megafp8.fp8.delayed import DelayedState


class DelayedMemory:
    """Amax histories and scales of this rank's layers.

    Args:
        chunks: the model.
        implementation: of its layers.
    """

    def __init__(self, chunks: list[Any], implementation: str):
        self.chunks, self.implementation = chunks, implementation
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._is_complete = False

    @torch.no_grad()
    def remember(self) -> None:
        """Before a step or a validation."""
        if not self._is_complete:
            self._find()
        if self._tensors:
            torch._foreach_copy_(self._copies, self._tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """After it, as if it had not been."""
        if self._tensors:
            torch._foreach_copy_(self._tensors, self._copies)

    def _find(self) -> None:
        """Transformer Engine's layers have their tensors from their first passes on: look until no more come."""
        found = [tensor for chunk in self.chunks for tensor in delayed_state(chunk, self.implementation)]
        is_awaited = any(awaits_attention(chunk, self.implementation) for chunk in self.chunks)
        self._is_complete = len(found) == len(self._tensors) > 0 and not is_awaited
        self._tensors, self._copies = found, [torch.empty_like(tensor) for tensor in found]


def delayed_state(chunk: Any, implementation: str) -> list[Tensor]:
    """All tensors that delayed scaling remembers in a chunk; those themselves."""
    if implementation == "transformer_engine":
        from megafp8.model import te_layers  # needs Transformer Engine

        return te_layers.delayed_state(chunk)
    states = [module for module in chunk.modules() if isinstance(module, DelayedState)]
    return [tensor for state in states for tensor in (state.amax_history, state.quant_scale)]


def awaits_attention(chunk: Any, implementation: str) -> bool:
    """Whether a chunk will have scales of attention, and has none so far."""
    if implementation != "transformer_engine":
        return False
    from megafp8.model import te_layers  # needs Transformer Engine

    return te_layers.lacks_scales_of_attention(chunk)
