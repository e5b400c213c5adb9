"""The precision of a step under `--fp8-schedule`, and the state of delayed scaling around a step.

Nothing is rebuilt when the precision changes: weights, optimizer and the state of recipes (delayed scaling's scales,
counts of random draws) stay where they are, and steps in high precision ignore that state. So every checkpoint has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megafp8.quantization.delayed_scaling import DelayedState


@contextmanager
def high_precision(config: TransformerConfig, chunks: list[Any]) -> Iterator[None]:
    """Within, no GEMM is quantized. megatron-core asks its configuration in each forward pass; linears with a recipe of
    their own, and emulated ones, heed `is_quantizing`."""
    linears = [module for chunk in chunks for module in chunk.modules() if hasattr(module, "is_quantizing")]
    formats = config.fp8, config.fp4
    config.fp8 = config.fp4 = None
    for linear in linears:
        linear.is_quantizing = False
    try:
        yield
    finally:
        config.fp8, config.fp4 = formats
        for linear in linears:
            linear.is_quantizing = True


class DelayedMemory:
    """Amax histories and scales of this rank's layers, saved and restored around a step or a validation.

    A step whose update is skipped has entered its amaxes in histories and scales by the time that it is found out. An
    infinite amax keeps a scale as it is for as long as the history is; one that is finite and far too large is worse,
    since everything rounds to zero meanwhile. Forward passes of a validation enter amaxes in Transformer Engine's
    layers. The copy is one operation over a few small tensors a layer.

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
        """After it: undo what it entered."""
        if self._tensors:
            torch._foreach_copy_(self._tensors, self._copies)

    def _find(self) -> None:
        """Transformer Engine's layers have their tensors from their first passes on: search until no more come."""
        found = [tensor for chunk in self.chunks for tensor in delayed_state(chunk, self.implementation)]
        is_awaited = any(awaits_attention(chunk, self.implementation) for chunk in self.chunks)
        self._is_complete = len(found) == len(self._tensors) > 0 and not is_awaited
        self._tensors, self._copies = found, [torch.empty_like(tensor) for tensor in found]


def delayed_state(chunk: Any, implementation: str) -> list[Tensor]:
    """The amax histories and scales of a chunk: the tensors themselves."""
    if implementation == "transformer_engine":
        from megafp8.te import layers  # needs Transformer Engine

        return layers.delayed_state(chunk)
    states = [module for module in chunk.modules() if isinstance(module, DelayedState)]
    return [tensor for state in states for tensor in (state.amax_history, state.quant_scale)]


def awaits_attention(chunk: Any, implementation: str) -> bool:
    """Whether a chunk will have scales of attention and has none yet."""
    if implementation != "transformer_engine":
        return False
    from megafp8.te import layers  # needs Transformer Engine

    return layers.lacks_scales_of_attention(chunk)
