"""Records the load of the experts in each logged step, and reports experts without tokens and collapsed routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megafp8.config import multi_token
from megafp8.config.mixture import expert_tensor_size, is_mixture
from megafp8.config.schema import RunConfig
from megafp8.metrics.expert_load import IDLE, NUM_LASTING, ExpertRecord, layer_load, load_warnings
from megafp8.metrics.health_suggestions import for_collapsed_router, more_balance
from megafp8.metrics.records import EventRecord, Record
from megafp8.metrics.timers import RECORDS
from megafp8.models.dispatch import CodeDispatcher
from megafp8.models.experts import PaddedExperts
from megafp8.models.grouped_moe import GroupedExperts
from megafp8.training.extension import Extension, LoopState
from megafp8.training.run import Run
from megafp8.training.step import StepResult
from megafp8.training.step_parts import RepeatedStep

NUM_SUMS = 8
"""Of a layer, besides the tokens of each expert."""


class LoadCollector:
    """Sums the assignments of one router, and the rows of its experts, over the microbatches of a step.

    Args:
        sums: FP64 [experts + 8], to which it adds: tokens that the router chose for each expert, assignments that a
            capacity left, bytes that arrived, rows that experts multiply, tokens, and entropy in nats. The last three
            are those of the bias (`ExpertLoads.reduce`).
        num_copies: ranks that multiply the same rows, with parts of the experts' weights.
    """

    def __init__(self, sums: Tensor, num_copies: int = 1):
        self.counts = sums[:-NUM_SUMS]
        self.num_remaining, self.num_bytes, self.num_rows, self.num_tokens, self.entropy = sums[-NUM_SUMS:-3].unbind()
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
        counts = chosen.sum(dim=0)
        self.counts.add_(counts)
        self.num_remaining.add_(counts.sum() if chosen is routing_map else (chosen & routing_map).sum())
        self.num_tokens.add_(len(logits))
        log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        self.entropy.sub_(log_probs.exp().mul_(log_probs).sum())

    @torch.no_grad()
    def add_rows(self, num_rows: Union[int, Tensor]) -> None:
        """Add the rows that the experts of this rank multiply in a microbatch, padding included."""
        self.num_rows.add_(num_rows / self.num_copies)

    def add_dispatched(self, num_bytes: Union[int, Tensor]) -> None:
        """Add the bytes of tokens that this rank received from other expert-parallel ranks in a microbatch."""
        self.num_bytes.add_(num_bytes)


class PendingValues:
    """A tensor's values as they are now, on their way to the host, which does not wait for the device until it asks."""

    def __init__(self, tensor: Tensor):
        self._values = tensor.to("cpu", copy=True, non_blocking=True)  # into pinned memory
        self._is_copied = torch.cuda.Event() if tensor.is_cuda else None
        if self._is_copied is not None:
            self._is_copied.record()

    def wait(self) -> Tensor:
        """The values, when they are there."""
        if self._is_copied is not None:
            self._is_copied.synchronize()
        return self._values


