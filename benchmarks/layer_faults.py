"""Faults that are planted into the layers of a run, to test what notices them and what repairs them.

Gradual faults grow with every step from the first on, sudden ones last one step. All layers that quantize the linear
have the fault, because a small model hardly needs a single layer; in a mixture a gradual fault of an MLP is in dense
layers and shared experts. In a run without quantization `inflated-qk` is in all layers, and `spike-batch` needs none.
What is planted depends on the step only, so that a resumed run continues it.

    outlier-channel       gradual: a channel of the input of linear_fc1 grows
    aligned-swiglu        gradual: a channel of SwiGLU's output grows, and its two weights turn to the same direction
    inflated-qk           gradual: attention logits grow, because queries and keys do
    spike-batch           sudden: the tokens of a batch are replaced, its labels are not
    infinite-activation   sudden: one value of the input of linear_fc2 is infinite, in the first of these layers; of a
                          mixture, in its first expert with tokens

The channels grow by powers of two by which the weights of the linear shrink. In high precision no bit depends on it, so
that all that is lost is lost by the quantization, and a repair can be compared with a run without the fault. Only
emulated layers can have such a channel, since Transformer Engine computes the norm inside linear_fc1 and SwiGLU inside
a fused MLP; the other faults need only a call of the linear. A layer must be complete on every rank, and for
`aligned-swiglu` so must its master weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Optional

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megafp8.config.guarded_linears import is_of_routed_experts
from megafp8.config.precision_map import linears_with_statistics
from megafp8.config.schema import ModelConfig, PrecisionConfig
from megafp8.errors import NumericsError
from megafp8.mcore.modules import named_linears
from megafp8.training.extension import Extension, LoopState
from megafp8.training.run import Run
from megafp8.training.step import StepResult

OUTLIER_CHANNEL, ALIGNED_SWIGLU, INFLATED_QK = "outlier-channel", "aligned-swiglu", "inflated-qk"
SPIKE_BATCH, INFINITE_ACTIVATION = "spike-batch", "infinite-activation"
GRADUAL_FAULTS = (OUTLIER_CHANNEL, ALIGNED_SWIGLU, INFLATED_QK)
SUDDEN_FAULTS = (SPIKE_BATCH, INFINITE_ACTIVATION)
MLP_FAULTS = (OUTLIER_CHANNEL, ALIGNED_SWIGLU)  # gradual ones of MLPs through which all tokens pass
LINEARS = {
    OUTLIER_CHANNEL: "linear_fc1", ALIGNED_SWIGLU: "linear_fc2", INFLATED_QK: "linear_qkv",
    INFINITE_ACTIVATION: "linear_fc2",
}  # fmt: skip
"""Kind of a fault to the linear of a layer that has it; others need none."""
CHANNEL = 0
TURN = 0.1  # of the way to the direction of the other weight, with every step


@dataclass(frozen=True)
class Fault:
    """What is planted.

    Attributes:
        first_step: the first step with the fault, and the only one with a sudden fault.
        growth: factor by which a gradual fault grows in a step.
    """

    kind: str
    first_step: int = 1
    growth: float = 1.05


class PlantedFault(Extension):
    """Plants a fault. Its place is before the extensions that observe, whose hooks then come later."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def open(self, state: LoopState) -> None:
        self.layers = LayerFault(state.run, self.fault)

    def before_step(self, state: LoopState) -> None:
        self.layers.start(state.step + 1)
        state.needs_eager_step = True  # a replay calls no hooks

    def after_step(self, state: LoopState, result: StepResult) -> None:
        self.layers.end_step()

    def recover(self, state: LoopState, error: NumericsError) -> bool:
        self.layers.end_step()
        return False


def planted_linears(kind: str, model: ModelConfig, precision: PrecisionConfig) -> tuple[str, ...]:
    """Names of the linears that have a fault: the quantized ones, or all of a run in high precision.

    A gradual fault of an MLP is in those through which all tokens pass: a routed expert may have none in a step.
    """
    return tuple(
        name
        for name in linears_with_statistics(model, precision)
        if name.endswith(f".{LINEARS.get(kind)}") and not (kind in MLP_FAULTS and is_of_routed_experts(name))
    )


class LayerFault:
    """The fault in the layers of a run.

    Attributes:
        factor: by which a gradual fault has grown.
        is_active: whether a sudden fault is in this step.
        spoiled: the linear with an infinite value in this step; None before it is found.
    """

    def __init__(self, run: Run, fault: Fault):
        self.kind, self.first_step, self.growth = fault.kind, fault.first_step, fault.growth
        self.model, self.vocab_size = run.config.model, run.vocab_size
        self.chunks = unwrap_model(run.training_state.chunks)
        self.factor, self.is_active = 1.0, False
        self.spoiled: Optional[nn.Module] = None
        named = dict(pair for chunk in self.chunks for pair in named_linears(chunk))
        chosen = [name for name in planted_linears(self.kind, self.model, run.config.precision) if name in named]
        assert chosen or self.kind == SPIKE_BATCH, f"no linear of the model can have {self.kind}"
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
        if self.kind not in MLP_FAULTS or not num_steps:
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
