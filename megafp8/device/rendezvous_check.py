"""Program of the node check: the rendezvous of all nodes of a job, as torchrun does it.

    python -m megafp8.device.rendezvous_check '{"nodes": ["a", "b"], "node": 0, ...}'

The argument is a `megafp8.device.node_check_ranks.NodeRank`. The first node hosts torchrun's store, where all nodes
meet. Then they meet at the ranks' store, which may be on another node. Exit status 0, or an error on standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from datetime import timedelta

from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters, RendezvousTimeoutError, registry

from megafp8.device.node_check_ranks import NodeRank
from megafp8.device.rendezvous import first_line, join_store, wait_for_listener
from megafp8.errors import PeerLost
from megafp8.utils.strict_json import parse_json


def rendezvous(node_rank: NodeRank) -> None:
    """Rendezvous of all nodes; one process per node calls it.

    Raises:
        RendezvousError, RuntimeError, PeerLost: not all nodes arrived in time.
    """
    host, size, is_host = node_rank.nodes[0], len(node_rank.nodes), node_rank.node == 0
    if not is_host:
        wait_for_listener(host, node_rank.port, node_rank.timeout_s)
    handler = registry.get_rendezvous_handler(RendezvousParameters(
        backend="c10d", endpoint=f"{host}:{node_rank.port}", run_id="check", min_nodes=size, max_nodes=size,
        local_addr=node_rank.nodes[node_rank.node], is_host=is_host, read_timeout=max(1, round(node_rank.timeout_s)),
        join_timeout=max(1, round(node_rank.timeout_s)),
    ))  # fmt: skip
    info = handler.next_rendezvous()
    address = info.bootstrap_store_info
    os.environ |= {"MASTER_ADDR": address.master_addr, "MASTER_PORT": str(address.master_port),
                   "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    store = join_store(info.rank, size, node_rank.timeout_s)
    store.set(f"left{info.rank}", "")
    with contextlib.suppress(RuntimeError):  # the host of the store must outlive its clients
        store.wait([f"left{rank}" for rank in range(size)], timedelta(seconds=node_rank.timeout_s))


def main(text: str) -> None:
    node_rank = NodeRank(**parse_json(text))
    where = f"{node_rank.nodes[0]}:{node_rank.port}"
    try:
        rendezvous(dataclasses.replace(node_rank, nodes=tuple(node_rank.nodes)))
    except RendezvousTimeoutError:
        sys.exit(f"at {where}: not all {len(node_rank.nodes)} nodes connected within {node_rank.timeout_s:g} s")
    except (RendezvousError, RuntimeError, PeerLost) as error:
        cause = f": {first_line(error.__cause__)}" if error.__cause__ and not isinstance(error, PeerLost) else ""
        sys.exit(f"at {where}: {first_line(error)}{cause}")
    sys.stderr.flush()
    os._exit(0)  # skips the handler's threads, which would wait for a store that is gone


if __name__ == "__main__":
    main(sys.argv[1])
