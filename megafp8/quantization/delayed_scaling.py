"""Delayed scaling: the scale of a tensor comes from its amax history.

A tensor is quantized in one pass with the scale at hand, while its amax is recorded for later. After the forward pass
of a microbatch the amaxes of inputs and weights are reduced over the ranks and become scales; after its backward pass
those of grad_outputs. A linear keeps for each operand

    amax_history [length]   entry 0 collects the amaxes since the last update; entries from 1 on are older to newer
    quant_scale             multiplies the operand until the next update; initially 1, unless the run calibrates before
                            its first step (`training/extensions/calibration.py`)

An update with the reduced amax a follows Transformer Engine's fused kernel (`common/recipe/delayed_scaling.cu`, release
2.20):

    a = 0 or NaN  no change, not even a roll: the tensor was not quantized (a weight after the first microbatch)
    roll          entries move down by one, a becomes the last one, entry 0 becomes 0
    amax          the largest of the entries ("max"), or a ("most_recent")
    quant_scale   (format max / 2^margin) / amax; unchanged where amax is infinite, the largest FP32 on overflow

Two differences from Transformer Engine are deliberate. Amaxes of evaluation are not recorded, so that evaluation does
not change training. All linears of a model chunk are updated when the last of them has run, which is when Transformer
Engine's autocast of the chunk ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megafp8.quantization.scaling import FP32_MAX, reduce_amax
from megafp8.recipes.base import DelayedOptions, LinearRecipe, Operand, ScaleRule
from megafp8.resilience import fault_injection

OPERANDS = tuple(Operand)
FORWARD, BACKWARD = slice(0, 2), slice(2, 3)  # of OPERANDS


def keeps_amaxes(options: DelayedOptions) -> bool:
    """Whether earlier amaxes count, so that an infinite one keeps the scale until it has left the history."""
    return options.algorithm == "max" and options.history_len > 1


class DelayedScale(NamedTuple):
    """The scale of one operand, for one use; of stacked linears [E], one for each.

    Attributes:
        quant_scale: FP32 scalar or [E].
        amax: FP32 scalar or [E] that records the tensor's amax; None records nothing.
    """

    quant_scale: Tensor
    amax: Optional[Tensor]

    def record(self, amax: Tensor) -> None:
        """Record an amax for the next update."""
        if self.amax is not None:
            torch.maximum(self.amax, amax, out=self.amax)


class DelayedScales(NamedTuple):
    """The scales of a linear's operands."""

    input: DelayedScale
    weight: DelayedScale
    grad_output: DelayedScale


@torch.no_grad()
def update_scales(
    history: Tensor, quant_scale: Tensor, new_amax: Tensor, format_max: Tensor, options: DelayedOptions
) -> None:
    """Update the amax history and the scale of n tensors in place.

    Args:
        history: FP32 [length, n].
        quant_scale: FP32 [n].
        new_amax: FP32 [n], reduced amaxes.
        format_max: FP32 [n], largest value of each tensor's format.
    """
    was_quantized = new_amax > 0  # false for NaN
    rolled = torch.cat([history[1:], new_amax[None]])
    amax = rolled.amax(dim=0) if options.algorithm == "max" else new_amax
    new_scale = (format_max * 2.0**-options.margin / amax).clamp_(max=FP32_MAX)
    rolled[0] = 0
    history.copy_(torch.where(was_quantized, rolled, history))
    history[0] = 0
    quant_scale.copy_(torch.where(was_quantized & (amax < torch.inf), new_scale, quant_scale))


