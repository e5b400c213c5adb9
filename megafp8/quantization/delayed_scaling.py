"""Delayed scaling: a tensor's scale comes from the amaxes that it had before.

So a tensor is quantized in one pass, with the scale at hand, while its amax is noted for later. After a microbatch has
run forward, amaxes of inputs and weights are reduced over the ranks and become scales; after it has run backward, those
of grad_outputs. A linear keeps for each operand

    amax_history [length]   entry 0 collects the amaxes since the last update; from 1 on, older ones come first
    quant_scale             what the operand is multiplied by until the next update; 1 in the beginning, unless a run
                            calibrates before its first step (`training/extensions/calibration.py`)

and an update with the reduced amax a is, as in Transformer Engine's fused kernel (`common/recipe/delayed_scaling.cu`,
read at 2.20):

    a = 0         nothing happens, not even a roll: the tensor was not there (a weight after the first microbatch); so
                  with a = NaN, which leaves no trace
    roll          entries move down by one, a becomes the last one, entry 0 becomes 0
    amax          the largest of the entries ("max"), or a ("most_recent")
    quant_scale   (format max / 2^margin) / amax; kept as it is where amax is infinite, the largest FP32 if it overflows

Two things differ from Transformer Engine on purpose: amaxes seen in evaluation are not noted, so that evaluating does
not change training; and all linears of a model chunk are updated when the last of them has run, which is when the
chunk's autocast ends there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megafp8.quantization.scaling import FP32_MAX, reduce_amax
from megafp8.recipes.base import DelayedOptions, LinearRecipe, Operand, ScaleRule
from megafp8.resilience import fault_injection

OPERANDS = tuple(Operand)
FORWARD, BACKWARD = slice(0, 2), slice(2, 3)  # of OPERANDS


class DelayedScale(NamedTuple):
    """The scale of one operand, for one use.

    Attributes:
        quant: FP32 scalar.
        amax: FP32 scalar that the tensor's amax is entered into; None leaves no trace.
    """

    quant: Tensor
    amax: Optional[Tensor]

    def note(self, largest: Tensor) -> None:
        """Remember an amax until the next update."""
        if self.amax is not None:
            torch.maximum(self.amax, largest, out=self.amax)


class DelayedScales(NamedTuple):
    """The scales of a linear's operands."""

    input: DelayedScale
    weight: DelayedScale
    grad_output: DelayedScale


@torch.no_grad()
def update(history: Tensor, quant_scale: Tensor, largest: Tensor, format_max: Tensor, options: DelayedOptions) -> None:
    """Update n tensors' history and scale in place.

    Args:
        history: FP32 [length, n].
        quant_scale: FP32 [n].
        largest: FP32 [n], reduced amaxes.
        format_max: FP32 [n], largest value of each tensor's format.
    """
    was_there = largest > 0
    rolled = torch.cat([history[1:], largest[None]])
    amax = rolled.amax(dim=0) if options.algorithm == "max" else largest
    scale = (format_max * 2.0**-options.margin / amax).clamp_(max=FP32_MAX)
    rolled[0] = 0
    history.copy_(torch.where(was_there, rolled, history))
    history[0] = 0
    quant_scale.copy_(torch.where(was_there & (amax < torch.inf), scale, quant_scale))