class ExpertLoads(Extension):
    """Does nothing for a dense model.

    The sums of all layers are one tensor, in which each rank fills the rows of its layers. One reduction and one copy
    bring it to rank 0, which makes the record while the device computes the next step. A CUDA graph has the kernels of
    its capture: in a run with graphs every step collects, in the same tensor, and a logged step is recorded.
    """

    span = RECORDS

    def open(self, state: LoopState) -> None:
        config, device = state.run.config, state.run.platform.device
        self.layers: list[Any] = []
        self.is_logged = False
        if not is_mixture(config.model):
            return
        modules = (module for chunk in state.run.training_state.chunks for module in chunk.modules())
        self.layers = [module for module in modules if isinstance(module, MoELayer)]
        self.records: list[ExpertRecord] = []
        self.reported: set[tuple[str, str]] = set()  # layer and kind
        model = config.model
        assert model.num_layers is not None and model.num_experts is not None
        num_layers = model.num_layers + multi_token.num_depths(model)
        self.sums = torch.zeros(num_layers, model.num_experts + NUM_SUMS, dtype=torch.float64, device=device)
        for part in state.run.parts:
            if isinstance(part, RepeatedStep):
                part.counted.append(self.sums)
        rows, num_copies = self.sums.unbind(), expert_tensor_size(config.parallel)
        routers = [layer.router for layer in self.layers]
        self.loads = [LoadCollector(rows[router.layer_number - 1], num_copies) for router in routers]
        self.biased = [router for router in routers if router.expert_bias is not None]
        self.biased_rows = torch.tensor([router.layer_number - 1 for router in self.biased], device=device)

    def before_step(self, state: LoopState) -> None:
        """Collect in a step that is logged."""
        if not is_mixture(state.run.config.model):
            return
        step, interval = state.step + 1, state.run.config.logging.log_interval
        self.is_logged = step % interval == 0 or step in (state.first_step, state.total_steps)
        collects = self.is_logged or state.run.graph.has_graphs
        self.sums.zero_()
        for layer, collector in zip(self.layers, self.loads, strict=True):
            load = collector if collects else None
            layer.router.load = load
            if isinstance(layer.experts, (PaddedExperts, GroupedExperts)):
                layer.experts.load = load
            if isinstance(layer.token_dispatcher, CodeDispatcher):
                layer.token_dispatcher.load = load

    def after_step(self, state: LoopState, result: StepResult) -> None:
        """Write the record of a logged step, and what it shows to be wrong, once for each layer and kind."""
        if not self.is_logged:
            return
        self.reduce()
        if state.run.rank_position.rank != 0:
            return
        step, sums = state.step, PendingValues(self.sums)

        def make() -> list[Record]:
            with state.run.timer.span(None):  # the device may still be at the update
                rows = sums.wait().tolist()
            return self.evaluate(state.run, expert_record(state.run.config, step, rows))

        state.sinks.defer(make)

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the sums over all ranks; all ranks call it.

        The ranks of a layer have the same biases. The sums of their smallest and largest ones, over the number of the
        ranks, are exact in FP64.
        """
        if self.biased:
            low, high = torch.aminmax(torch.stack([router.expert_bias for router in self.biased]), dim=1)
            self.sums[self.biased_rows, -3:] = torch.stack([low, high, torch.ones_like(low)], dim=1).double()
        dist.all_reduce(self.sums)

    def evaluate(self, run: Run, record: ExpertRecord) -> list[Record]:
        """The record, and events about what it shows to be wrong."""
        model, optimizer, training = run.config.model, run.config.optimizer, run.config.training
        assert model.num_experts is not None
        self.records = [*self.records, record][-NUM_LASTING:]
        written: list[Record] = [record]
        for layer, kind, what in load_warnings(self.records, model.num_experts, model.moe_router_topk):
            if (layer, kind) not in self.reported:
                self.reported.add((layer, kind))
                found = more_balance(model) if kind == IDLE else for_collapsed_router(model, optimizer, training)
                suggestions = "; ".join(found)
                detail = f"layer {layer}: {kind}: {what}" + (f"; try: {suggestions}" if suggestions else "")
                written.append(EventRecord(step=record.step, name="health", detail=detail))
        return written


def expert_record(config: RunConfig, step: int, rows: Sequence[Sequence[float]]) -> ExpertRecord:
    """The record of a step from the sums over all ranks, by layer."""
    layers = {}
    for layer, row in enumerate(rows):
        *counts, num_remaining, num_bytes, num_rows, num_tokens, entropy, low, high, num_biased = row
        if num_tokens:
            layers[str(layer)] = layer_load(
                counts, config.model.moe_router_topk, num_tokens, entropy, num_remaining,
                (low / num_biased, high / num_biased) if num_biased else None, num_rows or None, int(num_bytes) or None,
            )  # fmt: skip
    return ExpertRecord(step=step, layers=layers)
