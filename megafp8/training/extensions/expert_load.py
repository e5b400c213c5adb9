"""Records the load of the experts in each logged step, and reports experts without tokens and collapsed routers."""

from __future__ import annotations

import math
from typing import Optional, Union

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megafp8.config import multi_token
from megafp8.config.mixture import expert_tensor_size, is_mixture
from megafp8.metrics.expert_load import COLLAPSE, IDLE, NUM_LASTING, ExpertRecord, layer_load, load_findings
from megafp8.metrics.health_advice import advice, for_collapsed_router, for_idle_experts
from megafp8.metrics.records import EventRecord
from megafp8.models.dispatch import CodeDispatcher
from megafp8.models.experts import PaddedExperts
from megafp8.models.grouped_moe import GroupedExperts
from megafp8.training.extension import Extension, LoopState
from megafp8.training.run import advice_case
from megafp8.training.step import StepResult

NUM_SUMS = 5
"""Of a layer, besides the tokens of each expert."""
REMEDIES = {COLLAPSE: for_collapsed_router, IDLE: for_idle_experts}


class LoadCollector:
    """Sums the assignments of one router, and the rows of its experts, over the microbatches of a step.

    Args:
        num_copies: ranks that multiply the same rows, with parts of the experts' weights.

    Attributes:
        sums: FP64 [experts + 5]: tokens that the router chose for each expert, assignments that a capacity left, bytes
            that arrived, rows that experts multiply, tokens, and entropy in nats.
    """

    def __init__(self, num_experts: int, device: torch.device, num_copies: int = 1):
        self.sums = torch.zeros(num_experts + NUM_SUMS, dtype=torch.float64, device=device)
        self.num_copies = num_copies

    @torch.no_grad()
    def add(self, logits: Tensor, chosen: Tensor, routing_map: Tensor) -> None:
        """Add a microbatch.

        Args:
            logits: [tokens, experts].
            chosen: the router's choice, bool [tokens, experts].
            routing_map: what experts multiply, bool [tokens, experts]: without what a capacity drops, and with the
                tokens that only fill it.
        """
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        self.sums[:-NUM_SUMS] += chosen.sum(dim=0)
        self.sums[-5] += (chosen & routing_map).sum()
        self.sums[-2] += len(logits)
        self.sums[-1] -= (log_probs.exp() * log_probs).sum()

    @torch.no_grad()
    def add_rows(self, num_rows: Union[int, Tensor]) -> None:
        """Add the rows that the experts of this rank multiply in a microbatch, padding included."""
        self.sums[-3] += num_rows / self.num_copies

    def add_dispatched(self, num_bytes: int) -> None:
        """Add the bytes of tokens that this rank received from other expert-parallel ranks in a microbatch."""
        self.sums[-4] += num_bytes


class ExpertLoads(Extension):
    """Does nothing for a dense model."""

    def open(self, state: LoopState) -> None:
        run = state.run
        is_active = is_mixture(run.config.model)
        modules = [module for chunk in run.trainee.chunks for module in chunk.modules()] if is_active else []
        self.is_active, self.layers = is_active, [module for module in modules if isinstance(module, MoELayer)]
        self.records: list[ExpertRecord] = []
        self.reported: set[tuple[str, str]] = set()  # layer and fault

    def before_step(self, state: LoopState) -> None:
        """Collect in a step that is logged."""
        step, num_experts = state.step + 1, state.run.config.model.num_experts
        interval = state.run.config.logging.log_interval
        is_logged = step % interval == 0 or step in (state.first_step, state.total_steps)
        num_copies = expert_tensor_size(state.run.config.parallel)
        for layer in self.layers:
            assert num_experts is not None
            load = LoadCollector(num_experts, state.run.platform.device, num_copies) if is_logged else None
            layer.router.load = load
            if isinstance(layer.experts, (PaddedExperts, GroupedExperts)):
                layer.experts.load = load
            if isinstance(layer.token_dispatcher, CodeDispatcher):
                layer.token_dispatcher.load = load
        self.is_logged = self.is_active and is_logged

    def after_step(self, state: LoopState, result: StepResult) -> None:
        """Write the record of a logged step, and what it shows to be wrong, once for each layer and fault."""
        if not self.is_logged:
            return
        model = state.run.config.model
        record = self.reduce(state)
        self.records = [*self.records, record][-NUM_LASTING:]
        state.sinks.write(record)
        assert model.num_experts is not None
        for layer, fault, what in load_findings(self.records, model.num_experts, model.moe_router_topk):
            if (layer, fault) not in self.reported:
                self.reported.add((layer, fault))
                remedies = advice(advice_case(state.run), REMEDIES[fault])
                detail = f"layer {layer}: {fault}: {what}" + (f"; try: {remedies}" if remedies else "")
                state.sinks.write(EventRecord(step=state.step, name="health", detail=detail))

    def reduce(self, state: LoopState) -> ExpertRecord:
        """The load over all ranks; all ranks call it."""
        model, device = state.run.config.model, state.run.platform.device
        assert model.num_layers is not None and model.num_experts is not None
        num_layers = model.num_layers + multi_token.num_depths(model)
        sums = torch.zeros(num_layers, model.num_experts + NUM_SUMS, dtype=torch.float64, device=device)
        bounds = torch.full((num_layers, 2), -math.inf, dtype=torch.float64, device=device)  # -min, max
        for router in (layer.router for layer in self.layers):
            layer = router.layer_number - 1
            if router.load is not None:
                sums[layer] += router.load.sums
            if router.expert_bias is not None:
                bounds[layer] = torch.stack([-router.expert_bias.min(), router.expert_bias.max()])
        dist.all_reduce(sums)
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        layers = {}
        for layer, (row, bound) in enumerate(zip(sums.tolist(), bounds.tolist(), strict=True)):
            *counts, num_kept, num_bytes, num_rows, num_tokens, entropy = row
            bias: Optional[tuple[float, float]] = None if bound[1] == -math.inf else (-bound[0], bound[1])
            if num_tokens:
                layers[str(layer)] = layer_load(
                    counts, model.moe_router_topk, num_tokens, entropy, num_kept, bias, num_rows or None,
                    int(num_bytes) or None,
                )  # fmt: skip
        return ExpertRecord(step=state.step, layers=layers)
