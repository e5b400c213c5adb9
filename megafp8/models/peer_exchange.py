"""The exchange of tokens between expert-parallel ranks whose GPUs reach each other's memory.

    router -> rows and scores into the memory of the experts' ranks -> barrier -> the experts of one rank
           -> their sums of each token's rows -> barrier -> each token adds its ranks' sums, in FP32

and backward likewise: the gradients of the sums are sent as rows were, and those of the rows are added as sums were. A
token is sent once to each rank that has an expert of it, however many it has there.

A buffer has a row for each token of all ranks, at an address that follows from rank and token. So no number of tokens
is exchanged, and no token is left out. All layers share the buffers: what arrives is read before the next barrier.

The experts of a rank have a row for each expert of a token, and how many these are depends on the routing
(`graph_room.py`).

Two barriers for each pair of `send` and `add` suffice. Rows are overwritten by the next `send`, whose sender has passed
the barrier of `add`, which the reader entered after it had read them. Sums are overwritten by the next `add`, after the
barrier of `send`, which the reader entered after it had read them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.config.mixture import PEER_ROOM
from megafp8.kernels.routed_rows import TILE
from megafp8.models.graph_room import GraphRoom
from megafp8.utils.integers import round_up

NO_EXPERT = -1.0
"""In place of the score of an expert that a token does not have. Scores are not negative."""


def load_room(device: torch.device) -> GraphRoom:
    """Rows for the load of a rank's experts (`routed_rows.Room`), in complete tiles."""
    return GraphRoom(device, PEER_ROOM, lambda rows: max(TILE, round_up(rows, TILE)))


class Exchange:
    """The exchange of the ranks of a group, as every device has it: by collectives.

    It stands in for `PeerExchange` where there is no GPU, with the same rows at the same places.

    Args:
        num_experts: of a rank.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int, device: torch.device):
        self.group, self.num_experts = group, num_experts
        self.size, self.rank = group.size(), group.rank()
        self.room = load_room(device)

    def send(self, rows: Tensor, scores: Tensor, sends_scores: bool) -> tuple[Tensor, Optional[Tensor]]:
        """Send rows to the ranks that have an expert of their token.

        Args:
            rows: [T, W], contiguous; T is the same on all ranks.
            scores: FP32 [T, E of all ranks]; `NO_EXPERT` where a token does not have the expert.

        Returns:
            What arrived, valid until the next call: rows [ranks x T, W], undefined for tokens without an expert on this
            rank, and, if sent, scores [ranks x T, E of this rank].
        """
        parts = scores.view(-1, self.size, self.num_experts)
        is_sent = (parts != NO_EXPERT).any(-1).t()[..., None]  # [ranks, T, 1]
        # NaN where nothing is sent: whoever reads it shows.
        arrived = self._all_to_all(torch.where(is_sent, rows[None], float("nan")))
        arrived_scores = self._all_to_all(parts.transpose(0, 1)) if sends_scores else None
        return arrived.flatten(0, 1), None if arrived_scores is None else arrived_scores.flatten(0, 1)

    def add(self, sums: Tensor, scores: Tensor, values: Optional[Tensor]) -> tuple[Tensor, Optional[Tensor]]:
        """Add the sums of a token's rows over the ranks that have an expert of it.

        Args:
            sums: [ranks x T, W].
            scores: of this rank's tokens, as for `send`.
            values: FP32 [ranks x T, E of this rank], to be returned to the tokens' ranks; None: there are none.

        Returns:
            [T, W], and the values [T, E of all ranks].
        """
        parts = scores.view(-1, self.size, self.num_experts)
        is_read = (parts != NO_EXPERT).any(-1).t()[..., None]
        returned = self._all_to_all(sums.view(self.size, -1, sums.shape[1]))
        total = torch.where(is_read, returned.float(), 0.0).sum(0).to(sums.dtype)
        if values is None:
            return total, None
        of_tokens = self._all_to_all(values.view(self.size, -1, self.num_experts))
        return total, of_tokens.transpose(0, 1).reshape(scores.shape)

    def close(self) -> None:
        """Free the buffers, before the process groups are destroyed; all ranks together. Here there are none."""

    def _all_to_all(self, parts: Tensor) -> Tensor:
        """Part r of each rank, on rank r."""
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=self.group)
        return received


class PeerBuffer(NamedTuple):
    """A tensor that all ranks of a group have and reach.

    Attributes:
        local: this rank's.
        addresses: int64 [ranks], of all ranks'.
        handle: torch's, which has the barriers.
    """

    local: Tensor
    addresses: Tensor
    handle: Any


class PeerExchange(Exchange):
    """The same through memory that the GPUs of a node reach: by kernels of one launch, without the host."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int, device: torch.device):
        super().__init__(group, num_experts, device)
        self._buffers: dict[str, PeerBuffer] = {}
        # A CUDA graph may have the addresses of buffers that larger ones have replaced.
        self._replaced: list[PeerBuffer] = []

    def send(self, rows: Tensor, scores: Tensor, sends_scores: bool) -> tuple[Tensor, Optional[Tensor]]:
        """As in the base class; what arrived is a part of the buffers."""
        from megafp8.kernels.peer_rows import send_rows  # needs Triton

        arrived = self._buffer("rows", rows, rows.shape[1])
        arrived_scores = self._buffer("scores", scores, self.num_experts)
        to_scores = arrived_scores.addresses if sends_scores else None
        send_rows(rows, scores, arrived.addresses, to_scores, self.rank, self.num_experts)
        arrived.handle.barrier()
        end = self.size * len(rows)
        # Detached: autograd must not take what arrives in different layers for views of one tensor.
        return arrived.local[:end].detach(), arrived_scores.local[:end].detach() if sends_scores else None

    def add(self, sums: Tensor, scores: Tensor, values: Optional[Tensor]) -> tuple[Tensor, Optional[Tensor]]:
        """As in the base class."""
        from megafp8.kernels.peer_rows import add_rows  # needs Triton

        ours = self._buffer("sums", sums, sums.shape[1])
        ours.local[: len(sums)].copy_(sums)
        our_values = None
        if values is not None:
            our_values = self._buffer("values", values, self.num_experts)
            our_values.local[: len(values)].copy_(values)
        ours.handle.barrier()
        of_values = None if our_values is None else our_values.addresses
        return add_rows(scores, ours.addresses, of_values, sums, self.rank, self.num_experts)

    def close(self) -> None:
        """As in the base class; nobody reads them any more."""
        torch.cuda.synchronize()
        dist.barrier(self.group)
        self._buffers.clear()
        self._replaced.clear()

    def _buffer(self, name: str, like: Tensor, width: int) -> PeerBuffer:
        """A buffer with the rows of all ranks' tokens. The first call with more tokens than before allocates it, on all
        ranks at once: they have the same number of tokens."""
        import torch.distributed._symmetric_memory as symmetric_memory

        # `rows` and `scores` come as this rank's tokens, `sums` and `values` as all ranks'.
        num_rows = len(like) if name in ("sums", "values") else self.size * len(like)
        found = self._buffers.get(name)
        if found is not None:
            # Others write by this width and dtype.
            assert (found.local.shape[1], found.local.dtype) == (width, like.dtype)
            if len(found.local) >= num_rows:
                return found
            self._replaced.append(found)
        local = symmetric_memory.empty(num_rows, width, dtype=like.dtype, device=like.device)
        handle = symmetric_memory.rendezvous(local, self.group)
        addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=like.device)
        self._buffers[name] = PeerBuffer(local, addresses, handle)
        return self._buffers[name]


