"""The precision of a step under `--fp8-schedule`, and the state of delayed scaling around a step.

Nothing is rebuilt when the precision changes. Weights, optimizer and recipe state (scales of delayed scaling, counters
of stochastic rounding) stay in place. Linears in high precision ignore their recipe state, and every checkpoint has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from megafp8.config import precision_map
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.precision_schedule import SchedulePhase, phase_at
from megafp8.config.schema import RunConfig
from megafp8.mcore.config import precision_fields
from megafp8.models import grouped_moe
from megafp8.models.layer_runtime import layer_runtime
from megafp8.quantization.delayed_scaling import DelayedState


@contextmanager
def high_precision(config: TransformerConfig, chunks: list[Any]) -> Iterator[None]:
    """Quantize no GEMM within the context.

    megatron-core reads its configuration in each forward pass. Emulated linears, and those with a recipe of their own,
    read `is_quantizing`.
    """
    linears = [module for chunk in chunks for module in chunk.modules() if getattr(module, "is_quantizing", False)]
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


class PrecisionPhases:
    """The phases of `--fp8-schedule`, of which a model is in one at a time.

    Args:
        transformer_config: which megatron-core reads in each forward pass.
        chunks: the model.
        implementation: the layers in use, see `Run`.
    """

    def __init__(
        self, config: RunConfig, transformer_config: TransformerConfig, chunks: list[Any], implementation: LayerBackend
    ):
        self.config, self.transformer_config = config, transformer_config
        self.chunks, self.implementation = chunks, implementation
        self.current: Optional[SchedulePhase] = None

    def enter(self, step: int) -> bool:
        """Compute in the phase of a step from now on, not within a step; whether that changed anything."""
        phase = phase_at(self.config.precision, step)
        if phase is None or phase == self.current:
            return False
        self.current, core = phase, self.transformer_config
        config = dataclasses.replace(self.config, precision=phase.apply(self.config.precision))
        fields = precision_fields(config, self.implementation)
        core.fp8, core.fp4 = fields.get("fp8"), fields.get("fp4")
        resolved = precision_map.resolve(config.model, config.precision)
        quantized = {name for name, choice in resolved.items() if choice.is_quantized}
        model = unwrap_model(self.chunks)
        for chunk in model:
            grouped_moe.set_precision(chunk, quantized)
        layer_runtime(self.implementation).set_precision(config.model, config.precision, model)
        return True


class DelayedScalingSnapshot:
    """A copy of the amax histories and scales of this rank's layers, restored after a skipped update or a validation.

    When a step turns out to be bad, its amaxes are already in the amax history. An infinite amax would freeze the scale
    for the length of the history, and one that is finite but too large would round tensors to zero. In Transformer
    Engine's layers the forward passes of a validation record amaxes, too. The copy takes one `_foreach_copy_`.

    Args:
        chunks: the model.
        implementation: the layers in use, see `Run`.
    """

    def __init__(self, chunks: list[Any], implementation: LayerBackend):
        self.chunks, self.implementation = chunks, implementation
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._is_complete = False

    @torch.no_grad()
    def save(self) -> None:
        """Copy the state, before a step or a validation."""
        if not self._is_complete:
            self._find_tensors()
        if self._tensors:
            torch._foreach_copy_(self._copies, self._tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copy back."""
        if self._tensors:
            torch._foreach_copy_(self._tensors, self._copies)

    def _find_tensors(self) -> None:
        """Collect the tensors. Transformer Engine's layers create theirs in the first forward and backward pass, so
        that the search is repeated until it finds no more."""
        found = [tensor for chunk in self.chunks for tensor in delayed_scaling_tensors(chunk, self.implementation)]
        runtime = layer_runtime(self.implementation)
        is_stable = len(found) == len(self._tensors) > 0
        if self.implementation.creates_scales_late:  # experts in one launch have theirs from the start
            is_stable &= any(runtime.delayed_state(chunk) for chunk in self.chunks)
        self._is_complete = is_stable and not runtime.lacks_scales_of_attention(self.chunks)
        self._tensors, self._copies = found, [torch.empty_like(tensor) for tensor in found]


def delayed_scaling_tensors(chunk: Any, implementation: LayerBackend) -> list[Tensor]:
    """The amax histories and scales of a model chunk, not copied: of Transformer Engine's linears, and of emulated
    linears and experts in one launch."""
    states = [module for module in chunk.modules() if isinstance(module, DelayedState)]
    own = [tensor for state in states for tensor in (state.amax_history, state.quant_scale)]
    return own + layer_runtime(implementation).delayed_state(chunk)
