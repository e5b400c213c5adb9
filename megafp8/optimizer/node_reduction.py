"""Gradient reduction on two levels (`--grad-reduce-fp8-intra-node bf16|fp32`): codes are sent between nodes only.

With N nodes of L ranks each, rank l of node n reduces shard n L + l of a bucket:

    1. within a node, a reduce-scatter of BF16 or FP32 gradients: rank l receives the node's sums of the N shards
       l, L + l, ..., (N - 1) L + l
    2. between the ranks l of all nodes, the reduction of `fp8_gradients` of these N shards: codes of the node's sums
    3. all-reduce only: within a node, an all-gather of the sums

A rank receives 1 / L of the codes that other nodes would send it without these levels, and one error of rounding is
added for each node, not for each rank. Within a node it receives (L - 1) / L of the bucket in the dtype of that level.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.errors import ConfigError
from megafp8.mcore.grad_reduction import Reduction
from megafp8.optimizer.fp8_gradients import Fp8Reduction, GradientCodes, PipelinedReduction, divide
from megafp8.optimizer.gradient_slices import Shard
from megafp8.optimizer.reduction_works import PartialWork

FLAG = "--grad-reduce-fp8-intra-node"


class Nodes(NamedTuple):
    """The ranks that share gradients with this one.

    Attributes:
        intra: on this node.
        inter: with the same position on every node.
        dtype: of the sums within a node.
    """

    intra: dist.ProcessGroup
    inter: dist.ProcessGroup
    dtype: torch.dtype

    def shard_index(self, node: int) -> int:
        """The shard that the rank with this one's position on a node reduces."""
        return node * self.intra.size() + self.intra.rank()


@cache
def ranks_by_node(ranks: tuple[int, ...], ranks_per_node: int) -> tuple[tuple[int, ...], ...]:
    """Global ranks of a group, by node.

    Raises:
        ConfigError: nodes have different numbers of them, or there is one node, or one rank on each.
    """
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    sizes = [len(each) for each in nodes.values()]
    if len(nodes) == 1 or max(sizes) == 1 or min(sizes) != max(sizes) or sorted(ranks) != list(ranks):
        raise ConfigError(
            f"{FLAG}: the {len(ranks)} ranks that share gradients must lie on several nodes, the same number of them "
            f"and more than one on each; here nodes have {', '.join(map(str, sizes))} of them (LOCAL_WORLD_SIZE "
            f"{ranks_per_node}): remove the flag, or use another layout"
        )
    return tuple(tuple(each) for each in nodes.values())


class NodeGroups:
    """Builds the process groups of the two levels, once for each group of ranks that share gradients."""

    def __init__(self, ranks_per_node: int, dtype: torch.dtype):
        self.ranks_per_node, self.dtype = ranks_per_node, dtype
        self._built: dict[tuple[int, ...], Nodes] = {}

    def of(self, group: dist.ProcessGroup) -> Nodes:
        """The two groups of this rank. Collective over the ranks of `group`.

        Raises:
            ConfigError: see `ranks_by_node`.
        """
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._built:
            nodes, own = ranks_by_node(ranks, self.ranks_per_node), dist.get_rank()
            intra = next(node for node in nodes if own in node)
            inter = [node[intra.index(own)] for node in nodes]
            # Only the ranks of a new group have to call it.
            groups = [dist.new_group(list(each), use_local_synchronization=True) for each in (intra, inter)]
            self._built[ranks] = Nodes(groups[0], groups[1], self.dtype)
        return self._built[ranks]


