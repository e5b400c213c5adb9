"""A fault that a run plants into its layers (`--planted-fault`), to test what notices it and what repairs it.

Gradual faults grow by `--planted-fault-growth` with every step from `--planted-fault-step` on, sudden ones last one
step. All layers that quantize the linear have the fault, because a small model hardly needs a single layer; in a
mixture a gradual fault of an MLP is in dense layers and shared experts. In a run without quantization `inflated-qk` is
in all layers, and `spike-batch` needs none; the others are refused. What a run plants depends on the step only, so that
a resumed run continues it.

    outlier-channel       gradual: a channel of the input of linear_fc1 grows
    aligned-swiglu        gradual: a channel of SwiGLU's output grows, and its two weights turn to the same direction
    inflated-qk           gradual: attention logits grow, because queries and keys do
    spike-batch           sudden: the tokens of a batch are replaced, its labels are not
    infinite-activation   sudden: one value of the input of linear_fc2 is infinite, in the first of these layers; of a
                          mixture, in its first expert with tokens

The channels grow by powers of two by which the weights of the linear shrink. In high precision no bit depends on it, so
that all that is lost is lost by the quantization, and a repair can be compared with a run without the fault. Only
emulated layers can have such a channel (`device/layer_support.py`); the other faults need only a call of the linear.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megafp8.config.planted_faults import (
    ALIGNED_SWIGLU,
    EMULATED_FAULTS,
    INFINITE_ACTIVATION,
    INFLATED_QK,
    SPIKE_BATCH,
)
from megafp8.config.planted_linears import planted_linears
from megafp8.config.schema import ModelConfig
from megafp8.errors import NumericsError
from megafp8.mcore.modules import named_linears
from megafp8.training.extension import Extension, LoopState
from megafp8.training.run import Run
from megafp8.training.step import StepResult

CHANNEL = 0
TURN = 0.1  # of the way to the direction of the other weight, with every step


class PlantedFault(Extension):
    """Plants the run's fault, if it has one."""

    def __init__(self) -> None:
        self.fault: Optional[LayerFault] = None

    def open(self, state: LoopState) -> None:
        if state.run.config.training.planted_fault != "none":
            self.fault = LayerFault(state.run)

    def before_step(self, state: LoopState) -> None:
        if self.fault is not None:
            self.fault.start(state.step + 1)
            state.needs_eager_step = True  # a replay calls no hooks

    def after_step(self, state: LoopState, result: StepResult) -> None:
        if self.fault is not None:
            self.fault.end_step()

    def recover(self, state: LoopState, error: NumericsError) -> bool:
        if self.fault is not None:
            self.fault.end_step()
        return False