class DelayedState(nn.Module):
    """Amax histories and scales of a linear's operands, in FP32 buffers that checkpoints contain.

    Args:
        recipe: of delayed scaling.
        num_linears: E stacked linears with scales of their own, such as the experts of a layer; None is one linear.

    Attributes:
        amax_history: [length, 3], of stacked linears [length, 3, E].
        quant_scale: [3], of stacked linears [3, E].
        format_max: the largest value of each operand's format, [3] or [3, 1].
        is_updated: whether the linear runs under delayed scaling now, so that updates of all linears wait for it.
    """

    amax_history: Tensor
    quant_scale: Tensor
    is_updated = True

    def __init__(self, recipe: LinearRecipe, num_linears: Optional[int] = None):
        super().__init__()
        assert recipe.delayed is not None
        self.options = recipe.delayed
        self.num_linears = num_linears
        stack = () if num_linears is None else (num_linears,)
        self.format_max = torch.tensor([_format_max(recipe, operand) for operand in OPERANDS]).view(
            3, *(1,) * len(stack)
        )
        self.register_buffer("amax_history", torch.zeros(self.options.history_len, len(OPERANDS), *stack))
        self.register_buffer("quant_scale", torch.ones(len(OPERANDS), *stack))
        self.stored_scales: deque[Tensor] = deque()  # of forward passes that will be recomputed

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DelayedState:
        """Move with the model, but stay FP32 when the model becomes BF16."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.to(fn(buffer).device)
        self.format_max = self.format_max.to(self.quant_scale.device)
        return self

    def linear_states(self) -> dict[str, Tensor]:
        """The state of each stacked linear, by the names `amax_history.E` and `quant_scale.E`, copied."""
        assert self.num_linears is not None
        return {
            f"{name}.{index}": buffer[..., index].clone()
            for name, buffer in self.named_buffers()
            for index in range(self.num_linears)
        }

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load stacked linears from what `linear_states` gives, where all of it is there."""
        if self.num_linears is not None:
            for name in self._buffers:
                keys = [f"{prefix}{name}.{index}" for index in range(self.num_linears)]
                parts = [state_dict.pop(key, None) for key in keys]
                if all(part is not None for part in parts):
                    state_dict[prefix + name] = torch.stack(parts, dim=-1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def infinite_amaxes(self) -> Tensor:
        """Whether each operand's window has an infinite amax, bool [3] or [3, E]. It would keep the scale until it
        leaves."""
        return self.amax_history.amax(dim=0) == torch.inf

    @torch.no_grad()
    def clear_infinite_amaxes(self) -> None:
        """Remove infinite amaxes from the history, so that the next update makes scales from the others."""
        self.amax_history.masked_fill_(self.amax_history == torch.inf, 0.0)

    def scales(self, records_amax: bool, forward_scale: Optional[Tensor] = None) -> DelayedScales:
        """The current scales of the operands.

        Args:
            records_amax: record the amaxes in the history.
            forward_scale: earlier scales to use for input and weight, whose amaxes were recorded then.
        """
        entries = [entry if records_amax else None for entry in self.amax_history[0]]
        scales = [DelayedScale(*pair) for pair in zip(self.quant_scale, entries, strict=True)]
        if forward_scale is not None:
            scales[FORWARD] = [DelayedScale(quant_scale, None) for quant_scale in forward_scale[FORWARD]]
        return DelayedScales(*scales)

    def scales_for_forward(self) -> tuple[DelayedScales, bool]:
        """The scales for a forward pass, and whether this is its first run.

        Activation recomputation runs a forward pass twice, first without gradients, then with them, possibly after
        updates. The second run uses the scales of the first one and records nothing. Microbatches are recomputed in
        the order in which they ran.
        """
        if not self.training:
            return self.scales(records_amax=False), False
        if torch.is_grad_enabled() and self.stored_scales:
            return self.scales(records_amax=True, forward_scale=self.stored_scales.popleft()), False
        if not torch.is_grad_enabled():
            self.stored_scales.append(self.quant_scale.clone())
        return self.scales(records_amax=True), True

    def next_input_scale(self) -> Tensor:
        """The scale of the input in the next `scales_for_forward`, FP32 scalar or [E]."""
        is_second_run = self.training and torch.is_grad_enabled() and bool(self.stored_scales)
        scales = self.stored_scales[0] if is_second_run else self.quant_scale
        return scales[OPERANDS.index(Operand.INPUT)].clone()


def _format_max(recipe: LinearRecipe, operand: Operand) -> float:
    """The largest value of an operand's format; 1 for an operand without delayed scaling, which records no amax."""
    rules = {rule for each, _, rule in recipe.rules if each is operand and rule is not None}
    formats = {rule.format for rule in rules if rule.scale_rule is ScaleRule.DELAYED}
    assert len(formats) <= 1, "one scale for codes of two formats"
    return formats.pop().max if formats else 1.0


class AmaxExchange:
    """Reduces the amaxes of all linears of a model chunk together: one all-reduce per microbatch and direction.

    Each linear calls `forward_ran` and `backward_ran` once a microbatch; the last call updates all scales.
    """

    def __init__(self) -> None:
        self.states: list[DelayedState] = []
        self.updated: list[DelayedState] = []  # those that updates wait for
        self.group: Optional[dist.ProcessGroup] = None
        self.observers: dict[DelayedState, Callable[[slice], None]] = {}
        self._ran: dict[str, set[int]] = {"forward": set(), "backward": set()}

    def join(self, state: DelayedState, group: Optional[dist.ProcessGroup]) -> None:
        """Add a linear.

        Args:
            group: ranks over which amaxes are reduced, the same for all linears.
        """
        self.states.append(state)
        self.updated.append(state)
        self.group = group

    def observe(self, state: DelayedState, observer: Callable[[slice], None]) -> None:
        """Call a function before each update of a linear's scales, with the operands of the update, in place of an
        earlier one."""
        self.observers[state] = observer

    def leave(self, state: DelayedState) -> None:
        """Remove a linear, which quantizes no more."""
        self.states = [each for each in self.states if each is not state]
        self.updated = [each for each in self.updated if each is not state]
        self.observers.pop(state, None)

    def set_updated(self, state: DelayedState, is_updated: bool) -> None:
        """Let the updates of the others wait for a linear, or not while it runs without delayed scaling."""
        state.is_updated = is_updated
        self.updated = [each for each in self.states if each.is_updated]

    def forward_ran(self, state: DelayedState) -> None:
        """A linear has quantized its input and weight."""
        self._arrive(state, "forward", FORWARD)

    def backward_ran(self, state: DelayedState) -> None:
        """A linear has quantized its grad_output."""
        self._arrive(state, "backward", BACKWARD)

    def start_step_of(self, state: DelayedState) -> None:
        """Discard what an error left unfinished of one linear."""
        state.stored_scales.clear()
        for ran in self._ran.values():
            ran.discard(id(state))

    def start_step(self) -> None:
        """Discard a microbatch that an error left unfinished."""
        for ran in self._ran.values():
            ran.clear()

    def _arrive(self, state: DelayedState, direction: str, operands: slice) -> None:
        ran = self._ran[direction]
        assert id(state) not in ran, f"a linear ran {direction} twice before another one of its chunk ran at all"
        ran.add(id(state))
        if len(ran) == len(self.updated):
            ran.clear()
            for observer in (self.observers[each] for each in self.updated if each in self.observers):
                observer(operands)
            reduce_and_update_scales(self.updated, operands, self.group)


@torch.no_grad()
def reduce_and_update_scales(
    states: Sequence[DelayedState], operands: slice, group: Optional[dist.ProcessGroup]
) -> None:
    """Reduce the recorded amaxes of some operands of all linears over the ranks, and update histories and scales."""
    # [length, linears, operands], and for stacked linears [length, layers, operands, E]
    history = torch.stack([state.amax_history[:, operands] for state in states], dim=1)
    quant_scale = torch.stack([state.quant_scale[operands] for state in states])
    format_max = torch.stack([state.format_max[operands] for state in states]).expand_as(quant_scale)
    fault_injection.poison("step.amax", history[0])
    amax = reduce_amax(history[0].clone(), group)
    length = len(history)
    format_max = format_max.reshape(-1)
    update_scales(history.view(length, -1), quant_scale.view(-1), amax.view(-1), format_max, states[0].options)
    for index, state in enumerate(states):
        state.amax_history[:, operands] = history[:, index]
        state.quant_scale[operands] = quant_scale[index]