def sum_within_node(gradients: Tensor, intra: dist.ProcessGroup, step: Fp8Reduction) -> Tensor:
    """Add gradients over the ranks of a node, in their dtype.

    Args:
        gradients: [ranks of the node x n].

    Returns:
        This rank's sums [n].
    """
    sums = gradients.new_empty(len(gradients) // intra.size())
    dist.reduce_scatter_tensor(sums, gradients, group=intra)
    step.count_within_node(sums.nbytes * (intra.size() - 1))
    return sums


class NodeWork:
    """The reduction of a bucket between nodes under way."""

    def __init__(self, work: PartialWork, reduction: NodeReduction, request: Reduction):
        self._work, self._reduction, self._request = work, reduction, request

    def add(self) -> None:
        """Wait for the codes and add them; in an all-reduce, start to send the sums between nodes."""
        self._work.add()

    def receive(self) -> None:
        """In an all-reduce, wait for the sums, and send them to the other ranks of the node."""
        self._work.receive()
        if self._request.is_complete:
            self._reduction.share(self._request.gradients)

    def wait(self) -> None:
        """Finish it."""
        self.add()
        self.receive()


class NodeReduction:
    """The reduction of one bucket on two levels, in place of `PipelinedReduction`.

    Args:
        shards: of all ranks that share gradients, by rank.
    """

    def __init__(
        self,
        gradients: Tensor,
        shards: Sequence[Shard],
        num_parameters: int,
        nodes: Nodes,
        settings: GradientCodes,
        step: Fp8Reduction,
    ):
        self.nodes, self.step = nodes, step
        own = [shards[nodes.shard_index(node)] for node in range(nodes.inter.size())]
        self.between = PipelinedReduction(gradients, own, num_parameters, nodes.inter, settings, step)

    def start(self, request: Reduction) -> PartialWork:
        """Add the gradients of the node, then send the codes of its sums."""
        gradients, (intra, inter, dtype) = request.gradients, self.nodes
        by_node = self._by_node(gradients).to(dtype)
        # A reduce-scatter gives part l to rank l: the ranks of a node become the first dimension.
        sums = sum_within_node(by_node.transpose(0, 1).reshape(-1), intra, self.step).view(inter.size(), -1)
        if request.is_average:
            divide(sums, intra.size())
        # This rank's shards in the bucket get the node's sums. The other shards keep local values.
        for node, target in enumerate(self._own_shards(gradients)):
            target.copy_(sums[node, : len(target)])
        return NodeWork(self.between.start(request), self, request)

    def share(self, gradients: Tensor) -> None:
        """Send the sums of this rank's shards to the other ranks of the node, and write theirs."""
        intra, inter, _ = self.nodes
        # An all-gather takes parts of equal size; the last shard may be shorter.
        own = gradients.new_zeros(inter.size(), -(-len(gradients) // (inter.size() * intra.size())))
        for node, source in enumerate(self._own_shards(gradients)):
            own[node, : len(source)] = source
        gathered = own.new_empty(intra.size(), *own.shape)
        dist.all_gather_into_tensor(gathered.view(-1), own.view(-1), group=intra)
        self.step.count_within_node(own.nbytes * (intra.size() - 1))
        # Back to [nodes, ranks of a node, elements], the order of the bucket, without its padding.
        gradients.copy_(gathered.transpose(0, 1).reshape(-1)[: len(gradients)])

    def _by_node(self, gradients: Tensor) -> Tensor:
        """The bucket as [nodes, ranks of a node, elements of a shard], padded with zeros."""
        intra, inter, _ = self.nodes
        padding = -len(gradients) % (inter.size() * intra.size())
        padded = torch.cat([gradients, gradients.new_zeros(padding)]) if padding else gradients
        return padded.view(inter.size(), intra.size(), -1)

    def _own_shards(self, gradients: Tensor) -> list[Tensor]:
        """Views of the shards that are summed between the nodes by ranks with this one's position."""
        intra, inter, _ = self.nodes
        size = -(-len(gradients) // (inter.size() * intra.size()))
        starts = [self.nodes.shard_index(node) * size for node in range(inter.size())]
        return [gradients[start : start + size] for start in starts]


def build_node_groups(intra_node: str, ranks_per_node: int) -> Optional[NodeGroups]:
    """The groups of a run; None where all ranks exchange codes."""
    if intra_node == "fp8":
        return None
    return NodeGroups(ranks_per_node, {"bf16": torch.bfloat16, "fp32": torch.float32}[intra_node])