class LayerFault:
    """The fault of a run.

    Attributes:
        factor: by which a gradual fault has grown.
        is_active: whether a sudden fault is in this step.
        spoiled: the linear with an infinite value in this step; None before it is found.
    """

    def __init__(self, run: Run):
        training, model = run.config.training, run.config.model
        self.kind, self.first_step, self.growth = (
            training.planted_fault, training.planted_fault_step, training.planted_fault_growth,
        )  # fmt: skip
        self.model, self.vocab_size, self.chunks = model, run.vocab_size, unwrap_model(run.training_state.chunks)
        self.factor, self.is_active = 1.0, False
        self.spoiled: Optional[nn.Module] = None
        named = dict(pair for chunk in self.chunks for pair in named_linears(chunk))
        chosen = [name for name in planted_linears(self.kind, model, run.config.precision) if name in named]
        self.linears: list[Any] = [named[name] for name in chosen]
        mlps = [name.rpartition(".")[0] for name in chosen] if self.kind == ALIGNED_SWIGLU else []
        self.gated: list[Any] = [named[f"{mlp}.linear_fc1"] for mlp in mlps]
        self.attach()

    def attach(self) -> None:
        """Attach the hooks of the fault, before those of the guard."""
        if self.kind == SPIKE_BATCH:
            for embedding in (chunk.embedding.word_embeddings for chunk in self.chunks):
                embedding.register_forward_pre_hook(lambda _, args: (self.replace_tokens(args[0]), *args[1:]))
        for linear in self.linears:
            if self.kind == INFLATED_QK:
                linear.register_forward_hook(lambda _, args, output: (self.inflate(output[0]), *output[1:]))
            elif self.kind == INFINITE_ACTIVATION:
                linear.register_forward_pre_hook(lambda module, args: (self.spoil(module, args[0]), *args[1:]))
            else:
                linear.register_forward_pre_hook(lambda _, args: (self.enlarge(args[0]), *args[1:]))

    def start(self, step: int) -> None:
        """Set the fault of a step."""
        num_steps = max(0, step - self.first_step + 1)
        self.is_active, self.spoiled = step == self.first_step, None
        self.factor = self.growth**num_steps
        if self.kind not in EMULATED_FAULTS or not num_steps:
            return
        self.factor = 2.0 ** math.floor(math.log2(self.factor))
        for linear in self.linears:
            linear.input_scales = torch.ones(linear.weight.shape[1], device=linear.weight.device)
            linear.input_scales[CHANNEL] = 1 / self.factor
        if self.kind == ALIGNED_SWIGLU:
            for gated in self.gated:
                align(gated.weight)

    def end_step(self) -> None:
        """No sudden fault in a validation."""
        self.is_active = False

    def spoil(self, linear: nn.Module, values: Tensor) -> Tensor:
        """The input of a linear [..., K]; that of the first linear with tokens has an infinite value."""
        if not self.is_active or not values.numel():
            return values
        self.spoiled = linear if self.spoiled is None else self.spoiled
        if linear is not self.spoiled:
            return values
        spoiled = values.clone()
        spoiled.view(-1, values.shape[-1])[0, CHANNEL] = torch.inf
        return spoiled

    def enlarge(self, values: Tensor) -> Tensor:
        """The input of the linear [..., K] with a channel that grows."""
        if self.factor == 1.0:
            return values
        factors = torch.ones(values.shape[-1], dtype=values.dtype, device=values.device)
        factors[CHANNEL] = self.factor
        return values * factors

    def inflate(self, output: Tensor) -> Tensor:
        """The output of linear_qkv with larger queries and keys: [..., groups x (queries, key, value) x channels]."""
        if self.factor == 1.0:
            return output
        return output * query_key_mask(self.model, output, math.sqrt(self.factor))

    def replace_tokens(self, tokens: Tensor) -> Tensor:
        """Other tokens, the same for the same tokens."""
        if not self.is_active:
            return tokens
        positions = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
        return (31 * tokens + 17 * positions) % self.vocab_size


def query_key_mask(model: ModelConfig, output: Tensor, factor: float) -> Tensor:
    """Factors of the output of linear_qkv: those of queries and keys are `factor`, those of values 1."""
    assert model.num_attention_heads is not None
    groups = model.num_query_groups if model.group_query_attention else model.num_attention_heads
    assert groups is not None
    factors = torch.full((groups, model.num_attention_heads // groups + 2), factor, device=output.device)
    factors[:, -1] = 1.0
    num_channels = output.shape[-1] // factors.numel()
    return factors.flatten().repeat_interleave(num_channels).to(output.dtype)


@torch.no_grad()
def align(weight: nn.Parameter) -> None:
    """Turn the gate's weight of a channel towards the other weight of linear_fc1 [2 F, H], in all its copies."""
    for copy in (weight, getattr(weight, "main_param", None)):
        if copy is None:
            continue
        # The distributed optimizer of one rank has a flat copy.
        gate, linear = copy.detach().view(weight.shape).chunk(2)
        norm = gate[CHANNEL].norm()
        turned = (1 - TURN) * gate[CHANNEL] + TURN * norm * linear[CHANNEL] / linear[CHANNEL].norm()
        gate[CHANNEL] = turned * (norm / turned.norm())