@functools.cache
def exchange_of(group: dist.ProcessGroup, num_experts: int) -> Exchange:
    """The exchange of all layers of a model: they use its buffers one after the other."""
    if torch.cuda.is_available():
        return PeerExchange(group, num_experts, torch.device("cuda", torch.cuda.current_device()))
    return Exchange(group, num_experts, torch.device("cpu"))


class _ToExperts(torch.autograd.Function):
    """Rows and scores of tokens to the ranks of their experts; gradients come back and are added."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, scores: Tensor, exchange: Exchange) -> tuple[Tensor, Optional[Tensor]]:
        ctx.exchange, ctx.scores = exchange, scores
        return exchange.send(rows.contiguous(), scores, sends_scores=True)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_scores: Tensor) -> tuple[Tensor, Optional[Tensor], None]:
        grad, of_scores = ctx.exchange.add(grad_rows.contiguous(), ctx.scores, grad_scores.contiguous())
        return grad, of_scores, None


class _FromExperts(torch.autograd.Function):
    """The sums of tokens from the ranks of their experts; their gradients are sent as the rows were."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, scores: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.scores = exchange, scores
        return exchange.add(sums.contiguous(), scores, None)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.send(grad.contiguous(), ctx.scores, sends_scores=False)[0], None, None


class Arrived(NamedTuple):
    """The tokens of all ranks, as the experts of this rank get them.

    Attributes:
        rows: [ranks x T, W]; undefined for tokens without an expert here.
        probs: FP32 [ranks x T, E of this rank]; 0 where a token does not have the expert.
        routing_map: bool [ranks x T, E of this rank].
        scores: of this rank's own tokens, for `from_experts`.
    """

    rows: Tensor
    probs: Tensor
    routing_map: Tensor
    scores: Tensor

    def num_from_others(self, exchange: Exchange) -> Tensor:
        """Rows that other ranks have sent, on the device."""
        of_ranks = self.routing_map.view(exchange.size, -1, exchange.num_experts).any(-1).sum(1)
        return of_ranks.sum() - of_ranks[exchange.rank]


def to_experts(exchange: Exchange, rows: Tensor, probs: Tensor, routing_map: Tensor) -> Arrived:
    """Send tokens [T, W] to the ranks of their experts.

    Args:
        probs: FP32 [T, E].
        routing_map: bool [T, E].
    """
    scores = torch.where(routing_map, probs.float(), NO_EXPERT)
    arrived, arrived_scores = _ToExperts.apply(rows, scores, exchange)
    has_expert = arrived_scores != NO_EXPERT
    return Arrived(arrived, torch.where(has_expert, arrived_scores, 0.0), has_expert, scores.detach())


def from_experts(exchange: Exchange, sums: Tensor, arrived: Arrived) -> Tensor:
    """The sums [T, W] over all ranks of what the experts computed of this rank's tokens.

    Args:
        sums: of each arrived token over its experts on this rank, [ranks x T, W].
    """
    return _FromExperts.apply(sums, arrived.scores, exchange)
