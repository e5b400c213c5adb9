"""A stand-in for the package deep_ep on CPU ranks: what megatron-core's flex dispatcher calls, over torch.distributed.

It returns what the real libraries document, with their shapes: DeepEP's `Buffer` sends a token once to each rank, and
HybridEP's `HybridEPBuffer` once to each expert, in order of the experts. Sums are in FP32.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.models.experts import padded_positions

FUNCTIONS = ("fused_dispatch", "fused_combine", "set_deepep_num_sms", "hybrid_ep_dispatch", "hybrid_ep_combine")


def install() -> None:
    """Let megatron-core import the stand-in. For a forked rank: nothing is undone."""
    package, utils = types.ModuleType("deep_ep"), types.ModuleType("deep_ep.utils")
    package.__dict__.update(Buffer=Buffer, HybridEPBuffer=HybridEPBuffer, utils=utils)
    utils.__dict__.update(EventHandle=Event, EventOverlap=Event)
    sys.modules.update({"deep_ep": package, "deep_ep.utils": utils})
    fused = importlib.reload(importlib.import_module("megatron.core.transformer.moe.fused_a2a"))
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    for name in FUNCTIONS:
        setattr(dispatcher, name, getattr(fused, name))


class Event:
    """There is nothing to wait for."""

    def __init__(self, event: Any = None):
        pass

    def current_stream_wait(self) -> None:
        """Return at once."""


@dataclass(frozen=True)
class Route:
    """Rows of this rank that are sent, ordered by the ranks that receive them.

    Attributes:
        rows: int64 [sum(sent)].
        num_rows: of this rank, before the exchange.
    """

    group: dist.ProcessGroup
    rows: Tensor
    sent: list[int]
    received: list[int]
    num_rows: int

    @classmethod
    def of_rows(cls, group: dist.ProcessGroup, rows_of_ranks: Sequence[Tensor], num_rows: int) -> Route:
        """The route of rows for each rank."""
        sent = torch.tensor([len(rows) for rows in rows_of_ranks])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return cls(group, torch.cat(list(rows_of_ranks)), sent.tolist(), received.tolist(), num_rows)

    def exchange(self, tensor: Tensor) -> Tensor:
        """What arrives of [sum(sent), ...]: [sum(received), ...]."""
        arrived = tensor.new_empty(sum(self.received), *tensor.shape[1:])
        dist.all_to_all_single(arrived, tensor.contiguous(), self.received, self.sent, group=self.group)
        return arrived

    def send_back(self, tensor: Tensor) -> Tensor:
        """Of [sum(received), ...], the rows of this rank: [sum(sent), ...]."""
        returned = tensor.new_empty(sum(self.sent), *tensor.shape[1:])
        dist.all_to_all_single(returned, tensor.contiguous(), self.sent, self.received, group=self.group)
        return returned

    def combine(self, tensor: Tensor) -> Tensor:
        """The sums of what returns to each row of this rank: [num_rows, ...]."""
        returned = self.send_back(tensor).float()
        sums = returned.new_zeros(self.num_rows, *tensor.shape[1:]).index_add(0, self.rows, returned)
        return sums.to(tensor.dtype)


class Buffer:
    """DeepEP's."""

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int):
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        """Sizes of buffers, which are not needed."""
        return types.SimpleNamespace(
            get_nvl_buffer_size_hint=lambda num_bytes, ranks: 0, get_rdma_buffer_size_hint=lambda num_bytes, ranks: 0
        )

    get_combine_config = get_dispatch_config

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        """Do nothing: ranks of a CPU have no SMs."""

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **events: Any) -> tuple[Any, ...]:
        """Counts by rank, by node and by expert, and which ranks get a token; only the number of experts is read."""
        return None, None, torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts), None, Event()

    def dispatch(
        self,
        x: Tensor,
        handle: Optional[Route] = None,
        topk_idx: Optional[Tensor] = None,
        topk_weights: Optional[Tensor] = None,
        num_tokens_per_expert: Optional[Tensor] = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Tokens, local experts (-1: of another rank), scores, counts by local expert, and the route back."""
        if handle is not None:
            return handle.exchange(x[handle.rows]), None, None, None, None, Event()
        assert topk_idx is not None and topk_weights is not None and num_tokens_per_expert is not None
        assert topk_weights.dtype == torch.float32
        size = self.group.size()
        local = len(num_tokens_per_expert) // size
        owner = topk_idx.div(local, rounding_mode="floor")  # -1 stays -1
        route = Route.of_rows(self.group, [(owner == rank).any(1).nonzero()[:, 0] for rank in range(size)], len(x))
        rank = torch.arange(size).repeat_interleave(torch.tensor(route.sent))[:, None]
        is_own = owner[route.rows] == rank
        experts = route.exchange(torch.where(is_own, topk_idx[route.rows] % local, -1))
        scores = route.exchange(torch.where(is_own, topk_weights[route.rows], 0))
        counts = torch.bincount(experts[experts >= 0], minlength=local).tolist()
        return route.exchange(x[route.rows]), experts, scores, counts, route, Event()

    def combine(
        self, x: Tensor, handle: Route, topk_weights: Optional[Tensor] = None, **options: Any
    ) -> tuple[Any, ...]:
        """The sums of each token over the ranks that got it, and those of its scores."""
        return handle.combine(x), None if topk_weights is None else handle.combine(topk_weights), Event()


@dataclass(frozen=True)
class Permutation:
    """A route by pairs of expert and token, and the order in which rows are padded for the experts of this rank."""

    route: Route
    experts: Tensor
    positions: Tensor
    num_permuted: int

    def permuted(self, rows: Tensor) -> Tensor:
        """What arrives of [pairs, ...], padded with zeros."""
        arrived = self.route.exchange(rows)
        return arrived.new_zeros(self.num_permuted, *rows.shape[1:]).index_copy(0, self.positions, arrived)


class HybridEPBuffer:
    """HybridEP's."""

    def __init__(self, group: dist.ProcessGroup, num_local_experts: int, **sizes: Any):
        self.group, self.num_local_experts = group, num_local_experts

    def dispatch_with_permute(
        self,
        hidden: Tensor,
        routing_map: Optional[Tensor] = None,
        probs: Optional[Tensor] = None,
        pad_multiple: Optional[int] = None,
        handle: Optional[Permutation] = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Tokens in order of the local experts, scores, no scales, rows of each local expert, and the way back."""
        if handle is not None:
            return handle.permuted(hidden[handle.route.rows]), None, None, None, handle
        assert routing_map is not None and probs is not None and probs.dtype == torch.float32
        local = self.num_local_experts
        experts, tokens = routing_map.T.nonzero().unbind(1)
        rows_of_ranks = [tokens[experts // local == rank] for rank in range(self.group.size())]
        route = Route.of_rows(self.group, rows_of_ranks, len(hidden))
        own = route.exchange(experts % local)
        counts = torch.bincount(own, minlength=local)
        multiple = pad_multiple or 1
        padded = (-(-counts // multiple) * multiple).tolist()
        row_positions = padded_positions(counts.tolist(), padded, counts.device)
        positions = row_positions[own.argsort(stable=True).argsort()]
        handle = Permutation(route, experts, positions, sum(padded))
        scores = handle.permuted(probs[tokens, experts])
        return handle.permuted(hidden[tokens]), scores, None, torch.tensor(padded), handle

    def combine_with_unpermute(
        self, hidden: Tensor, handle: Permutation, probs: Optional[Tensor] = None, **options: Any
    ) -> tuple[Tensor, Optional[Tensor]]:
        """The sums of each token over its experts, and the scores by token and expert."""
        route, scores = handle.route, None
        if probs is not None:
            scores = probs.new_zeros(route.num_rows, self.num_local_experts * self.group.size())
            scores[route.rows, handle.experts] = route.send_back(probs[handle.positions])
        return route.combine(hidden[handle.positions]), scores
