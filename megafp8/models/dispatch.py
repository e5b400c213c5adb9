"""Mixture-of-experts layers that send tokens to the ranks of their experts as FP8 codes (`--moe-dispatch-in-fp8`).

The exchange to the experts sends a byte a number and, for all experts together, one amax or scale each. Everything that
is summed stays in the dtype of the tokens: the way back, and in the backward pass both exchanges. With expert tensor
parallelism the numbers of the codes are gathered in the dtype of the tokens, after the exchange.

Codes travel where all experts of the layer quantize their input under one scale; otherwise the tokens do, as they do in
a phase of a run that is in high precision.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megafp8.quantization.prequantized import PrequantizedScale, codes_of_experts
from megafp8.recipes.base import OperandRule

Splits = Optional[list[int]]


class CodeDispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's alltoall dispatcher, which can send codes.

    Attributes:
        rule: by which tokens are quantized; None sends them as they are.
        quant_scales: FP32 [experts of this rank], of delayed scaling; None computes scales from the tokens.
        scales: of the tokens that arrived, [experts of this rank]; None if they arrived as they were.
        load: collects the bytes that arrive; None collects nothing.
    """

    tokens_per_expert: Any
    rule: Optional[OperandRule] = None
    quant_scales: Optional[Tensor] = None
    scales: Optional[PrequantizedScale] = None
    load: Optional[Any] = None

    def token_dispatch(self, permutated_local_input_tokens: Tensor, permuted_probs: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that arrive, or the numbers of their codes, and their scores."""
        tokens, itemsize = permutated_local_input_tokens, permutated_local_input_tokens.itemsize
        self.scales = None
        if self.rule is None:
            arrived, probs = super().token_dispatch(tokens, permuted_probs)
        else:
            # As in the method that this replaces: from here on the splits are numbers on the host.
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_ep_alltoall", self.tokens_per_expert)
            counts = self._rows_of_experts(tokens)
            # An expert has one scale, so that current scaling reduces the amaxes of all senders here. All ranks call
            # it, also those without tokens.
            codes, scales = codes_of_experts(tokens, counts, self.rule, self.tp_ep_group, self._all_quant_scales())
            first = self.local_expert_indices[0]
            # The scales of all experts are known on all ranks. This rank's experts are consecutive.
            self.scales = PrequantizedScale(*(each[first : first + self.num_local_experts] for each in scales))
            splits = [_numbers(self.output_splits), _numbers(self.input_splits)]
            arrived = _SendCodes.apply(tokens, codes, self.ep_group, *splits)
            # Scores are a number a token, and are sent as they are.
            probs = all_to_all(self.ep_group, permuted_probs, self.output_splits, self.input_splits)
            itemsize = codes.itemsize
        if self.load is not None and torch.is_grad_enabled():
            # What a rank sends to itself does not arrive from another one.
            sizes = _numbers(self.output_splits) or [len(tokens) // self.ep_size] * self.ep_size
            self.load.add_dispatched((len(arrived) - sizes[self.ep_group.rank()]) * tokens.shape[1] * itemsize)
        return arrived, probs

    def _rows_of_experts(self, tokens: Tensor) -> Tensor:
        """Rows that this rank sends to each expert, int64 [E]."""
        if self.drop_and_pad:
            # With a capacity all experts have the same number of rows, empty ones included.
            return torch.full((self.num_experts,), len(tokens) // self.num_experts, device=tokens.device)
        return self.routing_map.sum(dim=0)

    def _all_quant_scales(self) -> Optional[Tensor]:
        """The scales of delayed scaling of all experts, FP32 [E]."""
        if self.quant_scales is None:
            return None
        gathered = self.quant_scales.new_empty(self.num_experts)
        dist.all_gather_into_tensor(gathered, self.quant_scales, group=self.ep_group)
        return gathered


def _numbers(splits: Any) -> Splits:
    return None if splits is None else [int(size) for size in splits]


class _SendCodes(torch.autograd.Function):
    """Exchange codes, and in the backward pass gradients in the dtype of the tokens."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, codes: Tensor, group: dist.ProcessGroup, output_splits: Splits, input_splits: Splits
    ) -> Tensor:
        ctx.group, ctx.splits = group, (output_splits, input_splits)
        # gloo does not support FP8 dtypes
        return _exchange(codes.view(torch.uint8), group, output_splits, input_splits).view(codes.dtype).to(tokens.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        output_splits, input_splits = ctx.splits
        # Backward, what was received is sent: the splits change roles.
        return _exchange(grad.contiguous(), ctx.group, input_splits, output_splits), None, None, None, None


def _exchange(rows: Tensor, group: dist.ProcessGroup, output_splits: Splits, input_splits: Splits) -> Tensor:
    """Rows from all ranks."""
    received = rows.new_empty(len(rows) if output_splits is None else sum(output_splits), *rows.shape[1:])
    dist.all_to_all_single(received, rows, output_splits, input_splits, group=group)
    return received


class DispatchingLayer(MoELayer):
    """megatron-core's layer, whose alltoall dispatcher counts what arrives and may send codes.

    Args:
        sends_codes: whether codes travel where experts quantize their input.
    """

    def __init__(self, config: Any, *args: Any, sends_codes: bool = False, pg_collection: Any = None, **kwargs: Any):
        # The dispatcher below has to have the same groups as the base class.
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        super().__init__(config, *args, pg_collection=groups, **kwargs)
        self.sends_codes = sends_codes
        # The base class has built megatron-core's dispatcher, which this one replaces.
        if config.moe_token_dispatcher_type == "alltoall" and self.ep_group.size() > 1:
            self.token_dispatcher = CodeDispatcher(
                self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups
            )
            if self.use_shared_expert and self.shared_expert_overlap:
                self.token_dispatcher.set_shared_experts(self.shared_experts)

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send the tokens, or their codes where the experts quantize their input."""
        if self.sends_codes:
            # Asked in every pass: a phase in high precision has no rule, and sends tokens as they are.
            self.token_dispatcher.rule = self.experts.input_rule()
            self.token_dispatcher.quant_scales = self.experts.input_scales()
        return super().dispatch(hidden_states, probs)

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        """The output of the experts for what arrived."""
        if self.sends_codes:
            self.experts.prequantized = self.token_dispatcher.scales
        return super().routed_experts_compute(hidden_states, probs)
