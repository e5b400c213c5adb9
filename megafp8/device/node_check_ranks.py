"""The ranks of the node check: their positions, and the order of the links between nodes. Needs no torch.

The nodes form a ring in which each link is a group of its own, so that failures can be attributed: a bad node fails in
both of its links, while its neighbors' other links work. Links without a common node run at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

# Ports for the rendezvous and the links. Links on the same machine, as in tests, need different ports.
NUM_CHECK_PORTS = 100


@dataclass(frozen=True, kw_only=True)
class NodeRank:
    """The position of a rank in the node check.

    Attributes:
        nodes: addresses of all nodes, in the same order on all ranks.
        node: index of this rank's node.
        rank: local rank on the node.
        ranks_per_node: one per GPU; one without GPUs.
        port: port of the rendezvous of all nodes; links use the ports after it.
        store: file store for the rendezvous of this node's ranks, on a local disk.
        timeout_s: for each rendezvous and each all-reduce.
    """

    nodes: tuple[str, ...]
    node: int
    rank: int
    ranks_per_node: int
    port: int
    store: str
    timeout_s: float
    is_gpu: bool


def node_links(node: int, num_nodes: int) -> list[int]:
    """The links of a node in the order in which they are tested. Link i joins nodes i and i + 1."""
    num_links = num_nodes if num_nodes > 2 else num_nodes - 1
    own_links = {(node - 1) % num_nodes, node} & {*range(num_links)}
    # First even links, then odd links, then the last link of an odd ring, which shares a node with both kinds.
    return sorted(own_links, key=lambda link: 2 if link == num_nodes - 1 and num_nodes % 2 else link % 2)


def link_members(link: int, num_nodes: int) -> tuple[int, int]:
    """Indices of the two nodes that a link joins."""
    return link, (link + 1) % num_nodes
