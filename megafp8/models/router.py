"""megatron-core's router with losses whose strength does not depend on the layout.

Gradients are divided by the number of tokens of the global batch at the end of a step. An auxiliary loss is therefore
multiplied by the tokens of the microbatch on all ranks that share it, which megatron-core 0.16 does not
(`mcore/router.py`).
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    save_to_aux_losses_tracker,
    topk_routing_with_score_function,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megafp8.mcore.router import counted_tokens

HAS_FP32_RESULTS = "dtype" in torch.ops.aten.mm.overloads()
"""Whether this version of torch multiplies BF16 to FP32."""


class Router(TopKRouter):
    """Selects the experts of each token.

    Shapes: input [S, B, H] of this rank; scores and map [S * B, experts].
    Numerics: logits in `moe_router_dtype`; softmax, sigmoid and losses in FP32.

    Attributes:
        load: collects statistics of the assignment; None collects nothing.
    """

    layer_number: int
    expert_bias: Optional[Tensor]
    load: Optional[Any] = None

    def gating(self, input: Tensor) -> Tensor:
        """Logits [S, B, experts] of tokens [S, B, H]."""
        has_tensor_cores = input.is_cuda and self.weight.is_cuda and input.dtype == self.weight.dtype == torch.bfloat16
        if HAS_FP32_RESULTS and has_tensor_cores and self.config.moe_router_dtype == "fp32" and self.bias is None:
            return GatingInFP32.apply(input, self.weight)
        return super().gating(input)

    def routing(self, logits: Tensor, padding_mask: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """Scores and map of the tokens; what a token's score is multiplied with is 0 for dropped tokens."""
        probs, routing_map = super().routing(logits, padding_mask)
        if self.load is not None and torch.is_grad_enabled():
            flat = logits.detach().view(-1, logits.shape[-1])
            has_capacity = self.config.moe_expert_capacity_factor is not None
            self.load.add(flat, self.chosen_experts(flat) if has_capacity else routing_map, routing_map)
        return probs, routing_map

    def chosen_experts(self, logits: Tensor) -> Tensor:
        """The selection before a capacity drops tokens, which megatron-core does not return.

        Args:
            logits: [tokens, experts], without gradient.

        Returns:
            Bool [tokens, experts].
        """
        return topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=self.config.moe_router_pre_softmax,
            num_groups=self.config.moe_router_num_groups,
            group_topk=self.config.moe_router_group_topk,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            fused=self.config.moe_router_fusion,
        )[1]

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Add an auxiliary loss to the gradient of the scores.

        Args:
            activation: scores [tokens of this rank, experts].
            aux_loss: this rank's part of the loss; the ranks of a microbatch have its sum.
        """
        kwargs["valid_token_count"] = counted_tokens(activation.shape[0], self.tp_cp_group)
        return super().attach_and_log_load_balancing_loss(activation, aux_loss_coeff, aux_loss, *args, **kwargs)

    def apply_z_loss(self, logits: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        """Add the z-loss to the gradient of the logits [tokens of this rank, experts]."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not self.training or not torch.is_grad_enabled():
            return logits
        ranks = self.tp_cp_group.size()
        loss = z_loss_func(logits, coefficient / ranks, padding_mask=padding_mask)
        logits = MoEAuxLossAutoScaler.apply(logits, loss * (logits.shape[0] * ranks))
        num_layers = self.config.num_layers + (self.config.mtp_num_layers or 0)
        save_to_aux_losses_tracker("z_loss", loss * ranks / coefficient, self.layer_number, num_layers)
        return logits


class GatingInFP32(torch.autograd.Function):
    """Logits [..., E] of BF16 tokens [..., H] and BF16 weights [E, H], in FP32.

    megatron-core multiplies in FP32, without tensor cores: 15 of 488 ms of a step with 128 experts on an H200. They
    multiply BF16 numbers exactly, and add in FP32. The logits' gradient has 24 bits: it is the sum of three BF16
    numbers.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return torch.mm(tokens.flatten(0, -2), weight.t(), out_dtype=torch.float32).view(*tokens.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        tokens, weight = ctx.saved_tensors
        parts = bf16_parts(grad.flatten(0, -2))
        of_tokens = parts @ weight.repeat(NUM_PARTS, 1)
        of_weight = torch.mm(parts.t(), tokens.flatten(0, -2), out_dtype=torch.float32)
        return of_tokens.view(tokens.shape), of_weight.view(NUM_PARTS, *weight.shape).sum(0).to(weight.dtype)


NUM_PARTS = 3


def bf16_parts(values: Tensor) -> Tensor:
    """FP32 [T, E] as BF16 [T, 3 E], whose three parts have the values as their sum."""
    parts = []
    for _ in range(NUM_PARTS):
        parts.append(values.bfloat16())
        values = values - parts[-1]
    return torch.cat(parts, 1)


class ExpertBiasSnapshot:
    """A copy of the biases of all experts on this rank, restored after a skipped update.

    megatron-core changes the biases with the reduction of the gradients, before it is known whether they are finite.

    Args:
        chunks: the model.
    """

    def __init__(self, chunks: list[Any]):
        routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]
        self._biases = [router.expert_bias for router in routers if router.expert_bias is not None]
        self._copies = [torch.empty_like(bias) for bias in self._biases]

    @torch.no_grad()
    def save(self) -> None:
        """Copy the biases, before a step."""
        for copy, bias in zip(self._copies, self._biases, strict=True):
            copy.copy_(bias)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies back."""
        for copy, bias in zip(self._copies, self._biases, strict=True):
            bias.copy_(copy)