class DelayedState(nn.Module):
    """Histories and scales of a linear's operands: FP32 buffers, so that a checkpoint holds them.

    Args:
        recipe: of delayed scaling.
    """

    def __init__(self, recipe: LinearRecipe):
        super().__init__()
        assert recipe.delayed is not None
        self.options = recipe.delayed
        self.format_max = tuple(_format_max(recipe, operand) for operand in OPERANDS)
        self.register_buffer("amax_history", torch.zeros(self.options.history_len, len(OPERANDS)))
        self.register_buffer("quant_scale", torch.ones(len(OPERANDS)))
        self.kept_scales: deque[Tensor] = deque()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DelayedState:
        """Move with the model, but stay FP32 when the model becomes BF16."""
        for name, buffer in self._buffers.items():
            self._buffers[name] = buffer.to(fn(buffer).device)
        return self

    def scales(self, is_noted: bool, forward_scale: Optional[Tensor] = None) -> DelayedScales:
        """What the operands are multiplied by now.

        Args:
            is_noted: note the amaxes.
            forward_scale: those of input and weight, where they are not today's: their amaxes were noted then.
        """
        entries = [entry if is_noted else None for entry in self.amax_history[0]]
        scales = [DelayedScale(*pair) for pair in zip(self.quant_scale, entries, strict=True)]
        if forward_scale is not None:
            scales[FORWARD] = [DelayedScale(scale, None) for scale in forward_scale[FORWARD]]
        return DelayedScales(*scales)

    def scales_for_forward(self) -> tuple[DelayedScales, bool]:
        """The scales for a forward pass, and whether this is its first run.

        Activation recomputation runs it twice: first without gradients, then with them, maybe after updates. The second
        run has the scales of the first and leaves no trace in the history. Microbatches come back in order.
        """
        if not self.training:
            return self.scales(is_noted=False), False
        if torch.is_grad_enabled() and self.kept_scales:
            return self.scales(is_noted=True, forward_scale=self.kept_scales.popleft()), False
        if not torch.is_grad_enabled():
            self.kept_scales.append(self.quant_scale.clone())
        return self.scales(is_noted=True), True


def _format_max(recipe: LinearRecipe, operand: Operand) -> float:
    """The largest number that an operand's codes stand for; 1 where delayed scaling has no part in it, which then never
    has an amax either."""
    rules = {rule for each, _, rule in recipe.rules if each is operand and rule is not None}
    formats = {rule.format for rule in rules if rule.scale_rule is ScaleRule.DELAYED}
    assert len(formats) <= 1, "one scale for codes of two formats"
    return formats.pop().max if formats else 1.0


class AmaxExchange:
    """The linears of a model chunk, whose amaxes travel together: one all-reduce a microbatch and direction.

    Each calls `forward_ran` and `backward_ran` once a microbatch; with the last of them all are updated.
    """

    def __init__(self) -> None:
        self.states: list[DelayedState] = []
        self.group: Optional[dist.ProcessGroup] = None
        self._ran: dict[str, set[int]] = {"forward": set(), "backward": set()}

    def join(self, state: DelayedState, group: Optional[dist.ProcessGroup]) -> None:
        """Add a linear.

        Args:
            group: ranks over which amaxes are reduced, the same for all linears.
        """
        self.states.append(state)
        self.group = group

    def forward_ran(self, state: DelayedState) -> None:
        """A linear has quantized its input and weight."""
        self._arrive(state, "forward", FORWARD)

    def backward_ran(self, state: DelayedState) -> None:
        """A linear has quantized its grad_output."""
        self._arrive(state, "backward", BACKWARD)

    def start_step(self) -> None:
        """Forget an unfinished microbatch, which an error has left."""
        for ran in self._ran.values():
            ran.clear()

    def _arrive(self, state: DelayedState, direction: str, operands: slice) -> None:
        ran = self._ran[direction]
        assert id(state) not in ran, f"a linear ran {direction} twice before another one of its chunk ran at all"
        ran.add(id(state))
        if len(ran) == len(self.states):
            ran.clear()
            update_together(self.states, operands, self.group)


@torch.no_grad()
def update_together(states: Sequence[DelayedState], operands: slice, group: Optional[dist.ProcessGroup]) -> None:
    """Reduce the noted amaxes of some operands of all linears over the ranks, and update them."""
    history = torch.stack([state.amax_history[:, operands] for state in states], dim=1)  # [length, linears, operands]
    scale = torch.stack([state.quant_scale[operands] for state in states])
    format_max = torch.tensor([state.format_max[operands] for state in states], device=scale.device)
    fault_injection.poison("step.amax", history[0])
    largest = reduce_amax(history[0].clone(), group)
    length = len(history)
    update(history.view(length, -1), scale.view(-1), largest.view(-1), format_max.view(-1), states[0].options)
    for index, state in enumerate(states):
        state.amax_history[:, operands] = history[:, index]
        state.quant_scale[operands] = scale[index]
