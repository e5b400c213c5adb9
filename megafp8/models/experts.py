"""Specs of mixture-of-experts layers with emulated or plain linears, and experts that pad their tokens.

The experts are megatron-core's `SequentialMLP`: one MLP for each expert of a rank, one after the other. Each linear of
each expert quantizes its own weight and its own tokens, as Transformer Engine's `GroupedLinear` does with a quantizer
for each GEMM. In a checkpoint both have the keys `mlp.experts.experts.linear_fc1.weight` with a dimension of experts,
so that either can load the other's. An expert without tokens multiplies empty operands, and delayed scaling leaves
its scales unchanged.

Tokens of an expert are padded with zeros to the multiple that the GEMMs of the recipe need, as Transformer Engine pads
them. Zeros change no amax and no gradient, and their outputs are cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional, Union

import torch
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megafp8.config.grouped_experts import shares_input_codes
from megafp8.config.precision_map import EXPERTS, SHARED_EXPERTS
from megafp8.mcore.mixture_patches import define_router_gemm
from megafp8.models.dispatch import DispatchingLayer
from megafp8.models.router import Router
from megafp8.quantization.nvfp4 import RoundingNoise
from megafp8.quantization.prequantized import PrequantizedScale
from megafp8.recipes.base import Gemm, Operand, OperandRule, ScaleRule
from megafp8.utils.integers import round_up

Linear = Union[type, ModuleSpec]


class PaddedExperts(SequentialMLP):
    """Experts of one rank, whose tokens are padded with zeros.

    Args:
        alignment: the number of rows of each expert is padded to a multiple of this.
        noise_name: seeds the random numbers of stochastic rounding; unique to the layer and the run's seed.

    Attributes:
        load: collects the numbers of rows; None collects nothing.
        prequantized: the scales [experts] of the next tokens, which arrived as codes; None: they did not.
    """

    load: Optional[Any] = None
    prequantized: Optional[PrequantizedScale] = None

    def __init__(self, *args: Any, alignment: int, noise_name: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.alignment = alignment
        # Numbered over all ranks: experts of different ranks draw different noise.
        first = self.ep_group.rank() * self.num_local_experts
        for index, expert in enumerate(self.local_experts):
            if self.config.add_bias_linear:
                # An expert with biases is on one rank. The sum over one rank is a view of its input, to which
                # megatron-core cannot add the bias in place; with this it leaves the sum out.
                expert.linear_fc2.explicit_expert_comm = True
            for name, module in expert.named_modules():
                if isinstance(module, RoundingNoise):
                    module.name = f"{noise_name}|expert {first + index}|{name}|{self.dp_group.rank()}"

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Optional[Tensor]]:
        """The outputs of the experts for their tokens.

        Args:
            permuted_local_hidden_states: [T, H], ordered by experts.
            tokens_per_expert: [experts of this rank].
            permuted_probs: [T], factors of the outputs.

        Returns:
            [T, H], and None for the bias, which is added already.
        """
        # Set in every pass, also to None: scales of the last microbatch must not be used again.
        for index, expert in enumerate(self.local_experts):
            scales = self.prequantized
            expert.linear_fc1.prequantized = (
                None if scales is None else PrequantizedScale(*(each[index] for each in scales))
            )
        # The host waits for the sizes. With several experts `SequentialMLP` splits by them, and waits as well.
        counts = tokens_per_expert.tolist()
        padded = [round_up(count, self.alignment) for count in counts]
        if self.load is not None and torch.is_grad_enabled():
            self.load.add_rows(sum(padded))
        if padded == counts:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        rows = padded_positions(counts, padded, permuted_probs.device)
        inputs, probs = (
            # `index_copy` is differentiable; padding rows are zeros and have no gradient.
            tensor.new_zeros(sum(padded), *tensor.shape[1:]).index_copy(0, rows, tensor)
            for tensor in (permuted_local_hidden_states, permuted_probs)
        )
        # On the CPU, where `SequentialMLP` reads them without waiting.
        outputs, _ = super().forward(inputs, torch.tensor(padded), probs)
        return outputs.index_select(0, rows), None

    def input_rule(self) -> Optional[OperandRule]:
        """The rule by which the experts quantize their tokens for all GEMMs; None in a phase in high precision."""
        # The linears of a layer's experts are built from one spec and share a recipe.
        linear = self.local_experts[0].linear_fc1
        recipe = getattr(linear, "recipe", None)
        if recipe is None or not linear.is_quantizing:
            return None
        assert shares_input_codes(recipe)
        return recipe.rule(Operand.INPUT, Gemm.FPROP)

    def input_scales(self) -> Optional[Tensor]:
        """The scales of the tokens under delayed scaling, FP32 [experts]; None without it."""
        rule = self.input_rule()
        if rule is None or rule.scale_rule is not ScaleRule.DELAYED:
            return None
        return torch.stack([expert.linear_fc1.quantizer_state.next_input_scale() for expert in self.local_experts])


def padded_positions(counts: list[int], padded: list[int], device: torch.device) -> Tensor:
    """Where each row lies once every group of rows is padded: int64 [sum(counts)].

    Example:
        >>> padded_positions([2, 1], [4, 4], torch.device("cpu")).tolist()
        [0, 1, 4]
    """
    # By how many rows each group moves: all padding before it.
    starts = torch.tensor([0, *padded[:-1]]).cumsum(0) - torch.tensor([0, *counts[:-1]]).cumsum(0)
    rows = torch.arange(sum(counts)) + starts.repeat_interleave(torch.tensor(counts))
    return rows.to(device)


def mixture_spec(
    linear: Callable[[str], Linear], alignment: int, noise_name: str, sends_codes: bool = False
) -> ModuleSpec:
    """Spec of a layer's experts in place of its MLP.

    Args:
        linear: the linear of a name of `precision_map.layer_linears`.
        alignment: see `PaddedExperts`.
        noise_name: see `PaddedExperts`.
        sends_codes: see `DispatchingLayer`.
    """
    define_router_gemm()
    experts = ModuleSpec(
        module=PaddedExperts,
        params={"alignment": alignment, "noise_name": noise_name},
        submodules=mlp_linears(linear, EXPERTS),
    )
    shared = ModuleSpec(module=SharedExpertMLP, submodules=mlp_linears(linear, SHARED_EXPERTS))
    return ModuleSpec(
        module=DispatchingLayer,
        params={"sends_codes": sends_codes},
        submodules=MoESubmodules(experts=experts, shared_experts=shared, router=Router),
    )


def mlp_linears(linear: Callable[[str], Linear], kind: str) -> MLPSubmodules:
    """The linears of experts of one kind."""
    return MLPSubmodules(linear_fc1=linear(f"{kind}linear_fc1"), linear_fc2=linear(f"{kind}linear_fc2"))
